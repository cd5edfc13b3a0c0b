//! Means, variances, deviations and norms; reduced axes stay, with size 1.

use std::sync::LazyLock;

use smallvec::SmallVec;

use super::{
    Apply, PointwiseOps, ScalarList,
    reduce::{Reduce, mean_by, mean_of, sum_of},
    reductions::target,
    rule::float,
};
use crate::{
    AxisSet, DType, ReduceKind, Result, Runtime, Shape, Tensor,
    pointwise::{Program, Widened},
};

/// The mean and variance over `axes`, which stay with size 1; `f32` for half-precision inputs.
#[track_caller]
pub(crate) fn moments<T: Apply>(x: &T, axes: AxisSet, correction: usize) -> Result<(T, T)> {
    static SQUARES: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("var", |[x, m], []| [(wide.of(x) - m) * (wide.of(x) - m)])));
    let mean = exact_mean(x, axes)?;
    let (to, count) = target(x.spec().shape, axes);
    let variance = mean_of(&SQUARES, &[x, &mean], to, count.saturating_sub(correction))?;
    Ok((mean, variance))
}

/// The mean over `axes`, which stay with size 1, corrected by the mean of the residuals from the rounded mean. The mean
/// of equal elements is then exact and their variance 0, and a small variance around a large mean keeps its digits.
///
/// Terms are multiplied by a power of two that keeps their sum within the dtype's range.
#[track_caller]
fn exact_mean<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    static VALUE: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("mean", |[x], [by]| [wide.of(x) * by])));
    static LEFT: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("mean", |[x, m], [by]| [(wide.of(x) - m) * by])));
    float("var", x.spec())?;
    let (to, count) = target(x.spec().shape, axes);
    let by = 1.0 / count.max(1).next_power_of_two() as f64;
    let mean = |program, ins: &[&T]| mean_by(program, ins, [by.into()].into_iter().collect(), to, count as f64 * by);
    let rounded = mean(&VALUE, &[x])?;
    // The correction is 0 for every `x` in exact arithmetic, so no gradient flows through it.
    rounded.add(&mean(&LEFT, &[&x.detach(), &rounded.detach()])?)
}

/// The divisors of numbers before they are squared, reduced to shape `to` and without a gradient. A divisor is 1 if the
/// squares neither underflow nor overflow, and the largest magnitude otherwise. `sizes` computes the magnitudes.
#[track_caller]
fn scale_of_squares<T: Apply>(sizes: &Widened, ins: &[&T], to: Shape) -> Result<T> {
    const NEAR: f64 = (1u64 << 40) as f64;
    static SCALE: LazyLock<Program> = LazyLock::new(|| {
        Program::new("scale", |[m], []| {
            let far = (m.gt(0.0) & m.lt(1.0 / NEAR)) | (m.gt(NEAR) & m.lt(f64::INFINITY));
            [far.select(m, 1.0)]
        })
    });
    if ins[0].spec().dtype == DType::F16 {
        // Squares of all `f16` numbers are in the range of `f32`.
        return Ok(T::constant(Tensor::full(ins[0].runtime(), to, DType::F32, 1.0)?));
    }
    // No elements have no largest magnitude, and any divisor serves.
    let op = if ins[0].spec().shape.numel() == 0 { ReduceKind::Sum } else { ReduceKind::Max };
    let largest = sum_of(sizes, ins[0], ScalarList::new(), to).by(op);
    let ins: SmallVec<[T; 2]> = ins.iter().map(|x| x.detach()).collect();
    T::apply1(largest, &ins.iter().collect::<SmallVec<[&T; 2]>>())?.apply_program(&SCALE, &[], &[])
}

/// Tells whether squares are summed in `f64`, which saves the pass that finds a scale. It holds for `f32` and `bf16`,
/// whose squares leave the range of `f32` but not of `f64`, on devices that compute in `f64`.
fn squares_in_f64<T: Apply>(x: &T) -> bool {
    matches!(x.spec().dtype, DType::F32 | DType::BF16) && x.runtime().capabilities().compute.contains(&DType::F64)
}

#[track_caller]
fn sum_in_f64<T: Apply>(program: &Program, ins: &[&T], to: Shape) -> Result<T> {
    T::apply1(Reduce::sum_of(program.clone(), ScalarList::new(), to), ins)
}

/// The deviation by sums in `f64`, whose mean is exact enough without a correction.
#[track_caller]
fn deviation_by_f64<T: Apply>(x: &T, to: Shape, [count, divisor]: [usize; 2]) -> Result<T> {
    static VALUE: LazyLock<Program> = LazyLock::new(|| Program::new("mean", |[x], []| [x.cast(DType::F64)]));
    static SQUARES: LazyLock<Program> =
        LazyLock::new(|| Program::new("std", |[x, m], []| [(x.cast(DType::F64) - m).square()]));
    let mean = sum_in_f64(&VALUE, &[x], to)?.div(count as f64)?;
    root(&sum_in_f64(&SQUARES, &[x, &mean], to)?.div(divisor as f64)?)?.to_dtype(DType::F32)
}

/// The standard deviation; `f32` for half-precision inputs. Where it is 0, its gradients are 0.
#[track_caller]
pub(super) fn deviation<T: Apply>(x: &T, axes: AxisSet, correction: usize) -> Result<T> {
    static APART: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("std", |[x, m], []| [(wide.of(x) - m).abs()])));
    static SQUARES: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("std", |[x, m, s], []| [((wide.of(x) - m) / s).square()])));
    let (to, count) = target(x.spec().shape, axes);
    let divisor = count.saturating_sub(correction);
    if squares_in_f64(x) {
        return deviation_by_f64(x, to, [count, divisor]);
    }
    let mean = exact_mean(x, axes)?;
    let scale = scale_of_squares(&APART, &[x, &mean], to)?;
    let variance = mean_of(&SQUARES, &[x, &mean, &scale], to, divisor)?;
    root(&variance)?.mul(&scale)
}

/// The Euclidean norm; `f32` for half-precision inputs. Where it is 0, its gradients are 0.
#[track_caller]
pub(super) fn norm<T: Apply>(x: &T, axes: AxisSet) -> Result<T> {
    static SIZE: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("norm", |[x], []| [wide.of(x).abs()])));
    static SQUARES: LazyLock<Widened> =
        LazyLock::new(|| Widened::new(|wide| Program::new("norm", |[x, s], []| [(wide.of(x) / s).square()])));
    static IN_F64: LazyLock<Program> = LazyLock::new(|| Program::new("norm", |[x], []| [x.cast(DType::F64).square()]));
    let to = x.spec().shape.reduced(axes);
    if squares_in_f64(x) {
        return root(&sum_in_f64(&IN_F64, &[x], to)?)?.to_dtype(DType::F32);
    }
    let scale = scale_of_squares(&SIZE, &[x], to)?;
    let squares = T::apply1(sum_of(&SQUARES, x, ScalarList::new(), to), &[x, &scale])?;
    root(&squares)?.mul(&scale)
}

/// The square root, with gradients of 0 at 0 in place of infinite ones, as for the norm of a zero vector.
#[track_caller]
fn root<T: Apply>(x: &T) -> Result<T> {
    static ROOT: LazyLock<Program> = LazyLock::new(|| {
        Program::new("sqrt", |[x], []| {
            let zero = x.eq(0.0);
            [zero.select(0.0, zero.select(1.0, x).sqrt())]
        })
    });
    x.apply_program(&ROOT, &[], &[])
}
