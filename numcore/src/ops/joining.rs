//! Concatenation, stacking, padding and triangles.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::{SmallVec, smallvec};

use super::{
    Apply, Backprop, Bits, PointwiseOps, Rule, Saves, Spec, Specs, ViewOp, ViewOps, copy_into, rule::same_dtype,
};
use crate::{DType, Error, Layout, Out, Result, Runtime, Shape, Tensor, pointwise::Program};

/// Concatenation of the inputs along an axis.
#[derive(Clone, Debug)]
pub struct Cat {
    pub(super) axis: usize,
    /// True if the result may be a view, where the inputs share memory and their layouts there form the result's.
    pub(super) seen: bool,
}

impl Cat {
    /// The axis along which the inputs follow each other.
    pub fn axis(&self) -> usize {
        self.axis
    }

    /// The inputs as one view, if a view is allowed and their layouts form one.
    pub(crate) fn view<R: Runtime>(&self, ins: &[&Tensor<R>]) -> Option<Tensor<R>> {
        if !self.seen || !ins.iter().all(|x| x.shares_memory_with(ins[0]) && x.dtype() == ins[0].dtype()) {
            return None;
        }
        let layouts: SmallVec<[Layout; 4]> = ins.iter().map(|x| *x.layout()).collect();
        Some(ins[0].part(ins[0].runtime().clone(), Layout::joined(&layouts, self.axis)?))
    }
}

impl Rule for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=usize::MAX
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let dtype = same_dtype("cat", ins)?;
        let shapes: Vec<Shape> = ins.iter().map(|s| s.shape).collect();
        let total = shapes.iter().fold(0, |n: usize, s| n.saturating_add(s.get(self.axis).copied().unwrap_or(0)));
        let agree = |s: &Shape| {
            s.rank() > self.axis && s.rank() == shapes[0].rank() && s.with(self.axis, 0) == shapes[0].with(self.axis, 0)
        };
        if !shapes.iter().all(agree) {
            return Err(Error::shape("cat", &shapes, format!("sizes may differ only along axis {}", self.axis)));
        }
        Ok(smallvec![Spec { shape: shapes[0].with(self.axis, total), dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let mut start = 0;
        for x in ins {
            let len = x.shape()[self.axis];
            let layout = outs[0].view.layout.slice(self.axis, start, len, 1)?;
            let mut part = outs[0].reborrow();
            part.view.layout = &layout;
            copy_into(x, part)?;
            start += len;
        }
        Ok(())
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::NONE)
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let mut start = 0;
        for i in 0..cx.inputs() {
            let len = cx.input_spec(i)?.shape[self.axis];
            cx.give(i, ViewOp::Slice { axis: self.axis, start, len, step: 1 }.into(), &[&g])?;
            start += len;
        }
        Ok(())
    }
}

/// Concatenates `xs` along an existing axis; the other sizes must agree.
#[track_caller]
pub fn cat<T: Apply>(xs: &[&T], axis: isize) -> Result<T> {
    let first = xs.first().ok_or_else(|| Error::range("cat", "number of tensors", 0usize, "at least 1"))?;
    let axis = first.spec().shape.axis("cat", axis)?;
    if xs.len() > Bits::MAX {
        let parts = xs.chunks(Bits::MAX).map(|c| cat(c, axis as isize)).collect::<Result<Vec<T>>>()?;
        return cat(&parts.iter().collect::<Vec<_>>(), axis as isize);
    }
    // The result is never a view: a caller may keep it for long, while an input's memory is written again.
    T::apply1(Cat { axis, seen: false }, xs)
}

/// Stacks `xs`, all of one shape, along a new axis.
#[track_caller]
pub fn stack<T: Apply>(xs: &[&T], axis: isize) -> Result<T> {
    let tall = xs.iter().map(|x| x.unsqueeze(axis)).collect::<Result<Vec<T>>>()?;
    let rank = tall.first().map_or(0, |t| t.spec().shape.rank()) as isize;
    cat(&tall.iter().collect::<Vec<_>>(), if axis < 0 { axis + rank } else { axis })
}

/// Concatenation, stacking, padding and triangles.
pub trait JoinOps: Apply {
    /// Pads with `value`: `pads[i]` gives the number of elements before and after axis `i`.
    #[track_caller]
    fn pad(&self, pads: &[(usize, usize)], value: f64) -> Result<Self> {
        let shape = self.spec().shape;
        if pads.len() != shape.rank() {
            let why = format!("{} pairs of padding for {} axes", pads.len(), shape.rank());
            return Err(Error::shape("pad", &[shape], why));
        }
        let zeros = pad_zeros(self, pads)?;
        if value == 0.0 {
            return Ok(zeros);
        }
        let inside = pad_zeros(&Tensor::full(self.runtime(), shape, DType::Bool, true)?, pads)?;
        zeros.where_cond(&Self::constant(inside), value)
    }
    /// The lower triangle of the last two axes: column − row ≤ `k`; zero elsewhere.
    #[track_caller]
    fn tril(&self, k: isize) -> Result<Self> {
        static TRIL: LazyLock<Program> = LazyLock::new(|| triangle("tril", false));
        triangular(self, &TRIL, k)
    }
    /// The upper triangle of the last two axes: column − row ≥ `k`; zero elsewhere.
    #[track_caller]
    fn triu(&self, k: isize) -> Result<Self> {
        static TRIU: LazyLock<Program> = LazyLock::new(|| triangle("triu", true));
        triangular(self, &TRIU, k)
    }
}

impl<T: Apply> JoinOps for T {}

#[track_caller]
fn pad_zeros<T: Apply>(x: &T, pads: &[(usize, usize)]) -> Result<T> {
    let mut x = x.clone();
    for (i, &(before, after)) in pads.iter().enumerate().filter(|(_, p)| **p != (0, 0)) {
        let len = x.spec().shape[i].saturating_add(before).saturating_add(after);
        x = x.embed(i as isize, len, before, 1)?;
    }
    Ok(x)
}

fn triangle(name: &'static str, upper: bool) -> Program {
    Program::build(name, 1, 3, |b, x, s| {
        let at = b.index().cast(DType::I64);
        let (row, column) = ((at / s[1]) % s[0], at % s[1]);
        let keep = if upper { (row + s[2]).le(column) } else { column.le(row + s[2]) };
        vec![keep.select(x[0], b.int(0).cast_like(x[0]))]
    })
}

#[track_caller]
fn triangular<T: Apply>(x: &T, program: &Program, k: isize) -> Result<T> {
    let shape = x.spec().shape;
    if shape.rank() < 2 {
        return Err(Error::shape(program.name(), &[shape], "needs at least two axes"));
    }
    let (rows, columns) = (shape[shape.rank() - 2], shape[shape.rank() - 1]);
    x.apply_program(program, &[], &[(rows as i64).into(), (columns as i64).into(), (k as i64).into()])
}
