//! Strategies: ways of spreading training over ranks.
//!
//! A [`Strategy`] places gradients during a backward pass, sums them over ranks, measures the sums and updates
//! parameters. Everything else of a training step is written once over it, in [`train`](crate::train). [`StrategySet`]
//! combines several strategies of one model: of experts and of the rest, or of the pipeline stages of a rank.

mod buffers;
mod hyper;
mod loan;
mod partial_gradients;
mod ranks;
mod set;
mod set_checkpoint;
mod tensor_axis;
mod tied;

use std::{any::Any, fmt, sync::Arc};

use autograd::{BackwardHook, Leaf};
use numcore::{Result, Runtime, Tensor};
use optim::HyperParams;

use crate::{checkpoint::Checkpointed, combinations::Features};

pub use buffers::BufferSync;
use hyper::not_reported;
pub(crate) use loan::not_owned;
pub use loan::{FullParameters, GradLoan};
pub(crate) use partial_gradients::PartialSums;
pub use ranks::{BatchShare, StepRanks};
pub use set::StrategySet;
pub(crate) use set::{SetKind, StrategyPart};
pub(crate) use tensor_axis::{TensorAxis, described};
pub use tied::Tie;
pub(crate) use tied::Tied;

/// A predicate that selects parameters, for example those of a norm.
pub type LeafFilter<'a, R> = dyn Fn(&Arc<Leaf<R>>) -> bool + 'a;

/// Spreads training over ranks: places gradients during the backward pass, sums them, and updates parameters.
///
/// A step calls [`prepare`](Strategy::prepare). For each backward pass it calls [`begin`](Strategy::begin), the methods
/// of the hook and [`end`](Strategy::end). After the last pass it calls [`finish`](Strategy::finish) and
/// [`update`](Strategy::update). All ranks make the same calls in the same order, with any data.
pub trait Strategy<R: Runtime>: BackwardHook<R> + Checkpointed<R> + Any + Send + Sync {
    /// The ranks that train together.
    fn ranks(&self) -> &StepRanks<R>;

    /// Features of the strategy; some [exclude](crate::combinations) others.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Discards the gradients of the last step and prepares for the next one. `active` tells whether all ranks compute
    /// something in it, or only some. Ranks without examples make the same collective calls.
    fn prepare(&mut self, active: ActiveRanks) -> Result<()>;

    /// Begins a backward pass through a stage of the model; a model without stages is stage 0. In the last pass
    /// gradients become final one by one. They may be sent during it, or in [`finish`](Strategy::finish).
    fn begin(&mut self, stage: usize, pass: BackwardPass) -> Result<()>;

    /// Ends a backward pass. A rank that had nothing to sweep calls [`begin`](Strategy::begin) and this method too. A
    /// pipeline, whose passes follow one another in any order, calls [`begin`](Strategy::begin) alone.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits, after the last backward pass, until every gradient is the sum over all ranks and micro-batches. This
    /// holds for the part of each gradient that the rank keeps.
    #[doc(alias("wait_and_unflatten"))]
    fn finish(&mut self) -> Result<()>;

    /// Sums over the parameters for which `counts` is true: `[S]` on the device, equal on every rank. `None`, without a
    /// call of other ranks, if the optimizer's rules have no sums. Parts of sharded parameters are summed over ranks.
    /// The bits do not depend on buckets or units, as far as these do not cut parameters.
    ///
    /// # Errors
    /// Errors of [`update`](Strategy::update), of [`Summed::Rule`].
    fn sums(&mut self, what: &Summed<'_, R>, counts: &LeafFilter<'_, R>) -> Result<Option<Tensor<R>>>;

    /// Tells whether all gradients are finite, on all ranks. Waits for the device.
    fn is_finite(&self) -> Result<bool>;

    /// Checks that [`update`](Strategy::update) can begin. Changes nothing.
    ///
    /// # Errors
    /// Fails if memory that the update writes has another holder, or if a learning rate is no number.
    fn check_update(&mut self) -> Result<()>;

    /// Adapts the optimizer's rules to the totals of [`Summed::Rule`], equal on all ranks, before the update. `loss` is
    /// the mean of the step.
    ///
    /// # Errors
    /// Fails if a rule cannot adapt to them.
    fn adapt(&mut self, sums: &[f64], loss: f64) -> Result<()> {
        let _ = (sums, loss);
        Ok(())
    }

    /// Updates the parameters from the gradients times a scalar on the device, after
    /// [`check_update`](Strategy::check_update) has succeeded.
    fn update(&mut self, scale: &Tensor<R>) -> Result<()>;

    /// Makes the buffers of all ranks equal after an update. Every rank calls it.
    fn sync_buffers(&self, how: BufferSync) -> Result<()>;

    /// The learning rate of the next update (of the first group); none if there are no parameters.
    fn learning_rate(&self) -> Option<f64>;

    /// The hyper-parameters of each group of the optimizer, with the names of the parameters of which checkpoints have
    /// state.
    ///
    /// # Errors
    /// Fails if the strategy does not report them.
    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        not_reported()
    }

    /// Checks that [`set_hyper_parameters`](Strategy::set_hyper_parameters) would accept these groups. Changes nothing.
    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        not_reported()
    }

    /// Replaces the hyper-parameters of each group, in the order of [`hyper_parameters`](Strategy::hyper_parameters).
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        not_reported()
    }

    /// Takes out this rank's part of the summed gradient of a trained parameter, to be added to the gradients of its
    /// copies in other stages. Ranks of equal number among the replicas of each stage keep the same elements.
    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        Err(not_owned(leaf))
    }

    /// Takes back the gradient that [`lend_grad`](Strategy::lend_grad) gave.
    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        let _ = sum;
        Err(not_owned(leaf))
    }

    /// Prefetches the sharded parameters of a stage that is about to be used.
    fn unshard(&mut self, stage: usize) -> Result<()> {
        let _ = stage;
        Ok(())
    }

    /// Frees the parameters that [`unshard`](Strategy::unshard) gathered, of a stage that is not used for a while.
    fn reshard(&mut self, stage: usize) -> Result<()> {
        let _ = stage;
        Ok(())
    }

    /// Gathers all parameters of this rank's stages, for evaluation and export, until the scope ends. Every rank calls
    /// it.
    fn gather_full_params(&self) -> Result<FullParameters> {
        Ok(FullParameters::default())
    }
}

/// The subject of [`Strategy::sums`].
pub enum Summed<'a, R: Runtime> {
    /// Squares of the summed gradients: one sum, the squared L2 norm.
    Squares,
    /// The sums to which the optimizer's rules adapt, from the gradients times a scalar on the device. This is the
    /// first phase of an update, after [`check_update`](Strategy::check_update) has succeeded.
    Rule(&'a Tensor<R>),
}

/// The ranks that compute something in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActiveRanks {
    /// All ranks.
    All,
    /// Some ranks: others may have no example.
    Some,
}

/// The position of a backward pass through a stage among those of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BackwardPass {
    /// A pass that others follow.
    Earlier,
    /// The last pass. For an unstaged model it has the weight of this rank's losses of the step, for strategies that
    /// send anything but sums. Of a pipeline whose gradients are compressed it has the weight of the replica's losses,
    /// and begins after all passes: no gradient follows.
    Last(Option<LossWeight>),
}

impl BackwardPass {
    /// Tells whether this is the stage's last backward pass of the step.
    pub fn is_last(self) -> bool {
        self != BackwardPass::Earlier
    }
}

/// The weight of this rank's losses of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossWeight {
    /// The sum of the weights of the losses.
    pub weight: f64,
    /// The factor of the losses: the loss scale, or 1 without one.
    pub scale: f64,
    /// True if this rank knows that the step may be skipped once its gradients are known. Ranks may differ in it.
    pub skippable: bool,
}

impl<R: Runtime> dyn Strategy<R> {
    /// The strategy as an `S`; none if it has another type.
    pub fn downcast_ref<S: Strategy<R>>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }

    /// The strategy as a mutable `S`; none if it has another type.
    pub fn downcast_mut<S: Strategy<R>>(&mut self) -> Option<&mut S> {
        (self as &mut dyn Any).downcast_mut()
    }
}

impl<R: Runtime> fmt::Debug for dyn Strategy<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Strategy({:?})", self.features())
    }
}
