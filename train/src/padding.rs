//! Rows of a batch that only fill it up.

use data::Batch;
use nn::CountedRows;

/// The counted and all rows of a batch, for layers, if some rows are only padding.
pub(crate) fn counted<B>(batch: &Batch<B>) -> Option<CountedRows> {
    let Batch { count, rows, .. } = *batch;
    (count < rows).then_some(CountedRows { count, rows })
}
