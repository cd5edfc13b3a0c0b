//! The methods of reductions.

use std::sync::LazyLock;

use super::{
    Apply, PointwiseOps, Reduce, ScalarList, ViewOps,
    arg_reduce::arg,
    moments,
    reduce::{finite_top, sum_of},
};
use crate::{
    ArgOp, AxisSet, DType, Error, ReduceKind, Result, Shape, Tensor, Within,
    pointwise::{Program, Widened},
};

/// Reductions. Axes may be negative, and an empty list of axes is an error. A method removes the axes that it reduces;
/// its form with `keepdim` keeps them with size 1. Most have a form with `all`, which reduces all axes, of a scalar
/// too.
pub trait ReduceOps: Apply {
    /// The sum over `axes`; `bool` and narrow integers are summed in `i64`.
    #[track_caller]
    fn sum(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.sum_keepdim(axes)?, axes)
    }
    /// The [`sum`](ReduceOps::sum) whose reduced axes stay, with size 1.
    #[track_caller]
    fn sum_keepdim(&self, axes: &[isize]) -> Result<Self> {
        sum(self, named("sum", self, axes)?)
    }
    /// The sum of all elements, a scalar; dtypes are those of [`sum`](ReduceOps::sum).
    #[track_caller]
    fn sum_all(&self) -> Result<Self> {
        scalar(sum(self, every(self))?)
    }
    /// The product over `axes`; dtypes are those of [`sum`](ReduceOps::sum).
    #[track_caller]
    fn prod(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.prod_keepdim(axes)?, axes)
    }
    /// The [`prod`](ReduceOps::prod) whose reduced axes stay, with size 1.
    #[track_caller]
    fn prod_keepdim(&self, axes: &[isize]) -> Result<Self> {
        product(self, named("prod", self, axes)?)
    }
    /// The product of all elements, a scalar.
    #[track_caller]
    fn prod_all(&self) -> Result<Self> {
        scalar(product(self, every(self))?)
    }
    /// The largest element over `axes`; ties share the gradient evenly. A reduction over no elements is an error,
    /// unless the result is empty too.
    #[track_caller]
    fn amax(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.amax_keepdim(axes)?, axes)
    }
    /// The [`amax`](ReduceOps::amax) whose reduced axes stay, with size 1.
    #[track_caller]
    fn amax_keepdim(&self, axes: &[isize]) -> Result<Self> {
        reduce(self, ReduceKind::Max, named("amax", self, axes)?)
    }
    /// The largest of all elements, a scalar.
    #[track_caller]
    fn amax_all(&self) -> Result<Self> {
        scalar(reduce(self, ReduceKind::Max, every(self))?)
    }
    /// The smallest element over `axes`; ties share the gradient evenly. A reduction over no elements is an error,
    /// unless the result is empty too.
    #[track_caller]
    fn amin(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.amin_keepdim(axes)?, axes)
    }
    /// The [`amin`](ReduceOps::amin) whose reduced axes stay, with size 1.
    #[track_caller]
    fn amin_keepdim(&self, axes: &[isize]) -> Result<Self> {
        reduce(self, ReduceKind::Min, named("amin", self, axes)?)
    }
    /// The smallest of all elements, a scalar.
    #[track_caller]
    fn amin_all(&self) -> Result<Self> {
        scalar(reduce(self, ReduceKind::Min, every(self))?)
    }
    /// The arithmetic mean over `axes`; floating dtypes only.
    #[track_caller]
    fn mean(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.mean_keepdim(axes)?, axes)
    }
    /// The [`mean`](ReduceOps::mean) whose reduced axes stay, with size 1.
    #[track_caller]
    fn mean_keepdim(&self, axes: &[isize]) -> Result<Self> {
        mean(self, named("mean", self, axes)?)
    }
    /// The mean of all elements of a floating tensor, a scalar.
    #[track_caller]
    fn mean_all(&self) -> Result<Self> {
        scalar(mean(self, every(self))?)
    }
    /// The logarithm of the sum of exponentials over `axes`, `ln Σ eˣ`, without overflow.
    #[track_caller]
    fn logsumexp(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.logsumexp_keepdim(axes)?, axes)
    }
    /// The [`logsumexp`](ReduceOps::logsumexp) whose reduced axes stay, with size 1.
    #[track_caller]
    fn logsumexp_keepdim(&self, axes: &[isize]) -> Result<Self> {
        logsumexp(self, self.spec().shape.axes("logsumexp", axes)?)
    }
    /// The variance over `axes`: the mean squared distance from the mean, with `correction` subtracted from the count
    /// (1: unbiased).
    #[track_caller]
    fn var(&self, axes: &[isize], correction: usize) -> Result<Self> {
        drop_axes(self.var_keepdim(axes, correction)?, axes)
    }
    /// The [`var`](ReduceOps::var) whose reduced axes stay, with size 1.
    #[track_caller]
    fn var_keepdim(&self, axes: &[isize], correction: usize) -> Result<Self> {
        variance(self, named("var", self, axes)?, correction)
    }
    /// The variance of all elements, a scalar; see [`var`](ReduceOps::var).
    #[track_caller]
    fn var_all(&self, correction: usize) -> Result<Self> {
        scalar(variance(self, every(self), correction)?)
    }
    /// The standard deviation over `axes`, the root of [`var`](ReduceOps::var); where it is 0, its gradient is 0.
    #[track_caller]
    fn std(&self, axes: &[isize], correction: usize) -> Result<Self> {
        drop_axes(self.std_keepdim(axes, correction)?, axes)
    }
    /// The [`std`](ReduceOps::std) whose reduced axes stay, with size 1.
    #[track_caller]
    fn std_keepdim(&self, axes: &[isize], correction: usize) -> Result<Self> {
        deviation(self, named("std", self, axes)?, correction)
    }
    /// The standard deviation of all elements, a scalar; see [`std`](ReduceOps::std).
    #[track_caller]
    fn std_all(&self, correction: usize) -> Result<Self> {
        scalar(deviation(self, every(self), correction)?)
    }
    /// The Euclidean norm over `axes`; where it is 0, its gradients are 0.
    #[track_caller]
    fn norm(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.norm_keepdim(axes)?, axes)
    }
    /// The [`norm`](ReduceOps::norm) whose reduced axes stay, with size 1.
    #[track_caller]
    fn norm_keepdim(&self, axes: &[isize]) -> Result<Self> {
        norm(self, named("norm", self, axes)?)
    }
    /// The Euclidean norm of all elements, a scalar.
    #[track_caller]
    fn norm_all(&self) -> Result<Self> {
        scalar(norm(self, every(self))?)
    }
    /// Tests whether any element over `axes` is true, for `bool`.
    #[track_caller]
    fn any(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.any_keepdim(axes)?, axes)
    }
    /// The [`any`](ReduceOps::any) whose reduced axes stay, with size 1.
    #[track_caller]
    fn any_keepdim(&self, axes: &[isize]) -> Result<Self> {
        truth("any", self, ReduceKind::Max, named("any", self, axes)?)
    }
    /// Tests whether any element is true, for `bool`; a scalar.
    #[track_caller]
    fn any_all(&self) -> Result<Self> {
        scalar(truth("any", self, ReduceKind::Max, every(self))?)
    }
    /// Tests whether all elements over `axes` are true, for `bool`.
    #[track_caller]
    fn all(&self, axes: &[isize]) -> Result<Self> {
        drop_axes(self.all_keepdim(axes)?, axes)
    }
    /// The [`all`](ReduceOps::all) whose reduced axes stay, with size 1.
    #[track_caller]
    fn all_keepdim(&self, axes: &[isize]) -> Result<Self> {
        truth("all", self, ReduceKind::Min, named("all", self, axes)?)
    }
    /// Tests whether all elements are true, for `bool`; a scalar.
    #[track_caller]
    fn all_all(&self) -> Result<Self> {
        scalar(truth("all", self, ReduceKind::Min, every(self))?)
    }
    /// The position of the first largest element along `axis`, as `i64`.
    #[track_caller]
    fn argmax(&self, axis: isize) -> Result<Self> {
        drop_axes(self.argmax_keepdim(axis)?, &[axis])
    }
    /// The [`argmax`](ReduceOps::argmax) whose axis stays, with size 1.
    #[track_caller]
    fn argmax_keepdim(&self, axis: isize) -> Result<Self> {
        arg(self, ArgOp::Max, axis)
    }
    /// The position of the first smallest element along `axis`, as `i64`.
    #[track_caller]
    fn argmin(&self, axis: isize) -> Result<Self> {
        drop_axes(self.argmin_keepdim(axis)?, &[axis])
    }
    /// The [`argmin`](ReduceOps::argmin) whose axis stays, with size 1.
    #[track_caller]
    fn argmin_keepdim(&self, axis: isize) -> Result<Self> {
        arg(self, ArgOp::Min, axis)
    }
}

impl<T: Apply> ReduceOps for T {}

/// The positions of the axes of a reduction that has a form for all axes.
#[track_caller]
fn named<T: Apply>(op: &'static str, x: &T, axes: &[isize]) -> Result<AxisSet> {
    let shape = x.spec().shape;
    if axes.is_empty() {
        let why = format!("the list of axes is empty; `{op}_all` reduces all axes");
        return Err(Error::shape(op, &[shape], why)).at_caller();
    }
    shape.axes(op, axes)
}

fn every<T: Apply>(x: &T) -> AxisSet {
    AxisSet::all(x.spec().shape.rank())
}

/// A result without the axes that it was reduced over.
#[track_caller]
fn drop_axes<T: Apply>(kept: T, axes: &[isize]) -> Result<T> {
    let shape = kept.spec().shape;
    kept.reshape(shape.dropped(shape.axes("reduce", axes)?))
}

/// A result of one element without its axes.
#[track_caller]
fn scalar<T: Apply>(kept: T) -> Result<T> {
    kept.reshape(Shape::SCALAR)
}

#[track_caller]
fn reduce<T: Apply>(x: &T, op: ReduceKind, axes: AxisSet) -> Result<T> {
    T::apply1(Reduce::new(op, x.spec().shape.reduced(axes)), &[x])
}

#[track_caller]
fn sum<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    reduce(&countable(x)?, ReduceKind::Sum, axes)
}

#[track_caller]
fn product<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    reduce(&countable(x)?, ReduceKind::Prod, axes)
}

#[track_caller]
fn mean<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    static VALUE: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("mean", |[x], []| [wide.of(x)])));
    super::rule::float("mean", x.spec())?;
    let (to, count) = target(x.spec().shape, axes);
    T::apply1(Reduce::mean_of(&VALUE, x.spec().dtype, ScalarList::new(), to, count), &[x])
}

#[track_caller]
fn logsumexp<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    static SHIFTED: LazyLock<Widened> = LazyLock::new(|| {
        Widened::new(|wide| Program::new("logsumexp", |[x, m], []| [(wide.of(x) - wide.of(m)).exp()]))
    });
    static BACK: LazyLock<Program> =
        LazyLock::new(|| Program::new("logsumexp", |[s, m], []| [(s.log() + m.cast_like(s)).cast_like(m)]));
    let to = x.spec().shape.reduced(axes);
    let top = finite_top(x, to)?;
    let sum = T::apply1(sum_of(&SHIFTED, x, ScalarList::new(), to), &[x, &top])?;
    sum.apply_program(&BACK, &[&top], &[])
}

#[track_caller]
fn variance<T: Apply>(x: &T, axes: AxisSet, correction: usize) -> Result<T> {
    moments::moments(x, axes, correction)?.1.to_dtype(x.spec().dtype)
}

#[track_caller]
fn deviation<T: Apply>(x: &T, axes: AxisSet, correction: usize) -> Result<T> {
    moments::deviation(x, axes, correction)?.to_dtype(x.spec().dtype)
}

#[track_caller]
fn norm<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    moments::norm(x, axes)?.to_dtype(x.spec().dtype)
}

#[track_caller]
fn truth<T: Apply>(name: &'static str, x: &T, op: ReduceKind, axes: AxisSet) -> Result<T> {
    if x.spec().dtype != DType::Bool {
        return Err(Error::dtype(name, &[x.spec().dtype], "needs bool; compare first"));
    }
    if x.spec().shape.numel() == 0 {
        let to = x.spec().shape.reduced(axes);
        return Ok(T::constant(Tensor::full(x.runtime(), to, DType::Bool, op == ReduceKind::Min)?));
    }
    reduce(x, op, axes)
}

/// `x`, with `bool` and narrow integers cast to `i64`, in which they are summed and multiplied.
#[track_caller]
pub(super) fn countable<T: Apply>(x: &T) -> Result<T> {
    match x.spec().dtype {
        DType::Bool | DType::U8 | DType::I32 | DType::U32 => x.to_dtype(DType::I64),
        _ => Ok(x.clone()),
    }
}

/// The shape with `axes` of size 1, and the number of elements combined into each element of it.
pub(super) fn target(shape: Shape, axes: AxisSet) -> (Shape, usize) {
    (shape.reduced(axes), axes.iter().filter(|&i| i < shape.rank()).map(|i| shape[i]).product())
}
