//! Rows of a batch that count, if others only fill it up.

use std::cell::Cell;

/// The number of rows of a batch that count: the first ones. The others only fill it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedRows {
    /// The number of rows that count.
    pub count: usize,
    /// The number of all rows.
    pub rows: usize,
}

impl CountedRows {
    /// The rows of a batch that is computed for other ranks alone: no row counts.
    pub const NONE: Self = CountedRows { count: 0, rows: 1 };
}

thread_local! {
    static COUNTED: Cell<Option<CountedRows>> = const { Cell::new(None) };
}

/// Sets which rows count of the batches that this thread runs through models from now on; none for all. Layers that
/// compute statistics over rows read it, as [`BatchNorm`](crate::BatchNorm) and [mixtures of
/// experts](crate::moe::Routing::loads) do. Gives what held before. Loops set it.
pub fn set_counted_rows(counted: Option<CountedRows>) -> Option<CountedRows> {
    COUNTED.replace(counted)
}

/// The number of rows that count among `n`. They are the first ones, equally many for each row of the batch. If `n` is
/// no multiple of the batch's rows, every row counts.
pub fn counted_rows(n: usize) -> usize {
    match COUNTED.get() {
        Some(CountedRows { count: 0, .. }) => 0,
        Some(CountedRows { count, rows }) if rows > 0 && n.is_multiple_of(rows) => n / rows * count,
        _ => n,
    }
}
