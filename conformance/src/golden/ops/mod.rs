//! The op tables, which map PyTorch's name of an op to its computation in this framework. One row per op, one file per
//! family.

mod loss;
mod matmul;
mod nn;
mod pointwise;
mod recurrent;
mod reduce;
mod shape;

use numcore::Runtime;

use super::call::OpFn;

/// The look-up function of one table.
type Table<R> = fn(&str) -> Option<OpFn<R>>;

/// The row of an op, from the table that has it.
pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let tables: [Table<R>; 7] =
        [pointwise::find, reduce::find, shape::find, matmul::find, nn::find, recurrent::find, loss::find];
    tables.iter().find_map(|find| find(op))
}
