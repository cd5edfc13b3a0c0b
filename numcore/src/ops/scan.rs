//! Recurrences along an axis: cumulative sums and products, and first-order linear recurrences, whose adjoint is a
//! recurrence too.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{
    Apply, Backprop, Bits, JoinOps, PointwiseOps, Rule, Saves, Spec, Specs, ViewOps,
    reductions::countable,
    rule::{float, same_dtype},
};
use crate::{Error, Out, Result, Runtime, ScanOp, Tensor};

/// A recurrence along an axis; inputs `x`, and `a` for [`ScanOp::Linear`].
#[derive(Clone, Debug)]
pub struct Scan {
    op: ScanOp,
    axis: usize,
    reverse: bool,
}

impl Scan {
    /// The recurrence: its kind, its axis, and true if it runs from the end.
    pub fn parts(&self) -> (ScanOp, usize, bool) {
        (self.op, self.axis, self.reverse)
    }

    /// The product of the elements before each element along an axis (after it if `reverse`); 1 for the first.
    pub(super) fn exclusive_prod<T: Apply>(x: &T, axis: usize, reverse: bool) -> Result<T> {
        let y = T::apply1(Scan { op: ScanOp::Prod, axis, reverse }, &[x])?;
        shift(&y, axis, reverse, 1.0)
    }

    fn reversed(&self, op: ScanOp) -> Scan {
        Scan { op, axis: self.axis, reverse: !self.reverse }
    }

    /// The tangent of the result; see [`tangents`](super::tangents).
    #[track_caller]
    pub(super) fn tangent<T: Apply>(&self, ins: &[&T], out: &T, given: &[Option<&T>]) -> Result<Option<T>> {
        let before = |fill| shift(out, self.axis, self.reverse, fill);
        let (source, factor) = match (self.op, given) {
            (ScanOp::Sum, [Some(t)]) => return T::apply1(self.clone(), &[t]).map(Some),
            (ScanOp::Prod, [Some(t)]) => (before(1.0)?.mul(*t)?, ins[0]),
            (ScanOp::Linear, [Some(x), None]) => ((*x).clone(), ins[1]),
            (ScanOp::Linear, [None, Some(a)]) => (before(0.0)?.mul(*a)?, ins[1]),
            (ScanOp::Linear, [Some(x), Some(a)]) => (before(0.0)?.mul(*a)?.add(*x)?, ins[1]),
            _ => return Ok(None),
        };
        let linear = Scan { op: ScanOp::Linear, ..self.clone() };
        T::apply1(linear, &[&source, factor]).map(Some)
    }

    /// The adjoint of a linear recurrence: `s[t] = g[t] + a[t+1] · s[t+1]`.
    fn adjoint<T: Apply>(&self, g: &T, a: &T) -> Result<T> {
        let next = shift(a, self.axis, !self.reverse, 0.0)?;
        T::apply1(self.reversed(ScanOp::Linear), &[g, &next])
    }
}

/// `x` shifted by one position along the axis, away from the start (towards it when `reverse`), with `fill` shifted in.
#[track_caller]
fn shift<T: Apply>(x: &T, axis: usize, reverse: bool, fill: f64) -> Result<T> {
    let shape = x.spec().shape;
    let n = shape[axis];
    if n == 0 {
        return Ok(x.clone());
    }
    let kept = x.narrow(axis as isize, usize::from(reverse), n - 1)?;
    let mut pads = vec![(0, 0); shape.rank()];
    pads[axis] = if reverse { (0, 1) } else { (1, 0) };
    kept.pad(&pads, fill)
}

impl Rule for Scan {
    fn name(&self) -> &'static str {
        match self.op {
            ScanOp::Sum => "cumsum",
            ScanOp::Prod => "cumprod",
            ScanOp::Linear => "linear_scan",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        if self.op == ScanOp::Linear { 2..=2 } else { 1..=1 }
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        same_dtype(self.name(), ins)?;
        if ins.iter().any(|s| s.shape != ins[0].shape) {
            return Err(Error::shape(self.name(), &[ins[0].shape, ins[1].shape], "operands must have one shape"));
        }
        Ok(smallvec![ins[0]])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let rt = ins[0].runtime();
        super::overwriting(rt, &mut outs[0], |out| {
            rt.scan(self.op, ins[0].view(), ins.get(1).map(|a| a.view()), self.axis, self.reverse, out)
        })
    }

    fn saves(&self, wants: Bits) -> Result<Saves> {
        Ok(match self.op {
            ScanOp::Sum => Saves::NONE,
            ScanOp::Prod => Saves { inputs: Bits(1), outputs: Bits(1) },
            ScanOp::Linear => Saves { inputs: Bits(2), outputs: Bits(u64::from(wants.has(1))) },
        })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        match self.op {
            ScanOp::Sum => cx.give(0, self.reversed(ScanOp::Sum).into(), &[&g]),
            ScanOp::Prod => {
                let (x, y) = (cx.input(0)?, cx.output(0)?);
                let before = shift(&y, self.axis, self.reverse, 1.0)?;
                cx.give_value(0, &before.mul(&self.adjoint(&g, &x)?)?)
            }
            ScanOp::Linear => {
                let s = self.adjoint(&g, &cx.input(1)?)?;
                if cx.wants(1) {
                    let before = shift(&cx.output(0)?, self.axis, self.reverse, 0.0)?;
                    cx.give_value(1, &s.mul(&before)?)?;
                }
                cx.give_value(0, &s)
            }
        }
    }
}

/// Cumulative operations along an axis.
pub trait ScanOps: Apply {
    /// The cumulative sum along `axis`; `bool` and narrow integers are summed in `i64`.
    #[track_caller]
    fn cumsum(&self, axis: isize) -> Result<Self> {
        scan(self, ScanOp::Sum, axis)
    }
    /// The cumulative product along `axis`, with the dtypes of [`cumsum`](ScanOps::cumsum); its gradient is exact where
    /// elements are 0.
    #[track_caller]
    fn cumprod(&self, axis: isize) -> Result<Self> {
        scan(self, ScanOp::Prod, axis)
    }
    /// The linear recurrence of state-space models, `y[t] = a[t] · y[t−1] + self[t]` with `y[−1] = 0`; floating dtypes
    /// only.
    #[track_caller]
    fn linear_scan(&self, a: &Self, axis: isize) -> Result<Self> {
        float("linear_scan", self.spec())?;
        let axis = self.spec().shape.axis("linear_scan", axis)?;
        Self::apply1(Scan { op: ScanOp::Linear, axis, reverse: false }, &[self, a])
    }
}

impl<T: Apply> ScanOps for T {}

#[track_caller]
fn scan<T: Apply>(x: &T, op: ScanOp, axis: isize) -> Result<T> {
    let rule = Scan { op, axis: 0, reverse: false };
    let axis = x.spec().shape.axis(rule.name(), axis)?;
    T::apply1(Scan { axis, ..rule }, &[&countable(x)?])
}
