//! A training step from losses or gradients that its caller has computed.

use std::panic::Location;

use autograd::{BackwardHook, Gradients, LeafGrad};
use numcore::{Error, Result, Runtime, ops::PointwiseOps};

use super::{EmptyStep, Loss, TrainStep, TrainingMetrics, at_call, updates::Torn};
use crate::{comm::Comm, strategy::ActiveRanks};

impl<R: Runtime> TrainStep<R> {
    /// Runs the backward pass of one micro-batch from its loss, and the update after the last of
    /// [`accumulation`](TrainStep::accumulation) micro-batches. Returns the metrics of the step, or none while
    /// micro-batches are missing. Steps are those of [`step`](TrainStep::step), to the bit. Every rank calls it equally
    /// often.
    ///
    /// ```
    /// # use autograd::Var;
    /// # use distributed::{comm::NoOpCommunicator, train::{Loss, TrainStep}};
    /// # use nn::{Forward, Init, Linear};
    /// # use numcore::{DType, NullRuntime, Tensor};
    /// # use optim::AdamWConfig;
    /// # fn main() -> numcore::Result<()> {
    /// # let rt = NullRuntime::new();
    /// # let (comm, model) = (NoOpCommunicator::new(&rt), Linear::new(&Init::new(&rt, 0), 4, 1)?);
    /// # let (x, y) = (Tensor::zeros(&rt, [8, 4], DType::F32)?, Tensor::zeros(&rt, [8, 1], DType::F32)?);
    /// # let (x, y) = (Var::new(x), Var::new(y));
    /// let mut step = TrainStep::builder(&comm, &model).optimizer(AdamWConfig::default()).accumulation(2).build()?;
    /// let loss = || nn::loss::mse(&model.forward(&x)?, &y, Default::default()).map(Loss::mean);
    /// assert!(step.backward_and_step(loss()?)?.is_none());
    /// assert!(step.backward_and_step(loss()?)?.is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Fails as [`step`](TrainStep::step). An error discards the micro-batches of the step so far.
    #[track_caller]
    pub fn backward_and_step(&mut self, loss: Loss<R>) -> Result<Option<TrainingMetrics<R>>> {
        let line = Location::caller();
        let done = self.push(loss);
        if done.is_err() {
            self.discard_pushed();
        }
        self.all(done).map_err(|error| at_call(error, line))
    }

    /// Abandons a step that is accumulated in part: discards the micro-batches passed to
    /// [`backward_and_step`](TrainStep::backward_and_step) since the last update, and their gradients. Every rank calls
    /// it, for example where an epoch ends within an accumulation.
    pub fn discard_pushed(&mut self) {
        (self.pushed, self.prepared) = (Vec::new(), false);
    }

    /// An error if the model is in stages, which compute losses themselves.
    fn require_whole(&self, op: &'static str) -> Result<()> {
        let why = "the model is in stages, which compute losses and gradients themselves: give micro-batches to `step`";
        if self.stages.is_none() { Ok(()) } else { Err(Error::usage(op, why)) }
    }

    fn push(&mut self, loss: Loss<R>) -> Result<Option<TrainingMetrics<R>>> {
        self.require_whole("TrainStep::backward_and_step")?;
        let is_prepared = std::mem::take(&mut self.prepared) && !self.has_unfrozen();
        if self.pushed.is_empty() && !is_prepared {
            self.prepare(ActiveRanks::All)?;
        }
        let before = std::mem::take(&mut self.pushed);
        let last = before.len() + 1 == self.accumulation();
        self.begin_pass(&before, Some(&loss), last)?;
        self.pushed = before;
        let loss = self.sweep(loss)?;
        self.pushed.push(loss);
        self.strategy.end()?;
        if !last {
            return Ok(None);
        }
        let losses = std::mem::take(&mut self.pushed);
        let metrics = self.update(&losses, EmptyStep::Fails)?;
        // The caller computes the next loss before the next call: gradients' memory moves while there is no graph.
        self.prepare(ActiveRanks::All)?;
        self.prepared = true;
        Ok(Some(metrics))
    }

    /// Tells whether a parameter that was frozen has been unfrozen since the last call.
    fn has_unfrozen(&mut self) -> bool {
        let before = self.frozen.len();
        self.frozen.retain(|leaf| !leaf.requires_grad());
        self.frozen.len() < before
    }

    /// Makes a step from gradients that the caller has computed, in place of backward passes. They are gradients of the
    /// sum in `loss`, over this rank's examples. They are summed over ranks, divided by the total weight, clipped and
    /// applied as in [`step`](TrainStep::step).
    ///
    /// # Errors
    /// Fails as [`step`](TrainStep::step). A trained parameter without a gradient is an error, or keeps its value where
    /// [unused parameters](crate::buckets::Unused) are allowed.
    #[track_caller]
    pub fn step_from(&mut self, gradients: &Gradients<R>, loss: Loss<R>) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        let done = self.take_gradients(gradients, loss);
        self.all(done).map_err(|error| at_call(error, line))
    }

    fn take_gradients(&mut self, gradients: &Gradients<R>, loss: Loss<R>) -> Result<TrainingMetrics<R>> {
        self.require_whole("TrainStep::step_from")?;
        self.prepare_whole(ActiveRanks::All)?;
        self.begin_pass(&[], Some(&loss), true)?;
        for (leaf, gradient) in gradients.iter() {
            let scaled = self.updates.scaler.as_ref().map(|scaler| gradient.mul(scaler.factor())).transpose()?;
            let given = LeafGrad::Own(scaled.unwrap_or_else(|| gradient.clone()));
            self.hook(loss.counts).on_leaf_grad_ready(leaf, given)?;
        }
        self.strategy.end()?;
        self.update(&[loss.detached()?], EmptyStep::Fails)
    }

    /// Prepares a step. An error if some weights are those of a checkpoint whose load failed, and others are not. A
    /// step may follow an update that failed.
    fn prepare(&mut self, active: ActiveRanks) -> Result<()> {
        if self.updates.torn == Some(Torn::Load) {
            self.updates.check_whole()?;
        }
        if self.comm().runtime().is_capturing() {
            self.repeated("a training step")?;
        }
        self.strategy.prepare(active)
    }

    /// Prepares a step that gets its micro-batches in one call. An error if `backward_and_step` has begun another step.
    pub(super) fn prepare_whole(&mut self, active: ActiveRanks) -> Result<()> {
        self.prepared = false;
        if self.pushed.is_empty() {
            return self.prepare(active);
        }
        let why = format!(
            "{} of {} micro-batches were given to `backward_and_step`: finish that step, or call `discard_pushed`",
            self.pushed.len(),
            self.accumulation()
        );
        Err(Error::usage("a training step", why))
    }

    /// The ranks over which losses are summed, and the gradients of a model without stages.
    #[doc(alias("communicator"))]
    pub fn comm(&self) -> &Comm<R> {
        &self.strategy.ranks().losses
    }

    /// Sets the base learning rate of all parameter groups, from which a schedule continues.
    ///
    /// # Errors
    /// Fails if the rate is no number of 0 or more, or the strategy does not report its hyper-parameters.
    #[track_caller]
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        let mut groups = self.strategy.hyper_parameters()?;
        for (name, value) in groups.iter_mut().flat_map(|group| &mut group.values) {
            if name == "lr" {
                *value = [lr].into_iter().collect();
            }
        }
        self.strategy.set_hyper_parameters(&groups)
    }
}
