//! Reductions: an elementwise program whose result is combined over axes.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::{SmallVec, smallvec};

use super::{
    Apply, Backprop, Bits, Pointwise, PointwiseOps, Rule, Saves, ScalarList, Scan, Spec, Specs, ViewOps,
    arg_reduce::arg,
    pointwise::{chain, rooms},
};
use crate::{
    ArgOp, DType, Error, Out, ReduceKind, Result, Runtime, Shape, Tensor,
    pointwise::{Program, Widened},
};

/// `program` at every position of its broadcast inputs, combined by `op` over the axes along which `to` is broadcast to
/// them.
///
/// One launch does the map and the sum: this is also the gradient of a broadcast input.
#[derive(Clone, Debug)]
pub struct Reduce {
    program: Program,
    scalars: ScalarList,
    op: ReduceKind,
    to: Shape,
}

impl Reduce {
    /// A reduction of the input itself. `to` must broadcast to the input's shape.
    pub fn new(op: ReduceKind, to: Shape) -> Self {
        Reduce { program: Pointwise::identity().program, scalars: ScalarList::new(), op, to }
    }

    /// The sum down to a shape that broadcasts to the input's: the adjoint of broadcasting.
    pub fn sum_to(to: Shape) -> Self {
        Self::new(ReduceKind::Sum, to)
    }

    /// The sum of the single output of a program.
    pub fn sum_of(program: Program, scalars: ScalarList, to: Shape) -> Self {
        Reduce { program, scalars, op: ReduceKind::Sum, to }
    }

    fn full(&self, ins: impl Iterator<Item = Shape>) -> Result<Shape> {
        let shapes: SmallVec<[Shape; 4]> = ins.collect();
        Shape::broadcast_all(self.name(), &shapes)
    }
}

impl Rule for Reduce {
    fn name(&self) -> &'static str {
        match self.op {
            ReduceKind::Sum => "sum",
            ReduceKind::Prod => "prod",
            ReduceKind::Max => "amax",
            ReduceKind::Min => "amin",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        self.program.inputs()..=self.program.inputs()
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let full = self.full(ins.iter().map(|s| s.shape))?;
        if self.to.broadcast(&full) != Some(full) {
            return Err(Error::shape(self.name(), &[full, self.to], "the second does not broadcast to the first"));
        }
        let empty = full.numel() == 0 && self.to.numel() != 0;
        if empty && matches!(self.op, ReduceKind::Max | ReduceKind::Min) {
            return Err(Error::shape(self.name(), &[full], "an extreme of no elements does not exist"));
        }
        let dtypes: SmallVec<[DType; 4]> = ins.iter().map(|s| s.dtype).collect();
        let typed = self.program.typed(&dtypes, &[])?;
        self.program.check_scalars(typed, &self.scalars)?;
        let dtype = typed.dtypes[self.program.outputs()[0] as usize];
        if dtype == DType::Bool && matches!(self.op, ReduceKind::Sum | ReduceKind::Prod) {
            return Err(Error::dtype(self.name(), &[dtype], "truth values have no arithmetic; cast to i64 to count"));
        }
        Ok(smallvec![Spec { shape: self.to, dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let full = self.full(ins.iter().map(|t| *t.shape()))?;
        let mut rooms = rooms(ins.len());
        let views = ins.iter().zip(&mut rooms).map(|(t, room)| t.view_at(&full, room));
        let views = views.collect::<Result<SmallVec<[_; 4]>>>()?;
        let layout = outs[0].view.layout.broadcast_to(self.to.padded(full.rank()))?;
        let mut out = outs[0].reborrow();
        out.view.layout = &layout;
        ins[0].runtime().reduce(&self.program, &views, &self.scalars, &full, self.op, out)
    }

    fn saves(&self, wants: Bits) -> Result<Saves> {
        match self.op {
            ReduceKind::Sum => Pointwise { program: self.program.clone(), scalars: self.scalars.clone() }.saves(wants),
            ReduceKind::Prod => Ok(Saves::inputs(&[0])),
            ReduceKind::Max | ReduceKind::Min => Ok(Saves { inputs: Bits(1), outputs: Bits(1) }),
        }
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let shapes = (0..cx.inputs()).map(|i| Ok(cx.input_spec(i)?.shape)).collect::<Result<Vec<_>>>()?;
        let full = self.full(shapes.into_iter())?;
        match self.op {
            ReduceKind::Sum => chain(&self.program, &self.scalars, &[g.broadcast_to(full)?], cx),
            ReduceKind::Prod => {
                let others = products_of_others(&cx.input(0)?, self.to)?;
                cx.give_value(0, &others.mul(&g.broadcast_to(full)?)?)
            }
            ReduceKind::Max | ReduceKind::Min => {
                let (x, y) = (cx.input(0)?, cx.output(0)?);
                let hit = x.eq(&y.broadcast_to(full)?)?.to_dtype(x.spec().dtype)?.detach();
                let share = T::apply1(Reduce::sum_to(self.to), &[&hit])?;
                cx.give_value(0, &hit.mul(&g.div(&share)?.broadcast_to(full)?)?)
            }
        }
    }
}

/// For every element, the product of all others that are reduced with it: exact where some are 0.
#[track_caller]
fn products_of_others<T: Apply>(x: &T, to: Shape) -> Result<T> {
    let shape = x.spec().shape;
    let lead = shape.rank() - to.rank();
    let (kept, gone): (Vec<usize>, Vec<usize>) =
        (0..shape.rank()).partition(|&i| i >= lead && to[i - lead] == shape[i]);
    let order: Vec<usize> = kept.iter().chain(&gone).copied().collect();
    let outer: usize = kept.iter().map(|&i| shape[i]).product();
    let inner: usize = gone.iter().map(|&i| shape[i]).product();
    let moved = x.permute_axes(&order)?;
    let flat = moved.reshape([outer, inner])?;
    let before = Scan::exclusive_prod(&flat, 1, false)?;
    let after = Scan::exclusive_prod(&flat, 1, true)?;
    let mut back = vec![0; order.len()];
    order.iter().enumerate().for_each(|(i, &a)| back[a] = i);
    before.mul(&after)?.reshape(moved.spec().shape)?.permute_axes(&back)
}

/// The largest along the axes that `to` drops (0 where it is infinite), without a gradient: what is subtracted before
/// `exp`.
#[track_caller]
pub(crate) fn finite_top<T: Apply>(x: &T, to: Shape) -> Result<T> {
    static FINITE: LazyLock<Program> =
        LazyLock::new(|| Program::new("finite", |[m], []| [m.abs().eq(f64::INFINITY).select(m.sign() * 0.0, m)]));
    // An empty reduction has no maximum, and any finite value serves.
    let op = if x.spec().shape.numel() == 0 { ReduceKind::Sum } else { ReduceKind::Max };
    T::apply1(Reduce::new(op, to), &[&x.detach()])?.apply_program(&FINITE, &[], &[])
}

/// Reductions. Axes may be negative; an empty list means all axes. With `keepdim` reduced axes stay, with size 1.
pub trait ReduceOps: Apply {
    /// The sum over `axes`; `bool` and narrow integers are summed in `i64`.
    #[track_caller]
    fn sum(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        match self.spec().dtype {
            DType::Bool | DType::U8 | DType::I32 | DType::U32 => {
                reduce(&self.to_dtype(DType::I64)?, ReduceKind::Sum, axes, keepdim)
            }
            _ => reduce(self, ReduceKind::Sum, axes, keepdim),
        }
    }
    /// The sum of all elements, a scalar; dtypes are those of [`sum`](ReduceOps::sum).
    #[track_caller]
    fn sum_all(&self) -> Result<Self> {
        self.sum(&[], false)
    }
    /// The mean of all elements of a floating tensor, a scalar.
    #[track_caller]
    fn mean_all(&self) -> Result<Self> {
        self.mean(&[], false)
    }
    /// The product over `axes` (empty: over all).
    #[track_caller]
    fn prod(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        reduce(self, ReduceKind::Prod, axes, keepdim)
    }
    /// The largest element over `axes`; ties share the gradient evenly. A reduction over no elements is an error,
    /// unless the result is empty too.
    #[track_caller]
    fn amax(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        reduce(self, ReduceKind::Max, axes, keepdim)
    }
    /// The smallest element over `axes`; ties share the gradient evenly. A reduction over no elements is an error,
    /// unless the result is empty too.
    #[track_caller]
    fn amin(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        reduce(self, ReduceKind::Min, axes, keepdim)
    }
    /// The arithmetic mean over `axes`; floating dtypes only.
    #[track_caller]
    fn mean(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        static SCALED: LazyLock<Program> = LazyLock::new(|| Program::new("mean", |[x], [s]| [x * s]));
        super::rule::float("mean", self.spec())?;
        let (to, count) = target("mean", self.spec().shape, axes)?;
        let scale: ScalarList = smallvec![(1.0 / count as f64).into()];
        let kept = of_some(count, Self::apply1(Reduce::sum_of(SCALED.clone(), scale, to), &[self])?)?;
        drop_axes(kept, self.spec().shape, axes, keepdim)
    }
    /// The logarithm of the sum of exponentials, `ln Σ eˣ`, without overflow.
    #[track_caller]
    fn logsumexp(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        static SHIFTED: LazyLock<Widened> = LazyLock::new(|| {
            Widened::new(|wide| Program::new("logsumexp", |[x, m], []| [(wide.of(x) - wide.of(m)).exp()]))
        });
        static BACK: LazyLock<Program> =
            LazyLock::new(|| Program::new("logsumexp", |[s, m], []| [(s.log() + m.cast_like(s)).cast_like(m)]));
        let (to, _) = target("logsumexp", self.spec().shape, axes)?;
        let top = finite_top(self, to)?;
        let sum = Self::apply1(sum_of(&SHIFTED, self, ScalarList::new(), to), &[self, &top])?;
        drop_axes(sum.apply_program(&BACK, &[&top], &[])?, self.spec().shape, axes, keepdim)
    }
    /// The variance: the mean squared distance from the mean, with `correction` subtracted from the count (1:
    /// unbiased).
    #[track_caller]
    fn var(&self, axes: &[isize], correction: usize, keepdim: bool) -> Result<Self> {
        let kept = variance(self, axes, correction)?.to_dtype(self.spec().dtype)?;
        drop_axes(kept, self.spec().shape, axes, keepdim)
    }
    /// The standard deviation, the root of [`var`](ReduceOps::var); where it is 0, its gradient is 0.
    #[track_caller]
    fn std(&self, axes: &[isize], correction: usize, keepdim: bool) -> Result<Self> {
        let kept = root(&variance(self, axes, correction)?)?.to_dtype(self.spec().dtype)?;
        drop_axes(kept, self.spec().shape, axes, keepdim)
    }
    /// The Euclidean norm; where it is 0, its gradient is 0.
    #[track_caller]
    fn norm(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        static SQUARE: LazyLock<Widened> =
            LazyLock::new(|| Widened::new(|wide| Program::new("norm", |[x], []| [wide.of(x) * wide.of(x)])));
        let (to, _) = target("norm", self.spec().shape, axes)?;
        let squares = Self::apply1(sum_of(&SQUARE, self, ScalarList::new(), to), &[self])?;
        drop_axes(root(&squares)?.to_dtype(self.spec().dtype)?, self.spec().shape, axes, keepdim)
    }
    /// Whether any element over `axes` is true, for `bool`.
    #[track_caller]
    fn any(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        truth("any", self, ReduceKind::Max, axes, keepdim)
    }
    /// Whether all elements over `axes` are true, for `bool`.
    #[track_caller]
    fn all(&self, axes: &[isize], keepdim: bool) -> Result<Self> {
        truth("all", self, ReduceKind::Min, axes, keepdim)
    }
    /// The position of the first largest element along `axis`, as `i64`.
    #[track_caller]
    fn argmax(&self, axis: isize, keepdim: bool) -> Result<Self> {
        arg(self, ArgOp::Max, axis, keepdim)
    }
    /// The position of the first smallest element along `axis`, as `i64`.
    #[track_caller]
    fn argmin(&self, axis: isize, keepdim: bool) -> Result<Self> {
        arg(self, ArgOp::Min, axis, keepdim)
    }
}

impl<T: Apply> ReduceOps for T {}

/// The sum of a program's values, down to `to`.
fn sum_of<T: Apply>(program: &Widened, x: &T, scalars: ScalarList, to: Shape) -> Reduce {
    Reduce::sum_of(program.of(x.spec().dtype).clone(), scalars, to)
}

/// The variance over `axes`, which stay; `f32` for half-precision inputs.
#[track_caller]
fn variance<T: Apply>(x: &T, axes: &[isize], correction: usize) -> Result<T> {
    Ok(moments(x, axes, correction)?.1)
}

/// The mean and variance over `axes`, which stay; `f32` for half-precision inputs. The mean residual of the rounded
/// mean is added to it: the mean of equal elements is then exact and their variance 0, and a small variance around a
/// large mean keeps its digits.
#[track_caller]
pub(crate) fn moments<T: Apply>(x: &T, axes: &[isize], correction: usize) -> Result<(T, T)> {
    static SCALED: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("mean", |[x], [s]| [wide.of(x) * s])));
    static LEFT: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("mean", |[x, m], [s]| [(wide.of(x) - m) * s])));
    static SQUARES: LazyLock<Widened> = LazyLock::new(|| {
        Widened::new(|wide| Program::new("var", |[x, m], [s]| [(wide.of(x) - m) * (wide.of(x) - m) * s]))
    });
    super::rule::float("var", x.spec())?;
    let (to, count) = target("var", x.spec().shape, axes)?;
    let per = |n: usize| -> ScalarList { smallvec![(1.0 / n as f64).into()] };
    let mean = T::apply1(sum_of(&SCALED, x, per(count), to), &[x])?;
    // In exact arithmetic it is 0 for every `x`, so no gradient flows through it.
    let left = T::apply1(sum_of(&LEFT, x, per(count), to), &[&x.detach(), &mean.detach()])?;
    let mean = of_some(count, mean.add(&left)?)?;
    let squares = T::apply1(sum_of(&SQUARES, x, per(count.saturating_sub(correction)), to), &[x, &mean])?;
    Ok((mean, of_some(count, squares)?))
}

/// A mean of `count` elements; NaN if there are none.
#[track_caller]
fn of_some<T: Apply>(count: usize, mean: T) -> Result<T> {
    if count == 0 { mean.mul(f64::NAN) } else { Ok(mean) }
}

/// The square root, with a gradient of 0 at 0 in place of the infinite one, as for the norm of a zero vector.
#[track_caller]
fn root<T: Apply>(x: &T) -> Result<T> {
    static ROOT: LazyLock<Program> = LazyLock::new(|| {
        Program::new("sqrt", |[x], []| {
            let zero = x.eq(0.0);
            [zero.select(x, zero.select(1.0, x).sqrt())]
        })
    });
    x.apply_program(&ROOT, &[], &[])
}

/// The shape with `axes` of size 1, and the number of elements that each of its elements combines.
fn target(op: &'static str, shape: Shape, axes: &[isize]) -> Result<(Shape, usize)> {
    let set = shape.axes(op, axes)?;
    Ok((shape.reduced(set), set.iter().filter(|&i| i < shape.rank()).map(|i| shape[i]).product()))
}

#[track_caller]
fn drop_axes<T: Apply>(kept: T, shape: Shape, axes: &[isize], keepdim: bool) -> Result<T> {
    if keepdim {
        return Ok(kept);
    }
    kept.reshape(shape.dropped(shape.axes("reduce", axes)?))
}

#[track_caller]
fn reduce<T: Apply>(x: &T, op: ReduceKind, axes: &[isize], keepdim: bool) -> Result<T> {
    let rule = |to| Reduce::new(op, to);
    let (to, _) = target(rule(Shape::SCALAR).name(), x.spec().shape, axes)?;
    drop_axes(T::apply1(rule(to), &[x])?, x.spec().shape, axes, keepdim)
}

#[track_caller]
fn truth<T: Apply>(name: &'static str, x: &T, op: ReduceKind, axes: &[isize], keepdim: bool) -> Result<T> {
    if x.spec().dtype != DType::Bool {
        return Err(Error::dtype(name, &[x.spec().dtype], "needs bool; compare first"));
    }
    if x.spec().shape.numel() == 0 {
        let (to, _) = target(name, x.spec().shape, axes)?;
        let none = Tensor::full(x.runtime(), to, DType::Bool, op == ReduceKind::Min)?;
        return drop_axes(T::constant(none), x.spec().shape, axes, keepdim);
    }
    reduce(x, op, axes, keepdim)
}
