//! The part of every step that follows the backward passes.

use std::sync::LazyLock;

use numcore::{
    Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat},
    pointwise::Program,
};
use optim::LossScaler;

use super::{EmptyStep, Loss, TrainingConfig, TrainingMetrics};
use crate::{
    combinations::Feature,
    comm::{Collectives, Comm, ReduceOp, all_gather_bool, memory},
    strategy::{LossWeight, Strategy, Summed},
    sums::wide,
};

/// The state of updates, which clip and scale after the last backward pass of a step: options, loss scale and step
/// count.
pub(crate) struct Updates {
    pub(crate) config: TrainingConfig,
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) steps: u64,
    /// The change of weights that has begun, and has not ended.
    pub(crate) torn: Option<Torn>,
}

/// A change of weights that failed half-way leaves some new and some old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Torn {
    Update,
    Load,
}

/// The scale of clipped gradients, `min(1, max / (‖g·s‖ + 1e-6)) · s`, as in `clip_grad_norm`. The gradients still have
/// to be multiplied by the positive factor `s`.
static CLIPPED: LazyLock<Program> =
    LazyLock::new(|| Program::new("clipped", |[norm, scale], [max]| [(max / (norm * scale + 1e-6)).min(1.0) * scale]));

impl Updates {
    pub(crate) fn new(config: TrainingConfig) -> Self {
        Updates { scaler: config.loss_scaling.clone(), config, steps: 0, torn: None }
    }

    /// The factor of the gradient of every loss.
    pub(crate) fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::factor)
    }

    /// Tells whether a step with non-finite gradients is skipped.
    pub(crate) fn may_skip(&self) -> bool {
        self.scaler.is_some() || self.config.skip_non_finite
    }

    /// The weight of this rank's losses of a step. A step may be skipped if it has no loss on any rank, too.
    pub(crate) fn loss_weight(&self, weight: f64) -> LossWeight {
        LossWeight { weight, scale: self.loss_scale(), skippable: self.may_skip() || weight == 0.0 }
    }

    /// Divides by the total weight, clips, and updates. `losses` are this rank's; all ranks make the same decisions.
    pub(crate) fn apply<R: Runtime>(
        &mut self,
        strategy: &mut dyn Strategy<R>,
        losses: &[Loss<R>],
        empty: EmptyStep,
    ) -> Result<TrainingMetrics<R>> {
        let (ranks, canonical) = (strategy.ranks().clone(), strategy.features().has(Feature::Canonical));
        let (comm, everyone) = (&ranks.losses, &ranks.everyone);
        let count = if canonical { self.config.accumulation } else { losses.len().max(1) };
        let own = rows(comm.runtime(), losses, count)?;
        let own_weight = losses.iter().map(|loss| loss.weight).sum();
        let totals = if canonical { totals_in_order(comm, &own, count)? } else { totals(comm, &own)? };
        // The metrics of a step are equal on all ranks, so that loops decide by them.
        let totals = equal(everyone, totals)?;
        let (sum, weight) = (totals.narrow(0, 0, 1)?.reshape([])?, totals.narrow(0, 1, 1)?.reshape([])?);
        let mut metrics = TrainingMetrics {
            loss: sum,
            own,
            own_weight,
            weight,
            grad_norm: None,
            stepped: true,
            learning_rate: strategy.learning_rate().unwrap_or(0.0),
            global_step: self.steps,
            context_ranks: ranks.context_ranks,
            synchronization: None,
        };
        let weight = metrics.weight.clone();
        // A rank that has added to the total need not wait for the device to know that it is not 0.
        if losses.iter().all(|loss| loss.weight == 0.0) && weight.item()? == 0.0 {
            if empty == EmptyStep::Skips {
                return Ok(TrainingMetrics { loss: weight, ..metrics });
            }
            let allowed =
                "above 0, or there is no mean to train on: leave out a step that has no examples or tokens anywhere";
            return Err(Error::range(
                "a training step",
                "weight of the losses of all ranks and micro-batches",
                0.0,
                allowed,
            ));
        }
        metrics.loss = metrics.loss.div(&weight)?;
        metrics.stepped = !self.may_skip() || decided(everyone, strategy.is_finite()?)?;
        let mut scale = weight.mul(self.loss_scale())?.recip()?;
        if let Some(max) = self.config.max_norm {
            let none = || Error::internal("a training step", "a strategy did not sum the squares of its gradients");
            let squares = strategy.sums(&Summed::Squares, &|_| true)?.ok_or_else(none)?;
            let norm = squares.sqrt()?.reshape([])?.to_dtype(scale.dtype())?;
            metrics.grad_norm = Some(norm.mul(&scale)?);
            scale = norm.apply_program(&CLIPPED, &[&scale], &[max.into()])?;
        }
        let scale = equal(everyone, scale)?;
        if metrics.stepped {
            // The last place at which a late error, of this rank or another, still prevents the update.
            everyone.poll()?;
            strategy.check_update()?;
            self.torn = Some(Torn::Update);
            if let Some(sums) = strategy.sums(&Summed::Rule(&scale), &|_| true)? {
                let sums = equal(everyone, sums)?.to_f64s()?;
                strategy.adapt(&sums, metrics.loss.item()?)?;
            }
            strategy.update(&scale)?;
            // A captured update has not happened yet.
            let done = u64::from(!comm.runtime().is_capturing());
            (self.steps, self.torn) = (self.steps + done, None);
        }
        if let Some(scaler) = &mut self.scaler {
            scaler.adapt(metrics.stepped);
        }
        metrics.global_step = self.steps;
        Ok(metrics)
    }
}

/// Tells whether ranks may have different values of one sum.
fn differ<R: Runtime>(comm: &Comm<R>) -> bool {
    comm.size() > 1 && !comm.guarantees().equal_on_all_ranks
}

/// The decision of all ranks: rank 0's, where theirs may differ.
fn decided<R: Runtime>(comm: &Comm<R>, own: bool) -> Result<bool> {
    if differ(comm) { Ok(all_gather_bool(comm, own)?[0]) } else { Ok(own) }
}

/// A scalar that all ranks use alike: rank 0's, where theirs may differ.
fn equal<R: Runtime>(comm: &Comm<R>, own: Tensor<R>) -> Result<Tensor<R>> {
    if differ(comm) { comm.broadcast(memory(&own)?, 0)?.wait()?.freeze() } else { Ok(own) }
}

/// The sum and the weight of the losses of all ranks, on the device, from this rank's.
fn totals<R: Runtime>(comm: &Comm<R>, own: &Tensor<R>) -> Result<Tensor<R>> {
    let own = own.sum(&[1])?;
    comm.all_reduce(memory(&own)?, ReduceOp::Sum)?.wait()?.freeze()
}

/// The totals, summed in the order of chunks.
fn totals_in_order<R: Runtime>(comm: &Comm<R>, own: &Tensor<R>, micro_batches: usize) -> Result<Tensor<R>> {
    let n = comm.size();
    let all = TensorMut::alloc(comm.runtime(), Shape::new(&[2 * n * micro_batches])?, own.dtype())?;
    let all = comm.all_gather(own, all)?.wait()?.freeze()?.reshape([n, 2, micro_batches])?;
    all.permute(&[1, 2, 0])?.reshape([2, micro_batches * n])?.contiguous()?.sum(&[1])
}

/// Sums and weights of this rank's losses: `[2, count]`, padded with 0.
fn rows<R: Runtime>(rt: &R, losses: &[Loss<R>], count: usize) -> Result<Tensor<R>> {
    let dtype = wide(rt);
    let mut sums = losses.iter().map(|l| l.sum.value()?.to_dtype(dtype)?.reshape([1])).collect::<Result<Vec<_>>>()?;
    if sums.len() < count {
        sums.push(Tensor::zeros(rt, [count - sums.len()], dtype)?);
    }
    // Filled on the device: a captured step cannot upload.
    for equal in losses.chunk_by(|a, b| a.weight == b.weight) {
        sums.push(Tensor::full(rt, [equal.len()], dtype, equal[0].weight)?);
    }
    if losses.len() < count {
        sums.push(Tensor::zeros(rt, [count - losses.len()], dtype)?);
    }
    cat(&sums.iter().collect::<Vec<_>>(), 0)?.reshape([2, count])
}
