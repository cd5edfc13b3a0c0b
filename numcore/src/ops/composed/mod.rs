//! Composed operations: each is a composition of views, gathers, matmuls, reductions and pointwise programs, written
//! once over [`Apply`]. They therefore work on tensors and on variables of the tape, are differentiable to any order,
//! and run on every runtime. Shapes are given with letters; PyTorch's name of every method is an alias.
//!
//! An output's shape may depend on values, which are then read back while the caller waits for the device. `nonzero`,
//! `unique` and `bincount` are therefore methods of tensors alone, and masks that select are tensors.

mod columns;
mod conv;
mod diagonal;
mod distance;
pub(crate) mod extreme_pool;
mod fft;
mod grid_sample;
mod indexing;
mod interpolate;
pub(crate) mod mean_pool;
mod padding;
mod repeat;
mod scatter;
mod search;
mod select;
mod suppression;
mod taps;
mod unique;
mod windows;

pub use columns::ColumnOps;
pub use conv::{ConvNd, ConvOps, ConvPadding};
pub use diagonal::DiagonalOps;
pub use distance::DistanceOps;
pub use fft::{FftNorm, FftOps, Stft, Window};
pub use grid_sample::{GridSample, GridSampleOps, OutsideGrid};
pub use indexing::{AxisIndex, AxisRange, Ellipsis, IndexingOps, Indices, NewAxis};
pub use interpolate::{Interpolate, InterpolateOps, Interpolation, Resize};
pub use padding::{PadMode, PadOps};
pub use repeat::{RepeatOps, meshgrid};
pub(crate) use scatter::Sorted;
pub use scatter::{ScatterOps, ScatterReduction};
pub use search::SearchOps;
pub use select::SelectOps;
pub use suppression::non_max_suppression;
pub use unique::Unique;
pub use windows::{PoolOps, PoolOptions};

use super::{Apply, PointwiseOps};
use crate::{DType, Result, Shape, Tensor, tensor::room};

/// Applies `f` to `x` upcast to `f32` if it is f16 or bf16, and rounds the result once.
#[track_caller]
fn widened<T: Apply>(x: &T, f: impl FnOnce(&T) -> Result<T>) -> Result<T> {
    let dtype = x.spec().dtype;
    if !dtype.is_half() {
        return f(x);
    }
    f(&x.to_dtype(dtype.compute())?)?.to_dtype(dtype)
}

/// Host values as a constant of `dtype`, which has no gradient.
#[track_caller]
fn constant<T: Apply>(like: &T, shape: impl AsRef<[usize]>, dtype: DType, values: &[f64]) -> Result<T> {
    let mut values = values.iter().copied();
    Tensor::from_f64_fn(like.runtime(), shape, dtype, || values.next().unwrap_or(0.0)).map(T::constant)
}

/// Positions from the host, `i64`.
#[track_caller]
fn positions<T: Apply>(like: &T, shape: impl AsRef<[usize]>, values: &[i64]) -> Result<T> {
    Tensor::from_slice(like.runtime(), shape, values).map(T::constant)
}

/// Zeros (or `false`) that take no memory: one element, repeated.
#[track_caller]
fn zeros<T: Apply>(like: &T, shape: Shape, dtype: DType) -> Result<T> {
    use super::ViewOps;
    Ok(T::constant(Tensor::zeros(like.runtime(), Shape::SCALAR, dtype)?.broadcast_to(shape)?))
}

/// The shape with `size` along one axis and 1 along the others, so that a vector broadcasts along the axis of a tensor.
fn along(rank: usize, axis: usize, size: usize) -> Vec<usize> {
    (0..rank).map(|i| if i == axis { size } else { 1 }).collect()
}
