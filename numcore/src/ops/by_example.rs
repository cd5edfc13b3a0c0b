//! Gradients of a parameter for each example: op calls that sum over the rows of a batch, without the sum over
//! examples.

use smallvec::{SmallVec, smallvec};

use super::{Apply, Matmul, Op, Outs, Rule, ViewOps, stack};
use crate::{
    Error, Result,
    fused::{AttentionGrad, FusedOp, LinearGrad, sum_of_rows},
};

/// The result of `op`, the gradient of a parameter, for each of `examples`, `[B, ..]` for the result `[..]`. The first
/// axis of every activation among `ins` has the examples, or rows of which each example has equally many.
///
/// A product of matrices is one batched product.
///
/// # Errors
/// An error for an op that does not sum over rows, and for rows that the examples do not divide.
#[track_caller]
pub fn by_example<T: Apply>(op: &Op, ins: &[&T], examples: usize) -> Result<T> {
    if examples == 1 {
        return T::apply1(op.clone(), ins)?.unsqueeze(0);
    }
    match op {
        Op::Matmul(_) => {
            let (a, b) = (ins[0].spec().shape, ins[1].spec().shape);
            let ([k, rows], [_, n]) = (&a[..], &b[..]) else { return Err(mixed(op)) };
            let each = rows_of_each(op, *rows, examples)?;
            let left = ins[0].reshape([*k, examples, each])?.permute_axes(&[1, 0, 2])?;
            T::apply1(Matmul, &[&left, &ins[1].reshape([examples, each, *n])?])
        }
        Op::Reduce(reduce) => reduce.by_example(ins, examples)?.ok_or_else(|| mixed(op)),
        Op::ScatterAdd(scatter) => {
            let lengthened = |x: &T| {
                let shape = x.spec().shape;
                let each = rows_of_each(op, shape[0], examples)?;
                x.reshape([&[examples, each], &shape[1..]].concat())
            };
            let by_example = scatter.beside().ok_or_else(|| mixed(op))?;
            T::apply1(by_example, &[&lengthened(ins[0])?, &lengthened(ins[1])?])
        }
        Op::Fused(_) => Ok(all_by_example(op, ins, examples)?.remove(0)),
        _ => Err(mixed(op)),
    }
}

/// All outputs of a fused op, the gradients of parameters, for each of `examples`; see [`by_example`]. It runs on the
/// rows of each example. Operands with as many axes as any, and as long a first axis, have rows. Others are given
/// whole, but for the logsumexp of attention by programs, whose positions move along with the examples.
///
/// # Errors
/// The errors of [`by_example`].
#[track_caller]
pub fn all_by_example<T: Apply>(op: &Op, ins: &[&T], examples: usize) -> Result<Outs<T>> {
    if examples == 1 {
        return T::apply(op.clone(), ins)?.iter().map(|out| out.unsqueeze(0)).collect();
    }
    if let Op::Fused(FusedOp::LinearGrad(_)) = op {
        let (x, g) = (ins[LinearGrad::X].t()?, ins[LinearGrad::GRAD]);
        let bias = by_example(&sum_of_rows(g.spec()).into(), &[g], examples)?;
        return Ok(smallvec![by_example(&Matmul.into(), &[&x, g], examples)?, bias]);
    }
    let shapes: SmallVec<[_; 8]> = ins.iter().map(|x| x.spec().shape).collect();
    let rank = shapes.iter().map(|s| s.rank()).max().unwrap_or(0);
    let rows = shapes.iter().find(|s| s.rank() == rank && rank > 1).map(|s| s[0]).ok_or_else(|| mixed(op))?;
    let each = rows_of_each(op, rows, examples)?;
    let scored = match op {
        Op::Fused(FusedOp::ScoredAttentionGrad(grad)) => Some(grad),
        _ => None,
    };
    let of = |i: usize| {
        let rows = |(k, x): (usize, &&T)| {
            let shape = x.spec().shape;
            let is_statistic = scored.is_some() && k == AttentionGrad::LSE;
            let has_rows = (is_statistic || shape.rank() == rank) && shape[0] == rows;
            if has_rows { x.narrow(0, i * each, each) } else { Ok((*x).clone()) }
        };
        let ins = ins.iter().enumerate().map(rows).collect::<Result<SmallVec<[T; 8]>>>()?;
        let op = scored.map_or_else(|| op.clone(), |grad| grad.after_examples(i * each).into());
        T::apply(op, &ins.iter().collect::<SmallVec<[&T; 8]>>())
    };
    let all = (0..examples).map(of).collect::<Result<Vec<_>>>()?;
    let output = |k: usize| stack(&all.iter().map(|outs| &outs[k]).collect::<Vec<_>>(), 0);
    (0..all.first().map_or(0, |outs| outs.len())).map(output).collect()
}

/// The number of rows of each example.
#[track_caller]
pub(super) fn rows_of_each(op: &Op, rows: usize, examples: usize) -> Result<usize> {
    if examples > 0 && rows.is_multiple_of(examples) {
        return Ok(rows / examples);
    }
    Err(Error::range(op.name(), "number of rows", rows, format!("a multiple of {examples} examples")))
}

fn mixed(op: &Op) -> Error {
    let why = "this gradient of a parameter is no sum over the rows of examples, so examples have no gradients of it";
    Error::unsupported(op.name(), why)
}
