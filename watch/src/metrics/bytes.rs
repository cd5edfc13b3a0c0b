//! The wire form of metrics: a row of integers.

use numcore::{Error, Result};

/// The numbers as bytes.
pub(super) fn of(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Reads the numbers of a wire form.
pub(super) fn read(op: &'static str, bytes: &[u8]) -> Result<Vec<u64>> {
    match bytes.as_chunks::<8>() {
        (numbers, []) => Ok(numbers.iter().map(|&number| u64::from_le_bytes(number)).collect()),
        _ => Err(other(op)),
    }
}

/// The error for a wire form of another kind of metric.
pub(super) fn other(op: &'static str) -> Error {
    Error::mismatch(
        op,
        "the counts of another rank are not of a metric with these options; make equal metrics on every rank",
    )
}
