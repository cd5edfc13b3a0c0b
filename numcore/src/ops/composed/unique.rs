//! Distinct values, and counts of integers. Output shapes depend on values, so these are methods of tensors only and
//! wait for the device.

use super::SelectOps;
use crate::{
    DType, Error, Result, Runtime, Tensor, Within,
    ops::{IndexOps, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps, cat},
};

/// The distinct values of a tensor.
pub struct Unique<R: Runtime> {
    /// The distinct elements in ascending order, `[M]`, or distinct slices in lexicographic order, `[.., M, ..]`. Each
    /// NaN is distinct.
    pub values: Tensor<R>,
    /// The index in `values` of every element (the tensor's shape) or of every slice (`[L]`), `i64`.
    pub inverse: Tensor<R>,
    /// The number of occurrences of each value, `[M]`, `i64`.
    pub counts: Tensor<R>,
    /// The first position of each value, `[M]`, `i64`: flat and row-major for elements, along the axis for slices.
    pub first: Tensor<R>,
}

impl<R: Runtime> Tensor<R> {
    /// The distinct elements, in ascending order. Any dtype.
    #[track_caller]
    pub fn unique(&self) -> Result<Unique<R>> {
        let shape = *self.shape();
        let rows = self.reshape([shape.numel(), 1])?;
        let unique = distinct(&rows)?;
        let count = unique.counts.dims()[0];
        Ok(Unique { values: unique.values.reshape([count])?, inverse: unique.inverse.reshape(shape)?, ..unique })
    }

    /// The distinct slices of `self: [.., L, ..]` along `axis`, in lexicographic order. Takes one stable sort for each
    /// element of a slice.
    #[doc(alias = "unique_dim")]
    #[track_caller]
    pub fn unique_along(&self, axis: isize) -> Result<Unique<R>> {
        let shape = *self.shape();
        let at = shape.axis("unique", axis)?;
        let first = self.transpose(0, at as isize)?;
        let rows = first.reshape([shape[at], shape.numel() / shape[at].max(1)])?;
        let unique = distinct(&rows)?;
        let count = unique.counts.dims()[0];
        let values = unique.values.reshape(first.shape().with(0, count))?.transpose(0, at as isize)?;
        Ok(Unique { values, ..unique })
    }

    /// Counts the occurrences of each of `0 .. max(M, minlength)` among the elements of `self`, where `M − 1` is the
    /// largest. Elements are integers, none negative. With `weights`, of `self`'s shape, it sums the weights of these
    /// elements instead. The dtype is `i64`, or that of the weights.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Self>, minlength: usize) -> Result<Self> {
        const OP: &str = "bincount";
        if !self.dtype().is_int() {
            return Err(Error::dtype(OP, &[self.dtype()], "counts integers; cast with `to_dtype`")).at_caller();
        }
        if let Some(w) = weights.filter(|w| w.shape() != self.shape()) {
            return Err(Error::shape(OP, &[*self.shape(), *w.shape()], "values and weights must have one shape"))
                .at_caller();
        }
        let n = self.shape().numel();
        let index = self.reshape([n])?.to_dtype(DType::I64)?;
        let mut length = minlength;
        if n > 0 {
            let lowest = index.amin_all()?.item()?;
            if lowest < 0.0 {
                return Err(Error::range(OP, "lowest value", lowest, "at least 0 to be counted")).at_caller();
            }
            length = length.max(index.amax_all()?.item()? as usize + 1);
        }
        let ones = || Tensor::ones(self.runtime(), [1], DType::I64)?.broadcast_to([n]);
        let src = weights.map_or_else(ones, |w| w.reshape([n]))?;
        Tensor::zeros(self.runtime(), [length], src.dtype())?.scatter_add(0, &index, &src)
    }
}

/// The distinct rows of `x: [L, K]`, in lexicographic order.
#[track_caller]
fn distinct<R: Runtime>(x: &Tensor<R>) -> Result<Unique<R>> {
    let rt = x.runtime();
    let (n, width) = (x.dims()[0], x.dims()[1]);
    let count = |n| Tensor::arange(rt, 0i64, 1i64, n, DType::I64);
    if n == 0 {
        let none = || Tensor::zeros(rt, [0], DType::I64);
        return Ok(Unique { values: x.clone(), inverse: none()?, counts: none()?, first: none()? });
    }
    // Sorts by the last column first, since later sorts are stable.
    let mut order = count(n)?;
    for column in (0..width).rev() {
        let keys = x.select(1, column)?.index_select(0, &order)?;
        order = order.index_select(0, &keys.argsort(0, false)?)?;
    }
    let sorted = x.index_select(0, &order)?;
    let first = Tensor::full(rt, [1], DType::Bool, true)?;
    let starts = if width == 0 {
        cat(&[&first, &Tensor::full(rt, [n - 1], DType::Bool, false)?], 0)?
    } else {
        let differs = sorted.narrow(0, 1, n - 1)?.ne(&sorted.narrow(0, 0, n - 1)?)?;
        let differs = if n == 1 { differs.reshape([0])? } else { differs.any(&[1])? };
        cat(&[&first, &differs], 0)?
    };
    let group = starts.to_dtype(DType::I64)?.cumsum(0)?.sub(1.0)?;
    let inverse = Tensor::zeros(rt, [n], DType::I64)?.scatter_add(0, &order, &group)?;
    let firsts = count(n)?.masked_select(&starts)?;
    let ends = cat(&[&firsts.narrow(0, 1, firsts.dims()[0] - 1)?, &Tensor::full(rt, [1], DType::I64, n)?], 0)?;
    Ok(Unique {
        values: sorted.index_select(0, &firsts)?,
        inverse,
        counts: ends.sub(&firsts)?,
        first: order.index_select(0, &firsts)?,
    })
}
