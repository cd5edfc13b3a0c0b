//! Gathers and their adjoint, scatter-adds. One pair of kernels serves embeddings, `index_select`, `index_add` and
//! one-hot, because an index repeated along an axis has a stride of 0.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{
    Apply, Backprop, Bits, PointwiseOps, Rule, Saves, Spec, Specs, ViewOp, ViewOps, fill_zero,
    rule::{index, same_dtype},
};
use crate::{Accumulate, DType, Error, Out, Result, Runtime, Shape, Tensor};

/// The gather `out[.., i, ..] = x[.., index[.., i, ..], ..]` along an axis; inputs `x`, `index`.
#[derive(Clone, Debug)]
pub struct Gather {
    axis: usize,
}

impl Gather {
    /// The axis along which the index names positions.
    pub fn axis(&self) -> usize {
        self.axis
    }
}

impl Rule for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        index("gather", ins[1])?;
        let (x, i) = (ins[0].shape, ins[1].shape);
        if x.rank() != i.rank() || x.with(self.axis, 0) != i.with(self.axis, 0) {
            return Err(Error::shape("gather", &[x, i], format!("sizes may differ only along axis {}", self.axis)));
        }
        Ok(smallvec![Spec { shape: i, dtype: ins[0].dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        ins[0].runtime().gather(ins[0].view(), self.axis, ins[1].view(), outs[0].reborrow())
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::inputs(&[1]))
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, index) = (cx.grad()?, cx.input(1)?);
        let size = cx.input_spec(0)?.shape[self.axis];
        cx.give(0, ScatterAdd { axis: self.axis, size }.into(), &[&g, &index])
    }
}

/// Zeros of `size` along an axis, with `src[.., i, ..]` added at `index[.., i, ..]`; inputs `src`, `index`.
/// Contributions to one position are added in ascending order of `i`.
#[derive(Clone, Debug)]
pub struct ScatterAdd {
    axis: usize,
    size: usize,
}

impl ScatterAdd {
    pub(super) fn new(axis: usize, size: usize) -> Self {
        ScatterAdd { axis, size }
    }

    /// The axis along which the index names positions.
    pub fn axis(&self) -> usize {
        self.axis
    }

    /// This op for operands with another axis in front; `None` unless it sums along the first axis.
    pub(super) fn beside(&self) -> Option<Self> {
        (self.axis == 0).then_some(ScatterAdd { axis: 1, ..*self })
    }
}

impl Rule for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        index("scatter_add", ins[1])?;
        if ins[0].dtype == DType::Bool {
            let why = "truth values have no sum; cast them to `u8` first";
            return Err(Error::dtype("scatter_add", &[DType::Bool], why));
        }
        if ins[0].shape != ins[1].shape {
            return Err(Error::shape(
                "scatter_add",
                &[ins[0].shape, ins[1].shape],
                "source and index must have one shape",
            ));
        }
        Ok(smallvec![Spec { shape: ins[0].shape.with(self.axis, self.size), dtype: ins[0].dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let rt = ins[0].runtime();
        if outs[0].how == Accumulate::Overwrite {
            fill_zero(rt, outs[0].reborrow())?;
        }
        rt.scatter_add(ins[0].view(), self.axis, ins[1].view(), outs[0].view.reborrow())
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::inputs(&[1]))
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, index) = (cx.grad()?, cx.input(1)?);
        cx.give(0, Gather { axis: self.axis }.into(), &[&g, &index])
    }
}

/// Gather and scatter-add. Indices are `i64`; an index out of range is an error.
pub trait IndexOps: Apply {
    /// Gathers `out[.., i, ..] = self[.., index[.., i, ..], ..]` along `axis`. `index` has as many axes as `self`, and
    /// no larger sizes on the other axes.
    #[track_caller]
    fn gather(&self, axis: isize, index: &Self) -> Result<Self> {
        let axis = self.spec().shape.axis("gather", axis)?;
        Self::apply1(Gather { axis }, &[&narrowed("gather", self, axis, index)?, index])
    }
    /// `self` with `src[.., i, ..]` added at `index[.., i, ..]` along `axis`.
    #[track_caller]
    fn scatter_add(&self, axis: isize, index: &Self, src: &Self) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("scatter_add", axis)?;
        same_dtype("scatter_add", &[self.spec(), src.spec()])?;
        let src = narrowed("scatter_add", src, shape.rank(), index)?;
        let mut sum = Self::apply1(ScatterAdd { axis, size: shape[axis] }, &[&src, index])?;
        for i in (0..shape.rank()).filter(|&i| i != axis) {
            if sum.spec().shape[i] != shape[i] {
                sum = sum.embed(i as isize, shape[i], 0, 1)?;
            }
        }
        self.add(&sum)
    }
    /// The slices of `self` along `axis` named by `index: [N]`.
    #[track_caller]
    fn index_select(&self, axis: isize, index: &Self) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("index_select", axis)?;
        Self::apply1(Gather { axis }, &[self, &along("index_select", index, axis, shape)?])
    }
    /// `self` with slice `i` of `src` added to the slice along `axis` named by `index[i]`; `index: [N]`.
    #[track_caller]
    fn index_add(&self, axis: isize, index: &Self, src: &Self) -> Result<Self> {
        let shape = self.spec().shape;
        let at = shape.axis("index_add", axis)?;
        self.scatter_add(axis, &along("index_add", index, at, shape)?, src)
    }
    /// The embedding lookup: rows of the table `self: [V, D]` named by `index: [..]`, as `[.., D]`.
    #[track_caller]
    fn embedding(&self, index: &Self) -> Result<Self> {
        let (table, ids) = (self.spec().shape, index.spec().shape);
        if table.rank() != 2 {
            return Err(Error::shape("embedding", &[table, ids], "the table must be [V, D]"));
        }
        if let Err(error) = self::index("embedding", index.spec()) {
            return Err(Self::explained(error, &[self, index]));
        }
        let rows = self.index_select(0, &index.reshape([ids.numel()])?).map_err(|e| e.of_index("embedding", ids))?;
        rows.reshape([&ids[..], &[table[1]]].concat())
    }
    /// One-hot rows of `self` (`i64`): `[..]` becomes `[.., classes]`, `i64`. A value outside `0..classes` is an error,
    /// like an index out of range.
    #[track_caller]
    fn one_hot(&self, classes: usize) -> Result<Self> {
        index("one_hot", self.spec())?;
        let shape = self.spec().shape;
        let places = self.unsqueeze(-1)?;
        let one = Self::constant(Tensor::ones(self.runtime(), [], DType::I64)?);
        let ones = one.broadcast_to(places.spec().shape)?;
        let rows = ScatterAdd { axis: shape.rank(), size: classes };
        Self::apply1(rows, &[&ones, &places]).map_err(|e| e.of_index("one_hot", shape))
    }
}

impl<T: Apply> IndexOps for T {}

/// `x` narrowed to `index`'s sizes on every axis but `free`.
#[track_caller]
fn narrowed<T: Apply>(op: &'static str, x: &T, free: usize, index: &T) -> Result<T> {
    let (xs, is) = (x.spec().shape, index.spec().shape);
    let fits = xs.rank() == is.rank() && (0..xs.rank()).all(|i| i == free || is[i] <= xs[i]);
    if !fits {
        return Err(Error::shape(op, &[xs, is], "the index must have as many axes, and be no larger"));
    }
    (0..xs.rank()).filter(|&i| i != free && is[i] != xs[i]).try_fold(x.clone(), |x, i| x.narrow(i as isize, 0, is[i]))
}

/// The index `[N]` along `axis` of `shape`, repeated along the other axes.
#[track_caller]
fn along<T: Apply>(op: &'static str, index: &T, axis: usize, shape: Shape) -> Result<T> {
    let ids = index.spec();
    if ids.shape.rank() != 1 {
        return Err(Error::shape(op, &[shape, ids.shape], "the index must have one axis"));
    }
    if ids.dtype != DType::I64 {
        self::index(op, ids)?;
    }
    let thin = (0..shape.rank()).fold(shape, |s, i| s.with(i, if i == axis { ids.shape[0] } else { 1 }));
    T::apply1(ViewOp::Broadcast(shape.with(axis, ids.shape[0])), &[&index.reshape(thin)?])
}
