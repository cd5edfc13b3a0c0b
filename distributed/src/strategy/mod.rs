//! Strategies: ways of spreading training over ranks.
//!
//! A [`Strategy`] knows where gradients go while a backward pass goes on, sums them, measures what was summed and
//! updates parameters. Everything else of a training step is written once over it, in [`train`](crate::train).
//! [`StrategySet`] is several strategies of one model as one: of experts and of the rest, or of the stages of a
//! pipeline that a rank has.

mod buffers;
mod hyper;
mod loan;
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
use hyper::untold;
pub(crate) use loan::not_of;
pub use loan::{FullParameters, GradLoan};
pub use ranks::{BatchShare, StepRanks};
pub use set::StrategySet;
pub(crate) use set::{SetKind, StrategyPart};
pub(crate) use tensor_axis::{TensorAxis, described};
pub use tied::Tie;
pub(crate) use tied::Tied;

/// Which parameters a sum is over.
pub type LeafFilter<'a, R> = dyn Fn(&Arc<Leaf<R>>) -> bool + 'a;

/// Spreads training over ranks: says where gradients go while the backward pass goes on, sums them, and updates
/// parameters.
///
/// A step calls [`prepare`](Strategy::prepare); for each backward pass [`begin`](Strategy::begin), the hook's methods
/// and [`end`](Strategy::end); after the last one [`finish`](Strategy::finish), and [`update`](Strategy::update). All
/// ranks make the same calls in the same order, whatever their data.
pub trait Strategy<R: Runtime>: BackwardHook<R> + Checkpointed<R> + Any + Send + Sync {
    /// The ranks that train together.
    fn ranks(&self) -> &StepRanks<R>;

    /// Features of the strategy, of which some [exclude](crate::combinations) others.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Forgets the last step's gradients, before a step in which all ranks compute something, or some: those that do
    /// not make the same collective calls all the same.
    fn prepare(&mut self, who: Computing) -> Result<()>;

    /// Begins a backward pass through a stage of the model, 0 where it is whole. In the last pass gradients become
    /// final one by one: they may be sent in it, or in [`finish`](Strategy::finish).
    fn begin(&mut self, stage: usize, pass: BackwardPass) -> Result<()>;

    /// Ends a backward pass. Where this rank had nothing to sweep, [`begin`](Strategy::begin) and this are called all
    /// the same. A pipeline, whose passes follow one another in any order, calls [`begin`](Strategy::begin) alone.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits, after the last backward pass, until every gradient is the sum over all ranks and micro-batches, as far as
    /// this rank keeps it.
    #[doc(alias("wait_and_unflatten"))]
    fn finish(&mut self) -> Result<()>;

    /// The square of the L2 norm of the summed gradients of the parameters for which `counts` is true: a scalar on the
    /// device, the same on every rank. Where gradients are cut, parts are summed over ranks here. It does not depend on buckets or units that gradients lie in, as far as these do not cut parameters.
    fn squared_norm(&self, counts: &LeafFilter<'_, R>) -> Result<Tensor<R>>;

    /// Tells whether all gradients are finite, on all ranks; waits for the device.
    fn is_finite(&self) -> Result<bool>;

    /// An error if [`update`](Strategy::update) could not begin: because memory that it writes has another holder, or a
    /// learning rate is no number. Nothing is changed.
    fn check_update(&mut self) -> Result<()>;

    /// Updates the parameters from the gradients times a scalar on the device.
    fn update(&mut self, scale: &Tensor<R>) -> Result<()>;

    /// Makes the ranks' buffers equal after an update, on every rank.
    fn sync_buffers(&self, how: BufferSync) -> Result<()>;

    /// The learning rate of the next update (of the first group); none if there are no parameters.
    fn learning_rate(&self) -> Option<f64>;

    /// The hyper-parameters of each group of the optimizer, with the parameters of which there is state in checkpoints.
    ///
    /// # Errors
    /// For a strategy or an optimizer that does not tell them.
    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        untold()
    }

    /// An error if [`set_hyper_parameters`](Strategy::set_hyper_parameters) would refuse these. Nothing is changed.
    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        untold()
    }

    /// Replaces the hyper-parameters of each group, in the order of [`hyper_parameters`](Strategy::hyper_parameters).
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        untold()
    }

    /// Takes out what this rank keeps of a trained parameter's summed gradient, to be added to that of its copies in
    /// other stages: ranks of one number among the replicas of each stage keep the same elements.
    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        Err(not_of(leaf))
    }

    /// Takes back what [`lend_grad`](Strategy::lend_grad) gave.
    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        let _ = sum;
        Err(not_of(leaf))
    }

    /// Prefetches what is sharded of a stage's parameters: the stage is about to be used.
    fn unshard(&mut self, stage: usize) -> Result<()> {
        let _ = stage;
        Ok(())
    }

    /// Lets go what [`unshard`](Strategy::unshard) has gathered: the stage is not used for a while.
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

/// Ranks that compute something in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computing {
    /// All ranks.
    All,
    /// Some ranks: others may have no example.
    Some,
}

/// A backward pass through a stage among those of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BackwardPass {
    /// A pass that others follow.
    Earlier,
    /// The last pass; of a whole model, with the weight of this rank's losses of the step, for strategies that send
    /// anything but sums.
    Last(Option<LossWeight>),
}

impl BackwardPass {
    /// Tells whether it is the stage's last of the step.
    pub fn is_last(self) -> bool {
        self != BackwardPass::Earlier
    }
}

/// The weight of this rank's losses of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossWeight {
    /// The sum of what they weigh.
    pub weight: f64,
    /// The factor of the losses: the loss scale, 1 without one.
    pub scale: f64,
    /// True if the step may be left out once its gradients are known.
    pub skippable: bool,
}

impl<R: Runtime> dyn Strategy<R> {
    /// The strategy, if it is an `S`.
    pub fn downcast_ref<S: Strategy<R>>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }

    /// The strategy, to be changed, if it is an `S`.
    pub fn downcast_mut<S: Strategy<R>>(&mut self) -> Option<&mut S> {
        (self as &mut dyn Any).downcast_mut()
    }
}

impl<R: Runtime> fmt::Debug for dyn Strategy<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Strategy({:?})", self.features())
    }
}
