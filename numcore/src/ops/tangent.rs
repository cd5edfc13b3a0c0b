//! Tangents of op calls: the forward mode of differentiation.

use smallvec::SmallVec;

use super::{Apply, Matmul, Op, Outs, PointwiseOps, Rule, ViewOp};
use crate::{Error, Result, Tensor};

/// The tangents of the outputs of an op call, given those of its inputs, in the forward mode of differentiation. `None`
/// stands for zeros, in `given` as in the result. `ins` and `outs` are the values of the call.
///
/// A program has a program of its tangents; a linear op is applied to the tangent itself. So the tangents are
/// differentiable in turn.
///
/// # Errors
/// An error for a fused op, which has no rule of its own: apply its decomposition instead.
#[track_caller]
pub fn tangents<T: Apply>(op: &Op, ins: &[&T], outs: &[T], given: &[Option<&T>]) -> Result<Outs<Option<T>>> {
    let one = |tangent| Outs::from_iter([tangent]);
    let mut found = match op {
        Op::Pointwise(pointwise) => match pointwise.tangents(ins, given)? {
            Some(tangents) => tangents.into_iter().map(Some).collect(),
            None => outs.iter().map(|_| None).collect(),
        },
        Op::Reduce(reduce) => one(reduce.tangent(ins, &outs[0], given)?),
        Op::ArgReduce(_) => one(None),
        // Linear in the first operand; the others are positions.
        Op::View(_) | Op::Embed(_) | Op::Fold(_) | Op::Split(_) | Op::Gather(_) | Op::ScatterAdd(_) => match given[0] {
            None => outs.iter().map(|_| None).collect(),
            Some(t) => {
                let linear: SmallVec<[&T; 4]> = [t].into_iter().chain(ins[1..].iter().copied()).collect();
                T::apply(op.clone(), &linear)?.into_iter().map(Some).collect()
            }
        },
        Op::Cat(_) => {
            let all = ins.iter().zip(given).map(|(x, t)| t.map_or_else(|| zeros_like(*x), |t| Ok(t.clone())));
            let all = all.collect::<Result<SmallVec<[T; 4]>>>()?;
            T::apply(op.clone(), &all.iter().collect::<SmallVec<[&T; 4]>>())?.into_iter().map(Some).collect()
        }
        Op::Matmul(_) => {
            let left = given[0].map(|t| T::apply1(Matmul, &[t, ins[1]])).transpose()?;
            let right = given[1].map(|t| T::apply1(Matmul, &[ins[0], t])).transpose()?;
            one(match (left, right) {
                (Some(left), Some(right)) => Some(left.add(&right)?),
                (left, right) => left.or(right),
            })
        }
        Op::Scan(scan) => one(scan.tangent(ins, &outs[0], given)?),
        Op::Sort(sort) => {
            let sorted = given[0].map(|t| sort.tangent(t, &outs[1])).transpose()?;
            Outs::from_iter([sorted, None])
        }
        Op::Fused(_) => return Err(Error::internal(op.name(), "a fused op has tangents by its decomposition")),
    };
    let is_float = |k: usize| outs[k].spec().dtype.is_float();
    found.iter_mut().enumerate().filter(|(k, _)| !is_float(*k)).for_each(|(_, t)| *t = None);
    Ok(found)
}

/// Zeros of the shape and dtype of `x`, of one element that is broadcast.
#[track_caller]
fn zeros_like<T: Apply>(x: &T) -> Result<T> {
    let spec = x.spec();
    let zero = Tensor::zeros(x.runtime(), vec![1; spec.shape.rank()], spec.dtype)?;
    T::apply1(ViewOp::Broadcast(spec.shape), &[&T::constant(zero)])
}
