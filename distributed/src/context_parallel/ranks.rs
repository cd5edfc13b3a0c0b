//! A communicator as the group that sequences are cut over.

use std::sync::Arc;

use autograd::{Function, Var, apply_function, autocast_dtype};
use nn::parallel::{ContextAttention, ContextGroup, SequencePart};
use numcore::{
    Error, Result, Runtime, Shape,
    fused::Attention,
    ops::{Apply, PointwiseOps},
};

use super::{ContextExchange, gathered::GatheredAttention, order::ZigZag, ring::RingAttention, ulysses::by_heads};
use crate::comm::{Comm, Communicator};

/// The ranks of a communicator, over which [`cut_sequences`](nn::parallel::cut_sequences) cuts the sequences of a model.
/// [`Mesh::context_parallel`](crate::mesh::Mesh::context_parallel) gives models those along the context axis.
#[derive(Clone, Debug)]
pub struct ContextRanks<R: Runtime> {
    comm: Comm<R>,
    exchange: ContextExchange,
}

impl<R: Runtime> ContextRanks<R> {
    /// The group of these ranks.
    pub fn group(comm: &Comm<R>, exchange: ContextExchange) -> Arc<dyn ContextGroup<R>> {
        Arc::new(ContextRanks { comm: comm.clone(), exchange })
    }

    fn order(&self, tokens: usize) -> Result<ZigZag> {
        ZigZag::of(tokens, self.comm.rank(), self.comm.size()).map_err(|error| error.on_rank(self.comm.world_rank()))
    }

    /// The order of the sequence that queries and keys are parts of.
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

impl<R: Runtime> ContextGroup<R> for ContextRanks<R> {
    fn size(&self) -> usize {
        self.comm.size()
    }

    fn part(&self, tokens: usize) -> Result<SequencePart> {
        Ok(self.order(tokens)?.part_of(self.comm.rank()))
    }

    fn attention(&self, qkv: [&Var<R>; 3], options: ContextAttention<'_, R>, of: &str) -> Result<Var<R>> {
        let cast = |x: &Var<R>| autocast_dtype().map_or_else(|| Ok(x.clone()), |dtype| x.to_dtype(dtype));
        let [q, k, v] = [cast(qkv[0])?, cast(qkv[1])?, cast(qkv[2])?];
        let shapes = [&q, &k, &v].map(|x| x.spec().shape);
        let order = self.order_of(shapes)?;
        let ContextAttention { causal, window, scale, softcap, segments } = options;
        let op = Attention {
            causal,
            window: [window, None],
            softcap,
            masked: segments.is_some(),
            ..Attention::new(scale.unwrap_or(1.0 / (shapes[0][3] as f64).sqrt()))
        };
        if let Some(segments) = segments.filter(|s| s.spec().shape[..] != [shapes[0][0], order.tokens()]) {
            let why = format!("segments must be [B, T] of all {} tokens of a sequence", order.tokens());
            return Err(Error::shape("attention", &[segments.spec().shape], why).on_rank(self.comm.world_rank()));
        }
        if self.exchange == ContextExchange::Ulysses {
            return by_heads(&self.comm, order, [&q, &k, &v], (op, segments.cloned()), of);
        }
        let segments = segments.map(|segments| segments.value()).transpose()?;
        let (comm, of) = (self.comm.clone(), of.into());
        let node: Arc<dyn Function<R>> = match self.exchange {
            ContextExchange::Ring if window.is_some() => {
                let why = "a ring of keys and values has no sliding windows: take `ContextExchange::AllGather`";
                return Err(Error::argument("attention", why).on_rank(self.comm.world_rank()));
            }
            ContextExchange::Ring => Arc::new(RingAttention { comm, order, op, segments, of }),
            _ => Arc::new(GatheredAttention { comm, order, op, segments, of }),
        };
        Ok(apply_function(node, &[&q, &k, &v])?.remove(0))
    }
}
