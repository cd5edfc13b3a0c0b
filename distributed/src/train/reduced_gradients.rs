//! Gradients that are sums over all ranks, and what every step does with them.

use std::sync::LazyLock;

use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat},
    pointwise::Program,
};
use optim::{HyperParams, LossScaler};

use super::{Loss, TrainingConfig, TrainingMetrics};
use crate::comm::{Collectives, Comm, ReduceOp, all_gather_bool, memory};

/// The gradients of a step after its last backward pass, wherever they are kept, and the parameters they are of.
pub trait ReducedGradients<R: Runtime> {
    /// The L2 norm of all gradients together, of all ranks' parts: a scalar on the device. It does not depend on buckets or units that
    /// gradients lie in, as far as these do not cut parameters.
    fn norm(&self) -> Result<Tensor<R>>;
    /// Whether all gradients are finite, on all ranks; waits for the device.
    fn is_finite(&self) -> Result<bool>;
    /// An error if [`update`](ReducedGradients::update) could not begin: someone holds memory it writes, or a learning rate is no number. Nothing is
    /// changed.
    fn check_update(&mut self) -> Result<()>;
    /// Updates the parameters from the gradients times a scalar on the device.
    fn update(&mut self, scale: &Tensor<R>) -> Result<()>;
    /// The learning rate of the next update (of the first group).
    fn learning_rate(&self) -> f64;
    /// The hyper-parameters of the optimizer, of each of its groups, with the parameters of which there is state in checkpoints.
    ///
    /// # Errors
    /// For a strategy or an optimizer that does not tell them.
    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        untold()
    }
    /// An error if [`set_hyper_parameters`](ReducedGradients::set_hyper_parameters) would refuse these. Nothing is changed.
    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        untold()
    }
    /// Replaces the hyper-parameters of each group, in the order of [`hyper_parameters`](ReducedGradients::hyper_parameters).
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let _ = groups;
        untold()
    }
    /// Whether sums must be those of one rank, to the bit: micro-batch `k` of rank `r` of `n` is chunk `k·n + r`, and chunks are added up in
    /// order.
    fn is_canonical(&self) -> bool {
        false
    }
}

fn untold<T>() -> Result<T> {
    let why = "does not tell its optimizer's hyper-parameters, so no checkpoint can have them: leave them to the configuration";
    Err(Error::config("ReducedGradients", "hyper_parameters", why))
}

/// Hands each of several strategies that are one the groups that are its own.
pub(crate) fn share_groups<'s, R: Runtime, S: ReducedGradients<R> + 's>(
    parts: impl Iterator<Item = &'s mut S>,
    groups: &[HyperParams],
    take: impl Fn(&mut S, &[HyperParams]) -> Result<()>,
) -> Result<()> {
    let mut rest = groups;
    for part in parts {
        let wanted = part.hyper_parameters()?.len();
        let Some((own, others)) = rest.split_at_checked(wanted) else {
            let why = format!("hyper-parameters of {} groups were given, there are more", groups.len());
            return Err(Error::argument("set_hyper_parameters", why));
        };
        take(part, own)?;
        rest = others;
    }
    Ok(())
}

/// What a trainer does after the last backward pass of a step, and what it remembers from step to step.
pub(crate) struct Updates {
    pub(crate) config: TrainingConfig,
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) steps: u64,
    /// Whether an update has begun, and not come to its end.
    pub(crate) is_torn: bool,
    /// Whether a step that weighs nothing on all of its ranks is left out, and no error: others train on.
    pub(crate) may_be_empty: bool,
}

/// `min(1, max / (‖g·s‖ + 1e-6)) · s`, as `clip_grad_norm` has it, for a positive factor `s` that the gradients still have to be multiplied by.
static CLIPPED: LazyLock<Program> =
    LazyLock::new(|| Program::new("clipped", |[norm, scale], [max]| [(max / (norm * scale + 1e-6)).min(1.0) * scale]));

impl Updates {
    pub(crate) fn new(config: TrainingConfig) -> Self {
        Updates { scaler: config.loss_scaling.clone(), config, steps: 0, is_torn: false, may_be_empty: false }
    }

    /// What the gradient of every loss is multiplied by.
    pub(crate) fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::factor)
    }

    /// Whether a step is left out if its gradients are not finite.
    pub(crate) fn may_skip(&self) -> bool {
        self.scaler.is_some() || self.config.skip_non_finite
    }

    /// Mean, clipping, update. `losses` are this rank's, of those of all ranks of `comm`; all ranks of `everyone` come to the same decisions.
    pub(crate) fn apply<R: Runtime>(
        &mut self,
        gradients: &mut dyn ReducedGradients<R>,
        comm: &Comm<R>,
        everyone: &Comm<R>,
        losses: &[Loss<R>],
    ) -> Result<TrainingMetrics<R>> {
        let canonical = gradients.is_canonical();
        let count = if canonical { self.config.accumulation } else { losses.len().max(1) };
        let own = rows(comm.runtime(), losses, count)?;
        let totals = if canonical { totals_in_order(comm, &own, count)? } else { totals(comm, &own)? };
        // What the step tells is equal on all ranks, so that loops decide by it.
        let totals = equal(everyone, totals)?;
        let (sum, weight) = (totals.narrow(0, 0, 1)?.reshape([])?, totals.narrow(0, 1, 1)?.reshape([])?);
        // Who has added to the total need not wait for the device to know that it is not 0.
        if losses.iter().all(|loss| loss.weight == 0.0) && weight.item()? == 0.0 {
            if self.may_be_empty {
                let (loss, learning_rate) = (weight.clone(), gradients.learning_rate());
                let (grad_norm, stepped, global_step) = (None, true, self.steps);
                return Ok(TrainingMetrics {
                    loss,
                    own,
                    weight,
                    grad_norm,
                    stepped,
                    learning_rate,
                    global_step,
                    alike: 1,
                });
            }
            let why = "the losses of all ranks and micro-batches together weigh 0, so there is no mean to train on: leave out a \
                       step that has no examples or tokens anywhere";
            return Err(Error::argument("a training step", why));
        }
        let stepped = !self.may_skip() || decided(everyone, gradients.is_finite()?)?;
        let mut scale = weight.mul(self.loss_scale())?.recip()?;
        let mut grad_norm = None;
        if let Some(max) = self.config.max_norm {
            let norm = gradients.norm()?.to_dtype(scale.dtype())?;
            grad_norm = Some(norm.mul(&scale)?);
            scale = norm.apply_program(&CLIPPED, &[&scale], &[max.into()])?;
        }
        let scale = equal(everyone, scale)?;
        let learning_rate = gradients.learning_rate();
        if stepped {
            // The one place at which an error that came late, here or on another rank, still prevents the update.
            everyone.poll()?;
            gradients.check_update()?;
            self.is_torn = true;
            gradients.update(&scale)?;
            (self.steps, self.is_torn) = (self.steps + 1, false);
        }
        if let Some(scaler) = &mut self.scaler {
            scaler.adapt(stepped);
        }
        let loss = sum.div(&weight)?;
        Ok(TrainingMetrics { loss, own, weight, grad_norm, stepped, learning_rate, global_step: self.steps, alike: 1 })
    }
}

/// Whether ranks may have different values of one sum.
fn differ<R: Runtime>(comm: &Comm<R>) -> bool {
    comm.size() > 1 && !comm.guarantees().equal_on_all_ranks
}

/// What all ranks decide by: rank 0's word, where theirs may differ.
fn decided<R: Runtime>(comm: &Comm<R>, own: bool) -> Result<bool> {
    if differ(comm) { Ok(all_gather_bool(comm, own)?[0]) } else { Ok(own) }
}

/// A scalar that all ranks use alike: rank 0's, where theirs may differ.
fn equal<R: Runtime>(comm: &Comm<R>, own: Tensor<R>) -> Result<Tensor<R>> {
    if differ(comm) { comm.broadcast(memory(&own)?, 0)?.wait()?.freeze() } else { Ok(own) }
}

/// What totals are added up in.
pub(crate) fn wide<R: Runtime>(rt: &R) -> DType {
    if rt.capabilities().compute.contains(&DType::F64) { DType::F64 } else { DType::F32 }
}

/// Sum and weight of the losses of all ranks, on the device, from this rank's.
fn totals<R: Runtime>(comm: &Comm<R>, own: &Tensor<R>) -> Result<Tensor<R>> {
    let own = own.sum(&[1], false)?;
    comm.all_reduce(memory(&own)?, ReduceOp::Sum)?.wait()?.freeze()
}

/// The totals, summed in the order of chunks.
fn totals_in_order<R: Runtime>(comm: &Comm<R>, own: &Tensor<R>, micro_batches: usize) -> Result<Tensor<R>> {
    let n = comm.size();
    let all = TensorMut::alloc(comm.runtime(), Shape::new(&[2 * n * micro_batches])?, own.dtype())?;
    let all = comm.all_gather(own, all)?.wait()?.freeze()?.reshape([n, 2, micro_batches])?;
    all.permute(&[1, 2, 0])?.reshape([2, micro_batches * n])?.contiguous()?.sum(&[1], false)
}

/// Sums and weights of this rank's losses: `[2, count]`, those that are missing 0.
fn rows<R: Runtime>(rt: &R, losses: &[Loss<R>], count: usize) -> Result<Tensor<R>> {
    let dtype = wide(rt);
    let mut sums = losses.iter().map(|l| l.sum.value()?.to_dtype(dtype)?.reshape([1])).collect::<Result<Vec<_>>>()?;
    if sums.len() < count {
        sums.push(Tensor::zeros(rt, [count - sums.len()], dtype)?);
    }
    let mut weights: Vec<f64> = losses.iter().map(|l| l.weight).collect();
    weights.resize(count, 0.0);
    sums.push(match dtype {
        DType::F64 => Tensor::from_slice(rt, [count], &weights)?,
        _ => Tensor::from_slice(rt, [count], &weights.into_iter().map(|w| w as f32).collect::<Vec<_>>())?,
    });
    cat(&sums.iter().collect::<Vec<_>>(), 0)?.reshape([2, count])
}
