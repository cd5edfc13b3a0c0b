//! A file that several threads read at different offsets.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use numcore::{Error, Result, read_exact_at};

/// A file of a known size, read by offset. No position is shared, so threads need no lock.
///
/// Reading takes one copy out of the page cache. A memory map would spare it, but a file that shrinks while it is
/// mapped ends the process.
#[derive(Debug)]
pub(crate) struct PositionedFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl PositionedFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let open = || {
            let file = File::open(path)?;
            let len = file.metadata()?.len();
            Ok((file, len))
        };
        let (file, len) = open().map_err(|e| Error::io(path, e))?;
        Ok(PositionedFile { path: path.into(), file, len })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of bytes at the time it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Fills `into` from `offset` on.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            let why = format!("{} bytes from {offset} on are past its end at {}", into.len(), self.len);
            return Err(self.malformed(why));
        }
        read_exact_at(&self.file, offset, into).map_err(|e| Error::io(&self.path, e))
    }

    /// Reads `len` bytes from `offset` on. The range is checked against the file's size before memory is taken.
    pub(crate) fn bytes(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let why = format!("{len} bytes from {offset} on are past its end at {}", self.len);
            return Err(self.malformed(why));
        }
        let mut bytes = vec![0; len as usize];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// An error about the file's contents.
    pub(crate) fn malformed(&self, why: impl Into<String>) -> Error {
        Error::format(self.path.display().to_string(), why)
    }
}
