//! Operands of programs of scores: positions, arguments, and parts of them.

use std::ops::Range;

use smallvec::SmallVec;

use super::ScoredAttention;
use crate::{
    DType, Result, Shape, Tensor,
    ops::{Apply, Outs, PointwiseOps, ViewOps},
    pointwise::{Binary, Const, Expr, Inst, Program},
};

/// The position of a score: whole numbers (`i64`), counted over all ranks and all keys of a cache.
#[derive(Clone, Copy)]
pub struct ScorePosition<'b> {
    /// The example of the batch.
    pub batch: Expr<'b>,
    /// The head of the query.
    pub head: Expr<'b>,
    /// The position of the query in its sequence.
    pub query: Expr<'b>,
    /// The position of the key in its sequence.
    pub key: Expr<'b>,
}

impl<'b> ScorePosition<'b> {
    pub(super) const AXES: usize = ScoredAttention::AXES;

    pub(super) fn of(inputs: &[Expr<'b>]) -> Self {
        ScorePosition { batch: inputs[0], head: inputs[1], query: inputs[2], key: inputs[3] }
    }

    pub(super) fn shifted(self, by: [usize; 4]) -> Self {
        let ins: [Expr<'b>; 4] = std::array::from_fn(|axis| match by[axis] {
            0 => self.axes()[axis],
            by => self.axes()[axis] + by as i64,
        });
        Self::of(&ins)
    }

    pub(super) fn axes(self) -> [Expr<'b>; 4] {
        [self.batch, self.head, self.query, self.key]
    }
}

/// Part of an axis; the operand itself if the range is all of it.
#[track_caller]
pub(super) fn along<T: Apply>(x: &T, axis: usize, range: &Range<usize>) -> Result<T> {
    if range.len() == x.spec().shape[axis] { Ok(x.clone()) } else { x.narrow(axis as isize, range.start, range.len()) }
}

/// An argument of some queries and keys, along those of its axes that have them.
#[track_caller]
pub(super) fn arg_along<T: Apply>(arg: &T, queries: &Range<usize>, keys: &Range<usize>) -> Result<T> {
    let rank = arg.spec().shape.rank();
    let axis = |back: usize| rank.checked_sub(back).filter(|&axis| arg.spec().shape[axis] != 1);
    let arg = axis(2).map_or_else(|| Ok(arg.clone()), |axis| along(arg, axis, queries))?;
    axis(1).map_or_else(|| Ok(arg.clone()), |axis| along(&arg, axis, keys))
}

/// The positions of scores, counted from `first`: four values, each along its axis.
#[track_caller]
pub(super) fn positions<T: Apply>(like: &T, first: [usize; 4], sizes: [usize; 4]) -> Result<Vec<T>> {
    let of = |axis: usize| {
        let positions = Tensor::arange(like.runtime(), first[axis] as i64, 1i64, sizes[axis], DType::I64)?;
        Ok(T::constant(positions.reshape(Shape::new(&[1; 4])?.with(axis, sizes[axis]))?))
    };
    (0..sizes.len()).map(of).collect()
}

/// Applies a program to a score, if it takes one, positions, and arguments. Operands that it does not read do not
/// lengthen the result.
#[track_caller]
pub(super) fn run<T: Apply>(program: &Program, score: &[&T], operands: &[T]) -> Result<Outs<T>> {
    let all: SmallVec<[&T; 8]> = score.iter().copied().chain(operands).collect();
    let short = |x: &T| {
        let long = x.spec().shape.iter().enumerate().filter(|(_, n)| **n > 1).map(|(axis, _)| axis).collect::<Vec<_>>();
        long.into_iter().try_fold(x.clone(), |x, axis| x.narrow(axis as isize, 0, 1))
    };
    let given = all.iter().enumerate().map(|(i, x)| {
        let is_read = program.reads() >> i & 1 == 1;
        if is_read { Ok((*x).clone()) } else { short(x) }
    });
    let given = given.collect::<Result<SmallVec<[T; 8]>>>()?;
    let rest: SmallVec<[&T; 8]> = given[1..].iter().collect();
    given[0].apply_program_all(program, &rest, &[])
}

/// Tells whether a program gives the sum of the score and a value that does not depend on it, or hides the key. Its
/// derivative does not tell: that of `score + score.floor()` is 1 too.
pub(super) fn adds_to_score(score: &Program) -> bool {
    let insts = score.insts();
    let mut depends: Vec<bool> = Vec::with_capacity(insts.len());
    for inst in insts {
        let of_operands = match *inst {
            Inst::CastLike(a, _) => depends[a as usize], // of the other, only the dtype counts
            _ => inst.operands().any(|a| depends[a as usize]),
        };
        depends.push(of_operands || *inst == Inst::Input(0));
    }
    let hides = |at: u32| insts[at as usize] == Inst::Const(Const::Float(f64::NEG_INFINITY.to_bits()));
    let mut at = score.outputs()[0] as usize;
    loop {
        at = match insts[at] {
            Inst::Input(0) => return true,
            Inst::Binary(Binary::Add, a, b) if !depends[b as usize] => a as usize,
            Inst::Binary(Binary::Add, a, b) if !depends[a as usize] => b as usize,
            Inst::Binary(Binary::Sub, a, b) if !depends[b as usize] => a as usize,
            Inst::Select(c, a, b) if !depends[c as usize] && hides(b) => a as usize,
            _ => return false,
        };
    }
}

/// Tells whether a mask varies along queries and along keys. A mask that does not is a small tensor.
pub(super) fn varies_along_both<T: Apply>(mask: &Program, args: &[T]) -> bool {
    let reads = |i: usize| mask.reads() >> i & 1 == 1;
    let varies = |axis: usize| {
        let back = ScorePosition::AXES - axis;
        let is_long = |arg: &T| {
            let shape = arg.spec().shape;
            shape.rank().checked_sub(back).is_some_and(|axis| shape[axis] > 1)
        };
        reads(axis) || args.iter().enumerate().any(|(i, arg)| reads(ScorePosition::AXES + i) && is_long(arg))
    };
    varies(2) && varies(3)
}
