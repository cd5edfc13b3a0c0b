//! Attention by a program over a sequence that is cut over ranks: positions are those in the whole sequence.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Shape,
    fused::AttentionProgram,
    ops::{Apply, ViewOps, cat},
};

use super::{
    ContextExchange,
    cut::{split_keys_values, stacked},
    order::ZigZag,
    sequence::{SequenceExchange, SequenceStep},
    ulysses::of_heads,
};
use crate::comm::{Comm, Communicator, Named};

/// A program with its arguments, and the ranks that compute it together.
pub(super) struct CutProgram<'a, R: Runtime> {
    pub(super) comm: &'a Comm<R>,
    pub(super) order: ZigZag,
    pub(super) exchange: ContextExchange,
    /// The name of the layer, which labels its collective calls.
    pub(super) of: &'a str,
    pub(super) program: &'a AttentionProgram,
    /// The arguments of all heads of this rank and of the whole sequence.
    pub(super) args: &'a [&'a Var<R>],
}

impl<R: Runtime> CutProgram<'_, R> {
    /// Attention of this rank's queries over the keys and values of all ranks: of its heads, or with all keys gathered.
    pub(super) fn attend(&self, [q, k, v]: [&Var<R>; 3]) -> Result<Var<R>> {
        let &CutProgram { comm, order, program, .. } = self;
        if program.has_blocks() {
            let why =
                "the program has a table of blocks, of whole sequences: leave it out where these are cut over ranks";
            return Err(Error::unsupported("attention", why).on_rank(comm.world_rank()));
        }
        let (shape, tokens) = (q.spec().shape, order.tokens());
        let scores = Shape::new(&[shape[0], shape[1], tokens, tokens])?;
        if let Some(arg) = self.args.iter().find(|arg| arg.spec().shape.broadcast(&scores) != Some(scores)) {
            let why = format!("an argument broadcasts to the scores {scores} of this rank's heads and whole sequences");
            let error = Error::shape("AttentionProgram", &[arg.spec().shape, scores], why);
            return Err(error.on_rank(comm.world_rank()));
        }
        if self.exchange == ContextExchange::Ulysses {
            let heads = q.spec().shape[1] / order.ranks;
            let first = order.rank * heads;
            return of_heads(&Named::over(comm, self.of), order, [q, k, v], |[q, k, v]| {
                let args = self.args_along(3, first, heads)?;
                let here = program.clone().shifted(0, first, 0, 0);
                here.attend(q, k, v, &args.iter().collect::<Vec<_>>())
            });
        }
        let gather = SequenceExchange { what: SequenceStep::Gather, comm: comm.clone(), order, of: self.of.into() };
        let [k, v] = split_keys_values(&gather.apply(&cat(&[k, v], -1)?)?, k.spec().shape[3])?;
        let chunk = |(k_of, at): (usize, std::ops::Range<usize>)| {
            let rows = order.rows((k_of, k_of + 1));
            let args = self.args_along(2, at.start, at.len())?;
            let here = program.clone().shifted(0, 0, at.start, 0);
            here.attend(&q.narrow(2, rows.start, rows.len())?, &k, &v, &args.iter().collect::<Vec<_>>())
        };
        stacked(&order.chunks_of(order.rank).into_iter().enumerate().map(chunk).collect::<Result<Vec<_>>>()?)
    }

    /// The arguments, with a part of the axis that is `back` axes before the end. The third last one has heads, the
    /// second last one queries.
    fn args_along(&self, back: usize, start: usize, len: usize) -> Result<Vec<Var<R>>> {
        let part = |arg: &&Var<R>| {
            let shape = arg.spec().shape;
            let axis = shape.rank().checked_sub(back).filter(|&axis| shape[axis] > 1);
            axis.map_or_else(|| Ok((*arg).clone()), |axis| arg.narrow(axis as isize, start, len))
        };
        self.args.iter().map(part).collect()
    }
}
