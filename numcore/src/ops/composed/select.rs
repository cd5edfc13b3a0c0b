//! Selection of elements by coordinates, by flat positions, and by masks.

use std::sync::LazyLock;

use super::positions;
use crate::{
    DType, Error, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ScanOps, ViewOps, rule},
    pointwise::Program,
};

/// Selection by coordinates and masks. Indices are `i64`; an index out of range is an error.
pub trait SelectOps: Apply {
    /// `self: [B.., D1 .. DK, R..]` at `index: [B.., J.., K]` as `[B.., J.., R..]`. The last axis of the index holds
    /// coordinates along the `K` axes after the first `batch` axes, which both operands share. Negative coordinates
    /// count from the end. ONNX's `GatherND`.
    #[doc(alias = "index")]
    #[track_caller]
    fn gather_nd(&self, index: &Self, batch: usize) -> Result<Self> {
        const OP: &str = "gather_nd";
        let (shape, ids) = (self.spec().shape, index.spec().shape);
        rule::index(OP, index.spec())?;
        let depth = ids.last().copied().unwrap_or(0);
        let fits = ids.rank() > batch && shape.rank() >= batch + depth && shape[..batch] == ids[..batch];
        if !fits {
            let why = format!("the index must be [B.., J.., K], K axes after the first {batch}, which agree");
            return Err(Error::shape(OP, &[shape, ids], why));
        }
        let count = |sizes: &[usize]| sizes.iter().product::<usize>();
        let (outer, named) = (count(&shape[..batch]), &shape[batch..batch + depth]);
        let rest = &shape[batch + depth..];
        let flat = flat_positions(index, named)?.reshape([outer, count(&ids[batch..ids.rank() - 1])])?;
        let rows = self.reshape([outer * count(named), count(rest)])?;
        // Rows of later batches follow those of earlier ones; an index out of range must stay out of range.
        let starts: Vec<i64> = (0..outer).map(|b| (b * count(named)) as i64).collect();
        let flat = flat
            .lt(0.0)?
            .to_dtype(DType::I64)?
            .mul(-(shape.numel() as f64) - 1.0)?
            .add(&flat.add(&positions(self, [outer, 1], &starts)?)?)?;
        let picked = rows.index_select(0, &flat.reshape([flat.spec().shape.numel()])?);
        let picked = picked.map_err(|e| coordinate(OP, index, named, e))?;
        picked.reshape([&ids[..ids.rank() - 1], rest].concat())
    }
    /// The elements at flat, row-major positions; the result has the index's shape.
    #[track_caller]
    fn take(&self, index: &Self) -> Result<Self> {
        let (shape, ids) = (self.spec().shape, index.spec().shape);
        let flat = self.reshape([shape.numel()])?.index_select(0, &index.reshape([ids.numel()])?);
        flat.map_err(|e| e.of_index("take", ids))?.reshape(ids)
    }
    /// The elements where `mask` (`bool`) holds, in row-major order, `[M]`. The mask and `self` broadcast to one shape.
    ///
    /// `M` depends on the mask's values, so the call waits for the device, and the mask must be a tensor; `self` may be
    /// a variable.
    /// variable.
    #[track_caller]
    fn masked_select(&self, mask: &Tensor<Self::Runtime>) -> Result<Self> {
        let (a, b) = (self.spec().shape, *mask.shape());
        let Some(shape) = a.broadcast(&b) else {
            return Err(Error::shape("masked_select", &[a, b], "cannot be broadcast together"));
        };
        let places = places(&mask.broadcast_to(shape)?, "masked_select")?;
        self.broadcast_to(shape)?.reshape([shape.numel()])?.index_select(0, &Self::constant(places))
    }
    /// The slices along `axis` where `mask: [L]` (`bool`) holds, `[.., M, ..]`. A mask that is shorter than the axis
    /// drops the rest, as in ONNX's `Compress`. Waits for the device.
    #[track_caller]
    fn compress(&self, mask: &Tensor<Self::Runtime>, axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let at = shape.axis("compress", axis)?;
        if mask.shape().rank() != 1 || mask.dims()[0] > shape[at] {
            let why = format!("the mask must have one axis, no longer than axis {axis}");
            return Err(Error::shape("compress", &[shape, *mask.shape()], why));
        }
        self.index_select(axis, &Self::constant(places(mask, "compress")?))
    }
}

impl<T: Apply> SelectOps for T {}

impl<R: Runtime> Tensor<R> {
    /// The coordinates of the elements that are not 0 (`false`), in row-major order, `[M, rank]`, `i64`. Waits for
    /// the device, because `M` depends on the values; no gradient.
    #[track_caller]
    pub fn nonzero(&self) -> Result<Self> {
        let truth = if self.dtype() == DType::Bool { self.clone() } else { self.ne(0.0)? };
        let flat = places(&truth, "nonzero")?;
        let shape = *self.shape();
        let mut inner = 1;
        let mut coordinates = Vec::new();
        for &size in shape.iter().rev() {
            coordinates.push(flat.div(inner as f64)?.rem(size as f64)?);
            inner *= size.max(1);
        }
        coordinates.reverse();
        match coordinates.is_empty() {
            true => Tensor::zeros(self.runtime(), [flat.dims()[0], 0], DType::I64),
            false => crate::ops::stack(&coordinates.iter().collect::<Vec<_>>(), 1),
        }
    }
}

/// The flat, row-major positions where `mask` holds, `[M]`, by a prefix sum of the mask.
#[track_caller]
fn places<R: Runtime>(mask: &Tensor<R>, op: &'static str) -> Result<Tensor<R>> {
    if mask.dtype() != DType::Bool {
        return Err(Error::dtype(op, &[mask.dtype()], "the mask must be bool; compare first")).at_caller();
    }
    let n = mask.shape().numel();
    let mask = mask.reshape([n])?;
    let held = mask.sum_all()?.item()? as usize;
    if held == 0 {
        return Tensor::zeros(mask.runtime(), [0], DType::I64);
    }
    // The elements that are not selected all go to one position past the end.
    let beyond = Tensor::full(mask.runtime(), [1], DType::I64, held)?;
    let to = mask.to_dtype(DType::I64)?.cumsum(0)?.sub(1.0)?.where_cond(&mask, &beyond)?;
    let from = Tensor::arange(mask.runtime(), 0i64, 1i64, n, DType::I64)?;
    Tensor::zeros(mask.runtime(), [held + 1], DType::I64)?.scatter_add(0, &to, &from)?.narrow(0, 0, held)
}

/// Coordinates `[.., K]` in axes of these sizes as one flat position, or −1 if a coordinate is out of range.
#[track_caller]
pub(super) fn flat_positions<T: Apply>(index: &T, sizes: &[usize]) -> Result<T> {
    static STEP: LazyLock<Program> = LazyLock::new(|| {
        Program::build("gather_nd", 2, 1, |b, x, s| {
            let (before, own) = (x[0], x[1]);
            let at = own.lt(b.int(0)).select(own + s[0], own);
            let good = b.int(0).cast_like(before).le(before) & b.int(0).cast_like(at).le(at) & at.lt(s[0]);
            vec![good.select(before * s[0] + at, b.int(-1).cast_like(at))]
        })
    });
    let shape = index.spec().shape;
    let places: Shape = shape.remove(shape.rank() - 1);
    let start = super::zeros(index, places, DType::I64)?;
    (0..sizes.len())
        .try_fold(start, |flat, k| flat.apply_program(&STEP, &[&index.select(-1, k)?], &[(sizes[k] as i64).into()]))
}

/// An error of `op` for an index `[.., K]` into axes of these sizes; it names the first coordinate that is out of
/// range. The coordinate is searched only now, because an invalid flat position does not identify it.
#[track_caller]
pub(super) fn coordinate<T: Apply>(op: &'static str, index: &T, sizes: &[usize], e: Error) -> Error {
    static AT: LazyLock<Program> = LazyLock::new(|| {
        Program::build("gather_nd", 1, 1, |b, x, s| vec![x[0].lt(b.int(0)).select(x[0] + s[0], x[0])])
    });
    if !e.is_index() {
        return e.of_op(op);
    }
    let ids = index.spec().shape;
    let depth = ids.last().copied().unwrap_or(0).min(sizes.len());
    let looked_up = |k: usize| -> Result<T> {
        let at = index.detach().select(-1, k)?.apply_program(&AT, &[], &[(sizes[k] as i64).into()])?;
        let along = super::zeros(index, [sizes[k]].into(), DType::I64)?;
        along.index_select(0, &at.reshape([at.spec().shape.numel()])?)
    };
    let found =
        (0..depth).find_map(|k| looked_up(k).err().filter(Error::is_index).map(|e| e.of_coordinate(op, ids, k)));
    found.unwrap_or_else(|| e.of_op(op))
}
