//! The passes of one stage and micro-batch. B is one backward pass. I is the part of it that leads to the inputs, W the
//! rest.

use std::collections::HashSet;

use autograd::{Backward, RandomState, Var, no_grad, observed_pass, set_random_state};
use nn::{CountedRows, set_counted_rows};
use numcore::{Error, Result, Runtime, Tensor, ops::Apply};

use super::{
    boundary::Boundary,
    executor::{Live, ScheduleRun},
    hooks::InputHook,
};
use crate::{
    expert_parallel::expert_leaves,
    hooks::CountedHook,
    pipeline::{Compute, Direction, Pass},
};

/// The number of random values reserved for each pass: dropout takes one per layer.
const DRAWS: u64 = 1 << 20;

impl<R: Runtime> ScheduleRun<'_, R> {
    pub(super) fn forward(&mut self, compute: Compute) -> Result<()> {
        observed_pass(|| self.forward_pass(compute))
    }

    fn forward_pass(&mut self, compute: Compute) -> Result<()> {
        let Compute { stage, micro, .. } = compute;
        let inputs = self.inputs(stage, micro)?;
        self.count_rows(micro);
        self.seed_random(compute);
        let outputs = if self.checked.is_forward_only() {
            no_grad(|| self.apply(stage, &inputs))?
        } else {
            self.apply(stage, &inputs)?
        };
        if stage + 1 == self.schedule().stages() {
            return self.finish_forward(compute, inputs, outputs);
        }
        self.job.plan.boundaries.agree(stage, micro, Boundary::of(&outputs))?;
        let values = outputs.iter().map(Var::value).collect::<Result<_>>()?;
        self.keep(compute, inputs, outputs);
        self.give(compute, values);
        Ok(())
    }

    /// The inputs of a stage: leaves if their gradients are to be sent back, plain values otherwise.
    fn inputs(&mut self, stage: usize, micro: usize) -> Result<Vec<Var<R>>> {
        let values = match stage {
            0 => self.job.batch.inputs.get_mut(micro).map(std::mem::take),
            _ => self.inbox.remove(&(Direction::Forward, stage, micro)),
        };
        let recording = !self.checked.is_forward_only();
        let input = |(k, value): (usize, Tensor<R>)| {
            let wanted = match stage {
                0 => self.job.options.input_gradients && value.dtype().is_float(),
                _ => self.job.plan.boundaries.get(stage - 1, micro).is_some_and(|boundary| boundary.wants(k)),
            };
            if recording && wanted { Var::leaf("pipeline input", value) } else { Ok(Var::new(value)) }
        };
        values.unwrap_or_default().into_iter().enumerate().map(input).collect()
    }

    fn apply(&self, stage: usize, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        match self.job.stages.get(&stage) {
            Some(stage) => stage.forward_values(inputs),
            None => Err(Error::internal("pipeline", format!("stage {stage} is not here"))),
        }
    }

    fn keep(&mut self, Compute { stage, micro, .. }: Compute, inputs: Vec<Var<R>>, roots: Vec<Var<R>>) {
        if !self.checked.is_forward_only() {
            self.live.insert((stage, micro), Live::Forward { inputs, roots });
        }
    }

    /// Ends the forward of the last stage: computes the loss, and keeps the outputs of a run of forwards alone.
    fn finish_forward(&mut self, compute: Compute, inputs: Vec<Var<R>>, outputs: Vec<Var<R>>) -> Result<()> {
        let mut roots = Vec::new();
        if let Some(loss) = self.job.loss.as_deref_mut() {
            let targets = self.job.batch.targets.get_mut(compute.micro).map(std::mem::take).unwrap_or_default();
            let targets: Vec<Var<R>> = targets.into_iter().map(Var::new).collect();
            let made = match self.checked.is_forward_only() {
                true => no_grad(|| loss(&outputs, &targets))?,
                false => loss(&outputs, &targets)?,
            };
            let loss = if self.job.batch.weightless { made.weightless()? } else { made };
            let shape = loss.sum.spec().shape;
            if shape.numel() != 1 {
                return Err(Error::shape("pipeline loss", &[shape], "a loss has one element; reduce it"));
            }
            self.losses.insert(compute.micro, loss.detached()?);
            roots.push(loss.sum);
        }
        if self.checked.is_forward_only() {
            let values = outputs.iter().map(Var::value).collect::<Result<_>>()?;
            self.outputs.insert(compute.micro, values);
        }
        self.keep(compute, inputs, roots);
        Ok(())
    }

    /// Runs B or I: from the gradients of the outputs to those of the inputs.
    pub(super) fn backward(&mut self, compute: Compute) -> Result<()> {
        let Compute { stage, micro, pass } = compute;
        let Some(Live::Forward { inputs, roots }) = self.live.remove(&(stage, micro)) else {
            return Err(Error::internal("pipeline", format!("{compute} finds no forward pass")));
        };
        let sweep = self.seeded(stage, micro, roots)?;
        let last = self.last.get(&stage) == Some(&compute);
        let (counts, shared) = (!self.job.batch.weightless, self.shared(stage));
        let hook = self.job.hooks.gradients(compute, last)?;
        let mut counted = CountedHook { hook, observer: None, counts, waits: true, shared: &shared };
        let mut hook = InputHook::new(&inputs, &mut counted);
        let deferred = match (sweep, pass) {
            (None, _) => None,
            (Some(sweep), Pass::I) => Some(sweep.inputs_only(&inputs.iter().collect::<Vec<_>>(), &mut hook)?),
            (Some(sweep), _) => {
                sweep.run(&mut hook)?;
                None
            }
        };
        let gradients = hook.into_gradients()?;
        if pass == Pass::I {
            self.live.insert((stage, micro), Live::Weights(deferred.map(Box::new)));
        }
        if stage == 0 && self.job.options.input_gradients {
            self.input_gradients.insert(micro, gradients);
        } else {
            self.give(compute, gradients);
        }
        Ok(())
    }

    /// The backward pass of a stage, seeded with the received gradients of its outputs, or with the loss scale at the
    /// loss. None if no output needs a gradient.
    fn seeded(&mut self, stage: usize, micro: usize, roots: Vec<Var<R>>) -> Result<Option<Backward<R>>> {
        let roots: Vec<Var<R>> = roots.into_iter().filter(Var::requires_grad).collect();
        let gradients = if stage + 1 == self.schedule().stages() {
            let seed =
                |root: &Var<R>| Tensor::full(root.runtime(), root.spec().shape, root.spec().dtype, self.job.seed);
            roots.iter().map(seed).collect::<Result<_>>()?
        } else {
            self.inbox.remove(&(Direction::Backward, stage, micro)).unwrap_or_default()
        };
        let mut sweep = None;
        for (root, gradient) in roots.iter().zip(gradients) {
            let gradient = Var::new(gradient);
            sweep = Some(match sweep {
                None => Backward::from(root, &gradient)?,
                Some(sweep) => Backward::seed(sweep, root, &gradient)?,
            });
        }
        Ok(sweep)
    }

    /// Runs W: the rest of the backward pass that I began.
    pub(super) fn weights(&mut self, compute: Compute) -> Result<()> {
        let Compute { stage, micro, .. } = compute;
        let last = self.last.get(&stage) == Some(&compute);
        let (counts, shared) = (!self.job.batch.weightless, self.shared(stage));
        let hook = self.job.hooks.gradients(compute, last)?;
        let mut hook = CountedHook { hook, observer: None, counts, waits: true, shared: &shared };
        match self.live.remove(&(stage, micro)) {
            Some(Live::Weights(Some(deferred))) => deferred.run(&mut InputHook::new(&[], &mut hook)),
            _ => Ok(()),
        }
    }

    /// The leaves of a stage that compute for other replicas, if this replica has no example of its own; else none.
    fn shared(&self, stage: usize) -> HashSet<usize> {
        let stage = self.job.stages.get(&stage).filter(|_| self.job.batch.weightless);
        stage.map_or_else(HashSet::new, |stage| expert_leaves(&**stage))
    }

    /// Sets the counted rows of a micro-batch: the first rows of the batch count.
    fn count_rows(&self, micro: usize) {
        let micros = self.schedule().micro_batches();
        let part = |CountedRows { count, rows }: CountedRows| {
            let own = rows / micros;
            CountedRows { count: count.saturating_sub(micro * own).min(own), rows: own }
        };
        set_counted_rows(self.job.counted.map(part));
    }

    /// Sets the random stream of a pass, by run, stage and micro-batch. It is the same in every schedule and on every
    /// rank.
    fn seed_random(&self, Compute { stage, micro, .. }: Compute) {
        if let Some(start @ RandomState { drawn, .. }) = self.job.random {
            let pass = (stage * self.schedule().micro_batches() + micro) as u64;
            set_random_state(RandomState { drawn: drawn.wrapping_add(pass.wrapping_mul(DRAWS)), ..start });
        }
    }

    /// The length of the random stream that one run uses.
    pub(super) fn draws(stages: usize, micros: usize) -> u64 {
        (stages as u64).wrapping_mul(micros as u64).wrapping_mul(DRAWS)
    }
}
