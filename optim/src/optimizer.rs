//! The interface of all optimizers.

use std::sync::Arc;

use autograd::{Gradients, Leaf, Var, backward_with_hooks};
use nn::parallel::Placed;
use numcore::{Flat, Result, Runtime, Tensor, Within};

use crate::{Combined, FlatGradients, FlatOptimizer, FlatParams, HyperParams, LrSchedule, OwnGradients, UpdateRule};

/// The interface of every optimizer, for code that does not depend on the update rule. Training steps use more of it:
/// [`OptimizerCore`].
pub trait Optimizer<R: Runtime>: OptimizerCore<R> {
    /// Runs the backward pass of `loss`, which must have one element, into the optimizer's own gradients.
    ///
    /// Gradients accumulate since the last step, so several micro-batches make one step. After an error the accumulated
    /// gradients are discarded. To observe each gradient when it is final, or to write to other memory, use
    /// [`backward_with_hooks`] and [`step_from`](OptimizerCore::step_from).
    #[track_caller]
    fn backward(&mut self, loss: &Var<R>) -> Result<()> {
        let write = &mut |gradients: &mut FlatGradients<R>| {
            backward_with_hooks(loss, gradients)?;
            gradients.losses.push(loss.value()?);
            Ok(())
        };
        self.accumulate(write).at_caller()
    }

    /// Updates the parameters from the gradients that [`backward`](Optimizer::backward) wrote since the last step. An
    /// elementwise rule takes one launch for each buffer whose parameters all have a gradient. The next backward pass
    /// overwrites the gradients.
    ///
    /// # Errors
    /// An error if there are no gradients. If the update fails, the gradients are kept.
    #[doc(alias("zero_grad"))]
    #[track_caller]
    fn step(&mut self) -> Result<()> {
        let mut own = std::mem::take(self.own_gradients());
        let done = own.spend(|gradients| self.step_from(gradients));
        *self.own_gradients() = own;
        done.at_caller()
    }

    /// Updates the parameters as [`step`](Optimizer::step) does, from gradients by leaf, which replace the optimizer's
    /// own.
    #[track_caller]
    fn step_with(&mut self, gradients: &Gradients<R>) -> Result<()> {
        self.zero_grad();
        self.accumulate(&mut |own| own.copy_from(gradients)).at_caller()?;
        self.step()
    }

    /// The optimizer's own gradients, to inspect, clip or replace them between [`backward`](Optimizer::backward) and
    /// [`step`](Optimizer::step). They can still be read after the step.
    #[track_caller]
    fn gradients(&mut self) -> Result<&mut FlatGradients<R>> {
        let mut own = std::mem::take(self.own_gradients());
        let made = own.get_mut(|| self.alloc_gradients()).map(|_| ());
        *self.own_gradients() = own;
        made.at_caller()?;
        self.own_gradients().get_mut(|| FlatGradients::new(&[]))
    }

    /// Discards the gradients accumulated since the last step. A step does this by itself.
    fn zero_grad(&mut self) {
        self.own_gradients().zero();
    }

    /// The number of steps taken so far.
    fn steps(&self) -> u64;

    /// The learning rate of the next step, for each group.
    fn lrs(&self) -> Vec<f64>;

    /// Sets the base learning rate of all groups.
    fn set_lr(&mut self, lr: f64) -> Result<()>;

    /// Sets the schedule. From now on learning rates are this function of the step and of each group's base rate.
    fn set_schedule(&mut self, schedule: Arc<dyn LrSchedule>);

    /// All state needed to resume exactly: `<state>.<parameter>`, `master.<parameter>` and `step.<parameter>`,
    /// `group.<k>.<hyper-parameter>` (`f64`) and `steps` (`i64`). The tensors are views: no update can run until they
    /// are dropped.
    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>>;

    /// Loads a state that [`state_dict`](Optimizer::state_dict) returned.
    ///
    /// # Errors
    /// An error that lists all entries that are missing or unexpected, or whose shape or dtype differs. Nothing changes
    /// then.
    fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()>;

    /// Advances a captured update to the next step: its learning rate, its step number and the numbers derived from
    /// them. Call it before each launch of the captured step.
    ///
    /// # Errors
    /// An error if no update was captured, for example by an optimizer that is not
    /// [capturable](crate::FlatOptimizer::capturable). Also if the numbers cannot be uploaded; the optimizer is then
    /// unchanged.
    fn advance(&mut self) -> Result<()>;
}

/// The part of an optimizer that training steps, checkpoints and sharding use. New update rules implement
/// [`UpdateRule`](crate::UpdateRule) or [`Elementwise`](crate::Elementwise) instead; the trait is sealed.
pub trait OptimizerCore<R: Runtime>: Sealed + Send + Sync {
    /// The parameters, buffer by buffer, in the order they were given.
    fn params(&self) -> Vec<&FlatParams<R>>;

    /// The flat buffers of the parameters, for example to read their values ([`FlatParams::weights`]).
    fn params_mut(&mut self) -> Vec<&mut FlatParams<R>>;

    /// Updates the parameters from gradients of the same layout, one buffer each, multiplied by the scalar `scale` if
    /// given. Parameters without a gradient are unchanged. If the update cannot begin, nothing changes. Rules with
    /// [`sums`](OptimizerCore::sums) have adapted before.
    fn update(&mut self, grads: &[Flat<R>], scale: Option<&Tensor<R>>) -> Result<()>;

    /// The number of sums over all parameters to which the rules adapt; 0 for rules that have none.
    fn sum_count(&self) -> usize;

    /// The first phase of an [`update`](OptimizerCore::update) whose rules adapt to sums: `[S]`, on the device, over
    /// the parameters for which `counts` is true. `None` if the rules have none; nothing is computed then.
    ///
    /// # Errors
    /// Errors of [`update`](OptimizerCore::update).
    fn sums(
        &mut self,
        rt: &R,
        grads: &[Flat<R>],
        scale: Option<&Tensor<R>>,
        counts: &dyn Fn(&Arc<Leaf<R>>) -> bool,
    ) -> Result<Option<Tensor<R>>>;

    /// Adapts the rules to the totals of the [`sums`](OptimizerCore::sums) over all parameters and ranks, before the
    /// update. `loss` is that of the gradients, if it is known.
    ///
    /// # Errors
    /// An error if a rule cannot adapt to them.
    fn adapt(&mut self, sums: &[f64], loss: Option<f64>) -> Result<()>;

    /// The gradients that [`backward`](Optimizer::backward) writes.
    fn own_gradients(&mut self) -> &mut OwnGradients<R>;

    /// Checks a state without loading it: returns the error that [`load_state_dict`](Optimizer::load_state_dict) would
    /// return.
    fn check_state_dict(&self, state: &[(String, Tensor<R>)]) -> Result<()>;

    /// Returns an error if an update could not begin because a parameter's value or a state tensor has another holder.
    fn check_sole(&mut self) -> Result<()>;

    /// The hyper-parameters of each group, with the names of its parameters.
    fn hyper_parameters(&self) -> Result<Vec<HyperParams>>;

    /// Replaces the hyper-parameters of each group, in the order of
    /// [`hyper_parameters`](OptimizerCore::hyper_parameters). A schedule continues from the new base rates.
    ///
    /// # Errors
    /// Errors of [`check_hyper_parameters`](OptimizerCore::check_hyper_parameters); nothing changes then.
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()>;

    /// Checks hyper-parameters for [`set_hyper_parameters`](OptimizerCore::set_hyper_parameters) without setting them.
    ///
    /// # Errors
    /// An error for another number of groups, and for a hyper-parameter that is unknown, missing or out of range. Also
    /// if the new hyper-parameters would need other state for each parameter.
    fn check_hyper_parameters(&self, groups: &[HyperParams]) -> Result<()>;

    /// Does the part of [`advance`](Optimizer::advance) that can fail, and changes nothing. So either all or none of
    /// several optimizers advance.
    ///
    /// # Errors
    /// Errors of [`advance`](Optimizer::advance).
    fn prepare_advance(&mut self) -> Result<()>;

    /// Tells whether each element is updated independently, so that pieces of parameters can be updated as unsharded
    /// ones would be. False for rules that use norms or matrices.
    fn is_elementwise(&self) -> bool;

    /// The settings that must be equal on ranks that train together, as text. They are the rule, its hyper-parameters,
    /// the parameters of each group, and future learning rates.
    fn describe(&self) -> String;

    /// Reorders the parameters of each buffer, with their state, by ascending `key`, so that gradients that become
    /// ready one after another are adjacent in memory. Gradient buffers created before no longer fit.
    fn reorder(&mut self, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()>;

    /// Adds parameters that were frozen when the optimizer was made and are trained from now on, each to its group.
    /// State and step counts of the other parameters are kept. Gradient buffers created before no longer fit.
    ///
    /// # Errors
    /// An error of an optimizer that cannot determine the groups of further parameters; nothing changes then.
    fn add_params(&mut self, leaves: &[Arc<Leaf<R>>]) -> Result<()>;

    /// Has the whole of each cut parameter updated by one of the ranks with pieces, if its rule needs it whole.
    /// `placed` gives the pieces. Returns the identities of the leaves that are updated so; this rank has their state
    /// whole or not at all. An optimizer that is elementwise updates pieces as they are.
    ///
    /// # Errors
    /// An error if the optimizer has updated such a parameter already.
    fn update_whole(&mut self, placed: &PiecesOf<'_, R>) -> Result<Vec<usize>>;

    /// Allocates further gradient buffers for the optimizer's parameters, for a backward pass with hooks.
    fn alloc_gradients(&self) -> Result<FlatGradients<R>> {
        Ok(FlatGradients::new(&self.params())?.refusing(&self.frozen()))
    }

    /// The parameters of its model that were frozen when it was made, whose gradients are rejected.
    fn frozen(&self) -> Vec<Arc<Leaf<R>>>;

    /// Updates the parameters as [`step`](Optimizer::step) does, from gradient buffers that the caller filled.
    #[track_caller]
    fn step_from(&mut self, gradients: &FlatGradients<R>) -> Result<()> {
        let (flats, scale) = (gradients.flats(), gradients.scale());
        let sums = flats.first().map_or(Ok(None), |flat| self.sums(flat.runtime(), flats, scale, &|_| true));
        let adapt = |sums: Tensor<R>| self.adapt(&sums.to_f64s()?, gradients.loss()?);
        sums.and_then(|sums| sums.map_or(Ok(()), adapt)).at_caller()?;
        self.update(flats, scale).at_caller()
    }

    /// Runs `write` on the optimizer's own gradients, which hold those accumulated since the last step.
    fn accumulate(&mut self, write: &mut dyn FnMut(&mut FlatGradients<R>) -> Result<()>) -> Result<()> {
        let mut own = std::mem::take(self.own_gradients());
        let done = own.accumulate(|| self.alloc_gradients(), write);
        *self.own_gradients() = own;
        done
    }
}

/// A function that gives the pieces of a parameter that is cut over ranks.
pub type PiecesOf<'a, R> = dyn Fn(&Arc<Leaf<R>>) -> Option<Arc<Placed<R>>> + 'a;

/// A bound that only the optimizers of this crate meet.
pub trait Sealed {}

impl<R: Runtime, C: UpdateRule> Sealed for FlatOptimizer<R, C> {}

impl<R: Runtime> Sealed for Combined<R> {}
