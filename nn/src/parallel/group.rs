//! Exchanges between the ranks that a model is cut over, or that its experts are sharded over.

use std::{fmt::Debug, sync::Arc};

use autograd::Var;
use numcore::{Result, Runtime, Tensor, ops::MatmulOps};

/// An operation of ranks on a value; in backward its adjoint acts on the gradient.
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
    /// The value itself; its gradients are summed over the ranks.
    Copy,
    /// The sum of all ranks' values.
    AllReduce,
    /// This rank's part of the value along a dimension.
    Split(usize),
    /// The parts of all ranks, concatenated along a dimension. All ranks use the result alike.
    Gather(usize),
    /// The parts of all ranks, as with `Gather`, but each rank uses the result differently.
    AllGather(usize),
    /// This rank's part, along a dimension, of the sum of all ranks' values.
    ReduceScatter(usize),
}

impl Exchange {
    /// The exchange of the gradient.
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

    /// The name of the exchange in messages.
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

    /// Tells whether ranks wait for each other. They do not where each rank has all inputs already.
    pub fn communicates(self) -> bool {
        !matches!(self, Exchange::Copy | Exchange::Split(_))
    }
}

/// The ranks that a model's layers are cut over, as one of them sees the group. All ranks make the same calls in the
/// same order.
pub trait TensorGroup<R: Runtime>: Send + Sync + Debug {
    /// The index of this rank in the group.
    fn rank(&self) -> usize;
    /// The number of ranks.
    fn size(&self) -> usize;
    /// Applies the exchange `what` to `x`. `of` names the calling layer, so that its exchanges differ from those of
    /// other layers. The result is differentiable, any number of times.
    fn exchange(&self, what: Exchange, x: &Var<R>, of: &str) -> Result<Var<R>>;
    /// The linear layer `x · Wᵀ + b` with its exchange. With [`Exchange::AllGather`] it is the product of all ranks'
    /// parts of `x`. With [`Exchange::ReduceScatter`], it is this rank's part of the sum of all ranks' products,
    /// without `b`. A group may exchange `pieces` pieces one after another and compute beside the exchange; values are
    /// the same. The default exchanges everything at once.
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
    /// The element-wise maximum of all ranks' values, without a gradient.
    fn max(&self, x: &Tensor<R>, of: &str) -> Result<Tensor<R>>;
    /// Sends rank `j` the next `send[j]` rows of `x`, and returns the `recv[i]` rows that each rank `i` sent to this
    /// one, by rank. The result is differentiable, any number of times; a part may be empty.
    fn all_to_all(&self, x: &Var<R>, send: &[usize], recv: &[usize], of: &str) -> Result<Var<R>>;
    /// The bytes of every rank, by rank. The host waits for them.
    fn exchange_bytes(&self, own: &[u8], of: &str) -> Result<Vec<Vec<u8>>>;
}

/// The ranks that the experts of a mixture are sharded over, as one of them sees the groups.
#[derive(Debug)]
pub struct ExpertGroups<R: Runtime> {
    /// The ranks with different experts, which together have all of them.
    pub experts: Arc<dyn TensorGroup<R>>,
    /// The ranks with different tokens, of other examples or of other parts of a sequence. They contain one group of
    /// the kind of `experts` for each copy of the experts.
    pub examples: Arc<dyn TensorGroup<R>>,
}

impl<R: Runtime> Clone for ExpertGroups<R> {
    fn clone(&self) -> Self {
        ExpertGroups { experts: self.experts.clone(), examples: self.examples.clone() }
    }
}
