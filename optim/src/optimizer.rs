//! The interface of all optimizers.

use std::sync::Arc;

use autograd::{Gradients, Leaf, Var, backward_with_hooks};
use numcore::{Error, Flat, Result, Runtime, Tensor, Within};

use crate::{FlatGradients, FlatParams, HyperParams, LrSchedule, OwnGradients, hyper::untold};

/// The interface of every optimizer, for code that does not depend on the update rule.
pub trait Optimizer<R: Runtime>: Send + Sync {
    /// The parameters, buffer by buffer, in the order they were given.
    fn params(&self) -> Vec<&FlatParams<R>>;
    /// The flat buffers of the parameters, to read their values.
    fn params_mut(&mut self) -> Vec<&mut FlatParams<R>>;

    /// Updates the parameters from gradients of the same layout, one buffer each, multiplied by the scalar `scale` if
    /// given. Parameters without a gradient are not touched. If the update cannot begin, nothing is changed.
    fn update(&mut self, grads: &[Flat<R>], scale: Option<&Tensor<R>>) -> Result<()>;
    /// The gradients that [`backward`](Optimizer::backward) writes.
    fn own_gradients(&mut self) -> &mut OwnGradients<R>;

    /// The number of steps taken so far.
    fn steps(&self) -> u64;
    /// The learning rate of the next step, for each group.
    fn lrs(&self) -> Vec<f64>;
    /// Sets the base learning rate of all groups.
    fn set_lr(&mut self, lr: f64) -> Result<()>;
    /// Sets the schedule: from now on learning rates are this function of the step, starting from each group's base
    /// rate.
    fn set_schedule(&mut self, schedule: Arc<dyn LrSchedule>);

    /// Everything needed to resume exactly: `<state>.<parameter>`, `master.<parameter>` and `step.<parameter>`,
    /// `group.<k>.<hyper-parameter>` (`f64`) and `steps` (`i64`). The tensors are views: no update can run until they
    /// are dropped.
    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>>;
    /// Loads a state that [`state_dict`](Optimizer::state_dict) returned. Names, shapes and dtypes must be exactly this
    /// optimizer's: an error lists all entries that are missing, unexpected or do not fit, and nothing is changed.
    fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()>;
    /// An error if [`load_state_dict`](Optimizer::load_state_dict) would refuse this state.
    fn check_state_dict(&self, state: &[(String, Tensor<R>)]) -> Result<()>;
    /// An error if an update could not begin, because a parameter's value or a state tensor has another holder.
    fn check_sole(&mut self) -> Result<()>;

    /// The hyper-parameters of each group, with the names of its parameters.
    ///
    /// # Errors
    /// For an optimizer that does not tell them.
    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        untold("Optimizer")
    }
    /// Replaces the hyper-parameters of each group, in the order of [`hyper_parameters`](Optimizer::hyper_parameters). A schedule goes on, from
    /// the new base rates.
    ///
    /// # Errors
    /// Those of [`check_hyper_parameters`](Optimizer::check_hyper_parameters); nothing is changed then.
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        self.check_hyper_parameters(groups)
    }
    /// An error if [`set_hyper_parameters`](Optimizer::set_hyper_parameters) would refuse these: for another number of groups, a
    /// hyper-parameter that is unknown, missing or out of range, and where other state would be kept of the parameters.
    fn check_hyper_parameters(&self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        untold("Optimizer")
    }

    /// Moves a captured update on to the next step: its learning rate, its step number and what follows from them. Call it before each launch of
    /// the captured step.
    ///
    /// # Errors
    /// If no update was captured, as of an optimizer that is not [capturable](crate::FlatOptimizer::capturable); if the numbers cannot be uploaded: the
    /// optimizer is then as it was.
    fn advance(&mut self) -> Result<()> {
        Err(Error::argument("advance", "an update of this optimizer cannot be captured, so it is not launched again"))
    }

    /// Does what may fail of [`advance`](Optimizer::advance) and changes nothing: of several optimizers either all advance or none does.
    ///
    /// # Errors
    /// Those of [`advance`](Optimizer::advance).
    fn prepare_advance(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether each element is updated by itself, so that pieces of parameters are updated as the whole would be. Rules that look at norms
    /// or matrices do not.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// The settings that must be equal on ranks that train together, as text: the rule, its hyper-parameters, the
    /// parameters of each group, and future learning rates. The default covers parameters and learning rates.
    fn describe(&self) -> String {
        let names = self.params().into_iter().flat_map(|p| p.leaves()).map(|l| format!(" {}", l.name()));
        format!("{:?}:{}", self.lrs(), names.collect::<String>())
    }

    /// Moves the parameters of each buffer, with their state, into ascending order of `key`: gradients that become
    /// ready one after another are then adjacent in memory. Gradient buffers created before no longer fit.
    fn reorder(&mut self, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()>;

    /// Adds parameters that were frozen when the optimizer was made, and are trained from now on, each to the group that it would have been in.
    /// State and step counts of the others stay. Gradient buffers created before no longer fit.
    ///
    /// # Errors
    /// For an optimizer that does not know the groups of further parameters; nothing is changed then.
    fn add_params(&mut self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        let names: Vec<String> = leaves.iter().map(|leaf| format!("`{}`", leaf.name())).collect();
        let why = format!(
            "an optimizer of this kind takes no further parameters, so {} cannot be trained by it: make it before they are frozen, or another one",
            names.join(", ")
        );
        Err(Error::argument("Optimizer::add_params", why))
    }

    /// Runs the backward pass of `loss`, which must have one element, into the optimizer's own gradients.
    ///
    /// Gradients accumulate since the last step, so several micro-batches make one step. After an error the gradients
    /// of all of them are discarded. To observe each gradient when it becomes final, or to write to other memory, use
    /// [`backward_with_hooks`] and [`step_from`](Optimizer::step_from).
    #[track_caller]
    fn backward(&mut self, loss: &Var<R>) -> Result<()> {
        self.accumulate(&mut |gradients| backward_with_hooks(loss, gradients)).at_caller()
    }

    /// Updates the parameters from the gradients that [`backward`](Optimizer::backward) wrote since the last step: one
    /// launch for each buffer whose parameters all have one (elementwise rules). The next backward pass overwrites the
    /// gradients. A step without gradients is an error; if the update fails, the gradients are kept.
    #[doc(alias("zero_grad"))]
    #[track_caller]
    fn step(&mut self) -> Result<()> {
        let mut own = std::mem::take(self.own_gradients());
        let done = own.spend(|gradients| self.step_from(gradients));
        *self.own_gradients() = own;
        done.at_caller()
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

    /// Discards the gradients accumulated since the last step. (A step does so by itself.)
    fn zero_grad(&mut self) {
        self.own_gradients().zero();
    }

    /// Further gradient buffers for the optimizer's parameters, for a backward pass with hooks.
    fn alloc_gradients(&self) -> Result<FlatGradients<R>> {
        Ok(FlatGradients::new(&self.params())?.refusing(&self.frozen()))
    }

    /// The parameters of its model that were frozen when it was made: gradients of them are refused.
    #[doc(hidden)]
    fn frozen(&self) -> Vec<Arc<Leaf<R>>> {
        Vec::new()
    }

    /// Updates the parameters like [`step`](Optimizer::step), from gradient buffers that the caller filled.
    #[track_caller]
    fn step_from(&mut self, gradients: &FlatGradients<R>) -> Result<()> {
        self.update(gradients.flats(), gradients.scale()).at_caller()
    }

    /// Updates the parameters like [`step`](Optimizer::step), from gradients by leaf, which replace the optimizer's
    /// own.
    #[track_caller]
    fn step_with(&mut self, gradients: &Gradients<R>) -> Result<()> {
        self.zero_grad();
        self.accumulate(&mut |own| own.copy_from(gradients)).at_caller()?;
        self.step()
    }

    /// Writes into the optimizer's own gradients, which hold what was accumulated since the last step.
    #[doc(hidden)]
    fn accumulate(&mut self, write: &mut dyn FnMut(&mut FlatGradients<R>) -> Result<()>) -> Result<()> {
        let mut own = std::mem::take(self.own_gradients());
        let done = own.accumulate(|| self.alloc_gradients(), write);
        *self.own_gradients() = own;
        done
    }
}
