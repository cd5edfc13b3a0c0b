//! The exchange between the ranks that a model is cut over, or its experts are shared out among.

use std::{fmt::Debug, sync::Arc};

use autograd::Var;
use numcore::{Result, Runtime, Tensor, ops::MatmulOps};

/// What ranks do with a value, and in backward with its gradient: each is the gradient of another.
///
/// | forward | backward | the input is | the output is |
/// |---|---|---|---|
/// | `Copy` | `AllReduce` | equal on all ranks | the same, used differently by each |
/// | `AllReduce` | `Copy` | a part of a sum | the sum, equal on all ranks |
/// | `Split` | `Gather` | equal on all ranks | this rank's part along a dimension |
/// | `Gather` | `Split` | a part along a dimension | the whole, used alike by all ranks |
/// | `AllGather` | `ReduceScatter` | a part along a dimension | the whole, used differently by each rank |
/// | `ReduceScatter` | `AllGather` | a part of a sum | this rank's part, along a dimension, of the sum |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exchange {
    /// The value itself; its gradients are summed.
    Copy,
    /// The sum of all ranks' values.
    AllReduce,
    /// This rank's part of the value along a dimension.
    Split(usize),
    /// The parts of all ranks, one after another along a dimension.
    Gather(usize),
    /// The parts of all ranks, like `Gather`, where each rank computes something else with them.
    AllGather(usize),
    /// This rank's part, along a dimension, of the sum of all ranks' values.
    ReduceScatter(usize),
}

impl Exchange {
    /// What is done with the gradient.
    pub fn backward(self) -> Self {
        match self {
            Exchange::Copy => Exchange::AllReduce,
            Exchange::AllReduce => Exchange::Copy,
            Exchange::Split(dim) => Exchange::Gather(dim),
            Exchange::Gather(dim) => Exchange::Split(dim),
            Exchange::AllGather(dim) => Exchange::ReduceScatter(dim),
            Exchange::ReduceScatter(dim) => Exchange::AllGather(dim),
        }
    }

    /// What it is called in messages.
    pub fn name(self) -> &'static str {
        match self {
            Exchange::Copy => "copy",
            Exchange::AllReduce => "all_reduce",
            Exchange::Split(_) => "split",
            Exchange::Gather(_) => "gather",
            Exchange::AllGather(_) => "all_gather",
            Exchange::ReduceScatter(_) => "reduce_scatter",
        }
    }

    /// Whether ranks wait for each other: they do not where each has all that it needs.
    pub fn communicates(self) -> bool {
        !matches!(self, Exchange::Copy | Exchange::Split(_))
    }
}

/// The ranks that a model's layers are cut over, seen from one of them. All ranks make the same calls in the same order.
pub trait TensorGroup<R: Runtime>: Send + Sync + Debug {
    /// This rank's place in the group.
    fn rank(&self) -> usize;
    /// How many ranks there are.
    fn size(&self) -> usize;
    /// Does `what` with `x`; `of` is the layer that asks, by which calls are told apart. The result is differentiable, any number of times.
    fn exchange(&self, what: Exchange, x: &Var<R>, of: &str) -> Result<Var<R>>;
    /// The linear layer `x · Wᵀ + b` with what it exchanges: the product of all ranks' parts of `x` ([`Exchange::AllGather`]), or this rank's part of
    /// the sum of all ranks' products ([`Exchange::ReduceScatter`], without `b`). A group may exchange so many pieces one after another and compute
    /// beside them; the values are the same. One after the other, unless a group knows better.
    fn linear_in_pieces(
        &self,
        what: Exchange,
        [x, weight]: [&Var<R>; 2],
        bias: Option<&Var<R>>,
        pieces: usize,
        of: &str,
    ) -> Result<Var<R>> {
        let _ = pieces;
        match what {
            Exchange::AllGather(_) => self.exchange(what, x, of)?.linear(weight, bias),
            _ => self.exchange(what, &x.linear(weight, bias)?, of),
        }
    }
    /// The largest of all ranks' values, element by element, without a gradient.
    fn max(&self, x: &Tensor<R>, of: &str) -> Result<Tensor<R>>;
    /// Sends rank `j` the next `send[j]` rows of `x`, and gives the `recv[i]` rows that each rank `i` sent here, by rank. The result is
    /// differentiable, any number of times; a part may be empty.
    fn all_to_all(&self, x: &Var<R>, send: &[usize], recv: &[usize], of: &str) -> Result<Var<R>>;
    /// The bytes of every rank, by rank. The host waits.
    fn exchange_bytes(&self, own: &[u8], of: &str) -> Result<Vec<Vec<u8>>>;
}

/// The ranks among which the experts of a mixture are shared out, seen from one of them.
#[derive(Debug)]
pub struct ExpertGroups<R: Runtime> {
    /// The ranks that have different experts, which together are all of them.
    pub experts: Arc<dyn TensorGroup<R>>,
    /// The ranks that read different tokens, of other examples or of other parts of a sequence: as many groups of the first kind as there are
    /// copies of the experts.
    pub examples: Arc<dyn TensorGroup<R>>,
}

impl<R: Runtime> Clone for ExpertGroups<R> {
    fn clone(&self) -> Self {
        ExpertGroups { experts: self.experts.clone(), examples: self.examples.clone() }
    }
}
