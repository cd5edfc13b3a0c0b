//! Automatic mixed precision: operations choose the dtype they run in, and parameters keep their dtype.

use std::cell::Cell;

use numcore::{
    DType, Error, Result, Runtime,
    fused::{FusedOp, ScoredAttention},
    ops::{Apply, Op, PointwiseOps},
};
use smallvec::SmallVec;

use crate::{Var, mode::Restore};

thread_local! {
    static AUTOCAST: Cell<Option<DType>> = const { Cell::new(None) };
}

/// Runs `f` with automatic mixed precision on this thread. Parameters stay `f32`; each operation casts its variables to
/// the dtype that the table gives.
///
/// | operations | run in |
/// |---|---|
/// | `matmul`, `linear`, `linear_cross_entropy`, convolutions, `attention` | `dtype`, which is `bf16` or `f16` |
/// | softmax, losses, norms, reductions, scans | `f32`; `cross_entropy` reads half-precision logits as they are |
/// | pointwise operations, `cat` and others with several operands | the widest type among their operands |
///
/// These are PyTorch's rules for `torch.autocast`. Operands of `f64` are never cast. Casts are recorded, so gradients
/// of `f32` parameters are `f32`. A parameter that is used several times is cast each time. Operations on plain tensors
/// rather than variables never cast.
///
/// The backward pass runs without autocast, each operation in the dtypes of its forward.
/// [`checkpoint`](crate::checkpoint) and [`recomputed`](crate::recomputed) recompute under the autocast of their first
/// run. With `f16`, scale the loss (`optim::LossScaler`).
///
/// ```
/// # use autograd::{Var, autocast};
/// # use numcore::{DType, NullRuntime, Tensor, fused::NnOps, ops::MatmulOps};
/// # let rt = NullRuntime::new();
/// let x = Var::new(Tensor::zeros(&rt, [4, 8], DType::F32)?);
/// let w = Var::leaf("w", Tensor::zeros(&rt, [8, 8], DType::F32)?)?;
/// let (h, p) = autocast(DType::BF16, || {
///     let h = x.matmul(&w)?;
///     let p = h.softmax(-1)?;
///     Ok((h, p))
/// })?;
/// assert_eq!((h.dtype(), p.dtype()), (DType::BF16, DType::F32));
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// An error if `dtype` is neither `bf16` nor `f16`, and any error of `f`.
#[doc(alias = "amp")]
pub fn autocast<T>(dtype: DType, f: impl FnOnce() -> Result<T>) -> Result<T> {
    if !dtype.is_half() {
        return Err(Error::dtype("autocast", &[dtype], "matrix products can be cast to `bf16` or `f16` only"));
    }
    let _restore = Restore::set(&AUTOCAST, Some(dtype));
    f()
}

/// Runs `f` without automatic mixed precision, for a part of a model that needs its operands in their own dtypes.
pub fn no_autocast<T>(f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&AUTOCAST, None);
    f()
}

/// The dtype of the innermost [`autocast`] on this thread; `None` outside of it and inside `no_autocast`.
pub fn autocast_dtype() -> Option<DType> {
    AUTOCAST.get()
}

/// Runs `f` with the autocast dtype of an earlier forward pass; `None` is no autocast.
pub(crate) fn at_autocast<T>(dtype: Option<DType>, f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&AUTOCAST, dtype);
    f()
}

/// The dtype to which autocast casts the floating-point operands of an operation.
enum CastPolicy {
    /// The half-precision dtype of the scope, `bf16` or `f16`.
    Half,
    Full,
    /// The widest floating-point dtype among the operands, so that all have one dtype.
    Widest,
    /// The dtypes of the operands, uncast.
    Given,
}

fn policy(op: &Op) -> CastPolicy {
    match op {
        Op::Matmul(_) => CastPolicy::Half,
        Op::Fused(FusedOp::Linear(_) | FusedOp::LinearCrossEntropy(_) | FusedOp::Attention(_) | FusedOp::Conv(_)) => {
            CastPolicy::Half
        }
        Op::Fused(FusedOp::ScoredAttention(_)) => CastPolicy::Half,
        Op::Reduce(_) | Op::Scan(_) => CastPolicy::Full,
        Op::Fused(FusedOp::Softmax(_) | FusedOp::Norm(_)) => CastPolicy::Full,
        Op::Pointwise(_) | Op::Cat(_) | Op::ScatterAdd(_) | Op::Fused(_) => CastPolicy::Widest,
        _ => CastPolicy::Given,
    }
}

/// The operands of `op`, cast as autocast requires; `None` if no operand needs a cast.
#[track_caller]
pub(crate) fn operands<R: Runtime>(op: &Op, ins: &[&Var<R>]) -> Result<Option<SmallVec<[Var<R>; 4]>>> {
    let Some(half) = AUTOCAST.get() else { return Ok(None) };
    let Some(to) = target(op, half, ins) else { return Ok(None) };
    // The caller chose `f64` deliberately, so such operands keep it.
    // Arguments of scores have the type of scores.
    let cast_count = if let Op::Fused(FusedOp::ScoredAttention(_)) = op { ScoredAttention::ARGS } else { ins.len() };
    let is_cast =
        |i: usize, v: &Var<R>| i < cast_count && v.dtype().is_float() && v.dtype() != to && v.dtype() != DType::F64;
    if !ins.iter().enumerate().any(|(i, v)| is_cast(i, v)) {
        return Ok(None);
    }
    let cast = |(i, v): (usize, &&Var<R>)| if is_cast(i, v) { v.to_dtype(to) } else { Ok((*v).clone()) };
    ins.iter().enumerate().map(cast).collect::<Result<_>>().map(Some)
}

/// Casts the operands of `op` as the surrounding [`autocast`] does, for a [`Function`](crate::Function) that computes
/// the same as `op`. Outside of autocast they are returned unchanged.
#[track_caller]
pub fn autocast_operands<R: Runtime, const N: usize>(op: &Op, ins: [&Var<R>; N]) -> Result<[Var<R>; N]> {
    Ok(match operands(op, &ins)? {
        Some(cast) => std::array::from_fn(|i| cast[i].clone()),
        None => ins.map(Var::clone),
    })
}

fn target<R: Runtime>(op: &Op, half: DType, ins: &[&Var<R>]) -> Option<DType> {
    let floats = || ins.iter().map(|v| v.spec().dtype).filter(|dtype| dtype.is_float());
    if floats().any(|dtype| dtype == DType::F64) {
        return matches!(policy(op), CastPolicy::Widest).then_some(DType::F64);
    }
    match policy(op) {
        CastPolicy::Half => Some(half),
        CastPolicy::Full => Some(DType::F32),
        CastPolicy::Widest => floats().reduce(|a, b| if a == b { a } else { DType::F32 }),
        CastPolicy::Given => None,
    }
}
