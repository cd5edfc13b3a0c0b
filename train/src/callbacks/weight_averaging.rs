//! An exponential moving average of the weights, which evaluations use.

mod of_optimizer;
mod whole;

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use autograd::Leaf;

use distributed::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted},
    combinations::Feature,
    comm::{Comm, Communicator},
};
use nn::{Module, ModuleExt};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
    placement::TensorPlacement,
    pointwise::Program,
};

use crate::{Callback, Event, Run, sink::Value};

use of_optimizer::OPTIMIZERS;
pub(super) use of_optimizer::evaluated_names;

/// The program `average + (weight − average)·take`, in the average's type.
static BLEND: LazyLock<Program> =
    LazyLock::new(|| Program::new("ema", |[average, weight], [take]| [average + (weight - average) * take]));

/// Keeps an exponential moving average of the weights, `a ← δ·a + (1 − δ)·θ` after every update. Evaluations use the
/// averages in place of the weights. Checkpoints hold them under `ema/`.
///
/// Every rank keeps the averages of a part of the parameters: with four ranks a quarter on each. So there is one
/// average over all ranks, whatever the strategy. For an evaluation they take the place of the weights. With ZeRO they
/// are put into the shards, so that no rank has more of the parameters than it keeps; elsewhere ranks broadcast their
/// parts. Averages of halves are `f32`. An update waits for ZeRO's gather. Stages with ties are evaluated with weights.
///
/// Averages begin with the weights of a checkpoint that has none. A run without averaging drops those of a checkpoint.
/// The run's first record says either, as the text `averages`.
///
/// A limit: parameters may be sharded (ZeRO stage 3) in a pipeline, beside a tensor axis, or with replicas of the
/// shards. An evaluation then holds all parameters that a rank computes with in its memory, and putting weights of half
/// precision back rounds their `f32` masters. [`skip_evaluations`](WeightAveraging::skip_evaluations) avoids both.
///
/// Polyak and Juditsky, *Acceleration of Stochastic Approximation by Averaging*, 1992.
pub struct WeightAveraging<R: Runtime> {
    decay: f64,
    warmup: bool,
    evaluate: bool,
    use_at_end: bool,
    /// True if the optimizer keeps the averages.
    of_optimizer: bool,
    /// True if averages of a checkpoint are only read, for a run without any.
    is_dropped: bool,
    /// True if the checkpoint that is being loaded has averages; none if no checkpoint is being loaded.
    has_averages: Option<bool>,
    /// True if averages begin with the weights that were loaded.
    begins: bool,
    updates: u64,
    parts: Vec<AveragedPart<R>>,
    /// The weights themselves, while the averages take their place.
    own: Option<Vec<Tensor<R>>>,
    /// The values of the leaves that the averages replace.
    leaves: Vec<(Arc<Leaf<R>>, Tensor<R>)>,
}

/// This rank's part of the average of a parameter.
struct AveragedPart<R: Runtime> {
    /// The parameter's own name.
    name: String,
    placement: TensorPlacement,
    start: usize,
    len: usize,
    /// The dtype of the parameter; the average's may be wider.
    dtype: DType,
    average: Tensor<R>,
}

/// Prefixes of parameters and averages in checkpoints.
const PARAMETER: &str = "parameter/";
const AVERAGE: &str = "ema/";
const UPDATES: &str = "ema/updates";
/// The features of steps whose state is in shards.
const ZERO: [Feature; 3] = [Feature::ZeroOptimizer, Feature::ZeroGradients, Feature::ZeroParameters];
/// The number that is 1 if evaluations used the averages, and 2 if the optimizer's own.
const EVALUATED: &str = "ema/evaluated";

/// The averages of a checkpoint, if none of the states takes them: a run without averaging reads and drops them.
pub(crate) fn dropped<R: Runtime>(
    saved: &BTreeMap<String, u64>,
    own: &BTreeMap<String, u64>,
    step: &mut dyn Checkpointed<R>,
    comm: &Comm<R>,
) -> Result<Option<WeightAveraging<R>>> {
    if !saved.contains_key(UPDATES) || own.contains_key(UPDATES) {
        return Ok(None);
    }
    let mut averaging = WeightAveraging { is_dropped: true, ..WeightAveraging::new(0.0) };
    averaging.take_parts(step, comm)?;
    Ok(Some(averaging))
}

/// The name of a parameter's average in checkpoints.
pub(super) fn in_checkpoint(parameter: &str) -> String {
    format!("{AVERAGE}{parameter}")
}

impl<R: Runtime> WeightAveraging<R> {
    /// Averages with a decay δ in `[0, 1)`, beginning with the current weights.
    pub fn new(decay: f64) -> Self {
        WeightAveraging {
            decay,
            warmup: false,
            evaluate: true,
            use_at_end: false,
            of_optimizer: false,
            is_dropped: false,
            has_averages: None,
            begins: false,
            updates: 0,
            parts: Vec::new(),
            own: None,
            leaves: Vec::new(),
        }
    }

    /// Lets the decay rise as `min(δ, (1 + t)/(10 + t))` at update `t`, from 1: early weights soon count little.
    pub fn warmup(mut self) -> Self {
        self.warmup = true;
        self
    }

    /// Leaves evaluations to the weights. Otherwise the averages are evaluated.
    pub fn skip_evaluations(mut self) -> Self {
        self.evaluate = false;
        self
    }

    /// Makes the averages the model's weights when the run is over.
    pub fn use_at_end(mut self) -> Self {
        self.use_at_end = true;
        self
    }

    /// Takes this rank's part of each parameter as its average.
    fn take_parts(&mut self, step: &mut dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        for weight in weights(step)? {
            let row = weight.row.on(comm.runtime())?;
            let wide = if row.dtype().is_half() { DType::F32 } else { row.dtype() };
            let (len, dtype) = (row.shape().numel(), row.dtype());
            let kept = if self.is_dropped { row.narrow(0, 0, 0)? } else { row };
            // A copy, as updates overwrite the weights' memory.
            let average = kept.to_dtype(wide)?.copy()?;
            let CheckpointPart { name, placement, start, .. } = weight;
            self.parts.push(AveragedPart { name, placement, start, len, dtype, average });
        }
        Ok(())
    }

    fn update(&mut self, step: &dyn Checkpointed<R>) -> Result<()> {
        self.updates += 1;
        let t = self.updates as f64;
        let decay = if self.warmup { self.decay.min((1.0 + t) / (10.0 + t)) } else { self.decay };
        let mut parts = self.parts.iter_mut();
        for weight in weights(step)? {
            let part = parts.next().filter(|part| part.name == weight.name && part.start == weight.start);
            let part =
                part.ok_or_else(|| Error::state(&*weight.name, "was sharded differently when averaging began"))?;
            let row = weight.row.on(part.average.runtime())?.to_dtype(part.average.dtype())?;
            part.average = part.average.apply_program(&BLEND, &[&row], &[(1.0 - decay).into()])?;
        }
        Ok(())
    }

    /// Sets the averages to the current weights.
    fn begin(&mut self, step: &dyn Checkpointed<R>) -> Result<()> {
        for (part, weight) in self.parts.iter_mut().zip(weights(step)?) {
            part.average = weight.row.on(part.average.runtime())?.to_dtype(part.average.dtype())?.copy()?;
        }
        Ok(())
    }

    /// Puts the averages into the model: into shards as they are, or unsharded on every rank.
    fn swap_in<M: Module<R>, B>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let features = run.features();
        // Averages overwrite the memory of shards alone.
        let is_sharded = ZERO.iter().any(|stage| features.has(*stage));
        if self.of_optimizer {
            let comm = run.comm().clone();
            self.take_averages(run.step_state(), &comm, is_sharded)?;
        }
        let own = weights(run.step_state())?;
        let copy = |part: CheckpointPart<R>| {
            let row = part.row.on(run.comm().runtime())?;
            if is_sharded { row.copy() } else { Ok(row) }
        };
        let own = own.into_iter().map(copy).collect::<Result<Vec<_>>>()?;
        let averages = self.in_type(&self.parts.iter().map(|part| part.average.clone()).collect::<Vec<_>>())?;
        if run.step_state().swap_parameter_parts(&averages)? {
            self.own = Some(own);
            return Ok(());
        }
        // Of local updates the parts are the global weights, and not a rank's own.
        if features.has(Feature::ZeroParameters) && !features.has(Feature::Local) {
            self.own = Some(own);
        } else {
            // Leaves get the very values back: optimizers keep `f32` masters then, and local updates their progress.
            let leaves = run.modules().into_iter().flat_map(|module| module.parameters()).map(|p| p.leaf());
            self.leaves = leaves.map(|leaf| Ok((leaf.clone(), leaf.value()?))).collect::<Result<_>>()?;
        }
        self.put_whole(run, averages)
    }

    /// Puts the weights back.
    fn swap_out<M: Module<R>, B>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<()> {
        self.leaves.drain(..).try_for_each(|(leaf, value)| leaf.set(value))?;
        let Some(own) = self.own.take() else { return Ok(()) };
        let own = self.in_type(&own)?;
        if run.step_state().swap_parameter_parts(&own)? { Ok(()) } else { self.put_whole(run, own) }
    }

    /// Rows of the parts in the parts' types.
    fn in_type(&self, rows: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        rows.iter().zip(&self.parts).map(|(row, part)| row.to_dtype(part.dtype)).collect()
    }
}

/// This rank's part of the parameters.
fn weights<R: Runtime>(step: &dyn Checkpointed<R>) -> Result<Vec<CheckpointPart<R>>> {
    let named = |mut part: CheckpointPart<R>| {
        part.name = part.name.strip_prefix(PARAMETER)?.into();
        Some(part)
    };
    Ok(step.parameter_parts()?.into_iter().filter_map(named).collect())
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for WeightAveraging<R> {
    fn attach(&mut self, step: &mut dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        if self.of_optimizer { self.require_averages(step, comm) } else { self.take_parts(step, comm) }
    }

    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if self.use_at_end && matches!(event, Event::Begin) {
            run.check_end(Feature::UseAtEnd, "WeightAveraging")?;
        }
        match event {
            Event::Begin | Event::WentBack if std::mem::take(&mut self.begins) => {
                run.state.measure("averages", Value::Text("begin with the weights of a checkpoint without any".into()));
                self.begin(run.step_state())
            }
            // The loop's count decides, which is equal on all ranks: this rank may have left out a step that others
            // took.
            Event::StepEnd(_) if run.has_stepped() && !self.of_optimizer => self.update(run.step_state()),
            Event::BeforeEvaluate if self.evaluate => self.swap_in(run),
            Event::Evaluated(_) => {
                let done = self.swap_out(run);
                self.drop_averages();
                done
            }
            Event::End(_) if self.use_at_end => {
                if self.of_optimizer {
                    let comm = run.comm().clone();
                    self.take_averages(run.step_state(), &comm, false)?;
                }
                // The averages are put into the leaves, from which the optimizer adopts them, too.
                let averages = self.parts.iter().map(|part| part.average.to_dtype(part.dtype));
                let averages = averages.collect::<Result<Vec<_>>>()?;
                let done = self.put_whole(run, averages);
                self.drop_averages();
                done
            }
            _ => Ok(()),
        }
    }

    fn tensors(&mut self) -> Option<&mut dyn Checkpointed<R>> {
        Some(self)
    }

    fn check(&self) -> Result<()> {
        if (0.0..1.0).contains(&self.decay) {
            return Ok(());
        }
        let why = format!("the decay must be in [0, 1), it is {}", self.decay);
        Err(Error::config("WeightAveraging", "decay", why))
    }
}

impl<R: Runtime> Checkpointed<R> for WeightAveraging<R> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let kept = if self.of_optimizer { &[] } else { &self.parts[..] };
        let part = |part: &AveragedPart<R>| {
            let AveragedPart { name, placement, start, average, .. } = part;
            CheckpointPart {
                name: in_checkpoint(name),
                placement: placement.clone(),
                start: *start,
                row: average.clone().into(),
            }
        };
        Ok(kept.iter().map(part).collect())
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        if self.of_optimizer {
            return BTreeMap::from([(EVALUATED.into(), if self.evaluate { OPTIMIZERS } else { 0 })]);
        }
        if self.has_averages == Some(false) {
            return BTreeMap::new();
        }
        BTreeMap::from([(UPDATES.into(), self.updates), (EVALUATED.into(), u64::from(self.evaluate))])
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.has_averages = Some(numbers.contains_key(UPDATES) || self.of_optimizer);
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let wanted = |part: &AveragedPart<R>| {
            let elements = part.start..part.start + part.len;
            let (name, placement) = (in_checkpoint(&part.name), part.placement.clone());
            Wanted { name, placement, dtype: part.average.dtype(), elements }
        };
        let taken = self.parts.iter().filter(|_| self.has_averages != Some(false) && !self.of_optimizer);
        Ok(taken.map(wanted).collect())
    }

    fn check_restore(&mut self, _: &BTreeMap<String, u64>) -> Result<()> {
        Ok(())
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let (wanted, there) = (self.wanted()?, self.has_averages.take());
        self.updates = numbers.get(UPDATES).copied().unwrap_or(0);
        if self.is_dropped {
            return Ok(());
        }
        self.begins = there == Some(false);
        for (part, wanted) in self.parts.iter_mut().zip(wanted) {
            part.average = read(&wanted)?;
        }
        Ok(())
    }
}
