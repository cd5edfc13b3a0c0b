//! A communicator as the group that sequences are cut over.

use std::sync::Arc;

use autograd::{Function, Var, apply_function, autocast_operands};
use nn::parallel::{ContextAttention, ContextGroup, SequencePart};
use numcore::{Error, Result, Runtime, Shape, fused::Attention, ops::Apply};

use super::{
    ContextExchange, cut::CutAttention, gathered::GatheredAttention, order::ZigZag, programs::CutProgram,
    ring::RingAttention, ulysses::by_heads,
};
use crate::comm::{Collectives, Comm, Communicator};

/// The ranks of a communicator, over which [`cut_sequences`](nn::parallel::cut_sequences) cuts the sequences of a
/// model. [`Mesh::context_parallel`](crate::mesh::Mesh::context_parallel) uses the ranks along the context axis.
#[derive(Clone, Debug)]
pub struct ContextRanks<R: Runtime> {
    comm: Comm<R>,
    exchange: ContextExchange,
}

impl<R: Runtime> ContextRanks<R> {
    /// The context group of these ranks.
    pub fn group(comm: &Comm<R>, exchange: ContextExchange) -> Arc<dyn ContextGroup<R>> {
        Arc::new(ContextRanks { comm: comm.clone(), exchange })
    }

    fn order(&self, tokens: usize) -> Result<ZigZag> {
        ZigZag::of(tokens, self.comm.rank(), self.comm.size()).map_err(|error| error.on_rank(self.comm.world_rank()))
    }

    /// The order of the sequence that queries and keys are parts of; an error unless their shapes fit.
    fn order_of(&self, [q, k, v]: [Shape; 3]) -> Result<ZigZag> {
        let fits = [q, k, v].iter().all(|shape| shape.rank() == 4) && q[2] == k[2] && k[2] == v[2];
        if !fits {
            let why =
                "needs q [B, H, T, D], k and v [B, G, T, D], of the same part of a sequence that is cut over ranks";
            return Err(Error::shape("attention", &[q, k, v], why).on_rank(self.comm.world_rank()));
        }
        self.order(q[2] * self.comm.size())
    }
}

impl<R: Runtime> ContextRanks<R> {
    /// The number of keys before its own position that a query sees, if limited; an error for unsupported windows.
    fn window_of(&self, options: &ContextAttention<'_, R>, shapes: &[Shape]) -> Result<Option<usize>> {
        let why = match options.window {
            (None, None) => return Ok(None),
            (before, None) if options.causal => return Ok(before),
            _ => {
                "a sliding window over sequences that are cut over ranks is for causal attention, and of keys before a query"
            }
        };
        Err(Error::shape("attention", shapes, why).on_rank(self.comm.world_rank()))
    }
}

impl<R: Runtime> ContextGroup<R> for ContextRanks<R> {
    fn size(&self) -> usize {
        self.comm.size()
    }

    fn part(&self, tokens: usize) -> Result<SequencePart> {
        Ok(self.order(tokens)?.part_of(self.comm.rank()))
    }

    fn attention(&self, qkv: [&Var<R>; 3], options: ContextAttention<'_, R>, of: &str) -> Result<Var<R>> {
        let shapes = qkv.map(|x| x.spec().shape);
        let order = self.order_of(shapes)?;
        if let Some((program, args)) = options.program {
            let cut = CutProgram { comm: &self.comm, order, exchange: self.exchange, of, program, args };
            return cut.attend(qkv);
        }
        let window = self.window_of(&options, &shapes)?;
        let ContextAttention { causal, scale, softcap, segments, .. } = options;
        let op = Attention {
            causal,
            window: [window, None],
            softcap,
            masked: segments.is_some(),
            ..Attention::new(scale.unwrap_or(1.0 / (shapes[0][3] as f64).sqrt()))
        };
        let [q, k, v] = autocast_operands(&op.clone().into(), qkv)?;
        if let Some(segments) = segments.filter(|s| s.spec().shape[..] != [shapes[0][0], order.tokens()]) {
            let why = format!("segments must be [B, T] of all {} tokens of a sequence", order.tokens());
            return Err(Error::shape("attention", &[segments.spec().shape], why).on_rank(self.comm.world_rank()));
        }
        let segments = segments.map(|segments| segments.value()).transpose()?;
        let cut = CutAttention { comm: self.comm.clone(), order, op, segments, of: of.into() };
        let node: Arc<dyn Function<R>> = match self.exchange {
            ContextExchange::Ulysses => return by_heads(cut, [&q, &k, &v]),
            ContextExchange::Ring => Arc::new(RingAttention(cut)),
            ContextExchange::AllGather => Arc::new(GatheredAttention(cut)),
        };
        Ok(apply_function(node, &[&q, &k, &v])?.remove(0))
    }

    fn agree(&self, what: &str, own: &[u8]) -> Result<()> {
        self.comm.agree(what, own)
    }
}
