//! Records of event files: a length and data, each followed by a checksum.

use crc32c::crc32c;

/// A record that holds `data`.
pub(super) fn of(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), data, &masked(data)].concat()
}

/// A checksum that may itself be part of data with a checksum.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}
