//! Reading files: at any offset, from several threads, by records, and unpacked.

mod gzip;
mod positioned;
mod records;

pub(crate) use gzip::{GZIP, unpacked};
pub(crate) use positioned::PositionedFile;
pub(crate) use records::{Cutter, Records, lines};

/// The byte order mark with which some programs begin a file of UTF-8. It is no part of the text.
pub(crate) const MARK: [u8; 3] = *b"\xef\xbb\xbf";

/// The bytes behind a byte order mark, if there is one.
pub(crate) fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(&MARK).unwrap_or(bytes)
}
