//! An exponential moving average of the weights, which evaluations look at.

use std::{collections::BTreeMap, sync::LazyLock};

use distributed::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted},
    comm::{Collectives, Comm, Communicator, memory},
};
use nn::{Module, ModuleExt};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ViewOps, cat},
    placement::TensorPlacement,
    pointwise::Program,
};

use crate::{Callback, Event, Run};

/// `average + (weight − average)·take`, in the average's type.
static BLEND: LazyLock<Program> =
    LazyLock::new(|| Program::new("ema", |[average, weight], [take]| [average + (weight - average) * take]));

/// Keeps an exponential moving average of the weights, `a ← δ·a + (1 − δ)·θ` after every update, and evaluates the averages in place of the weights. They are in
/// checkpoints, under `ema/`.
///
/// Every rank keeps the averages of a part of the parameters, so over all ranks there is one average, whatever the strategy: with four ranks a
/// quarter on each. For an evaluation they take the place of the weights: with ZeRO in the shards, so that no rank has more of the parameters than it keeps; elsewhere the ranks
/// send each other their parts. Halves are averaged in `f32`. The stages of a pipeline are evaluated with their weights, and the averages are in its checkpoints.
///
/// A limit: where parameters are sharded (ZeRO stage 3) over a part of the ranks, with replicas of the shards or a tensor axis, each rank has all that it computes with in memory
/// during an evaluation, and putting weights of half precision back rounds their `f32` masters. Leave [`evaluate`](WeightAveraging::evaluate) off there.
///
/// Polyak and Juditsky, *Acceleration of Stochastic Approximation by Averaging*, 1992.
pub struct WeightAveraging<R: Runtime> {
    decay: f64,
    warmup: bool,
    evaluate: bool,
    use_at_end: bool,
    updates: u64,
    parts: Vec<AveragedPart<R>>,
    /// The weights themselves, while the averages take their place.
    own: Option<Vec<Tensor<R>>>,
}

/// This rank's part of the average of a parameter.
struct AveragedPart<R: Runtime> {
    /// The parameter's own name.
    name: String,
    placement: TensorPlacement,
    start: usize,
    /// Of the parameter.
    dtype: DType,
    average: Tensor<R>,
}

/// How checkpoints call parameters, and averages.
const PARAMETER: &str = "parameter/";
const AVERAGE: &str = "ema/";
const UPDATES: &str = "ema/updates";
/// Whether evaluations looked at the averages.
const EVALUATED: &str = "ema/evaluated";

/// What the average of a parameter is called in checkpoints.
pub(super) fn in_checkpoint(parameter: &str) -> String {
    format!("{AVERAGE}{parameter}")
}

/// Whether the values of the evaluations before a checkpoint are those of averages, by the numbers in it.
pub(super) fn were_evaluated(numbers: &BTreeMap<String, u64>) -> bool {
    numbers.get(EVALUATED).is_some_and(|yes| *yes != 0)
}

impl<R: Runtime> WeightAveraging<R> {
    /// Averages with a decay δ in `[0, 1)`, which begin with the weights as they are.
    pub fn new(decay: f64) -> Self {
        let (parts, own) = (Vec::new(), None);
        WeightAveraging { decay, warmup: false, evaluate: true, use_at_end: false, updates: 0, parts, own }
    }

    /// Lets the decay rise from small values, `min(δ, (1 + t)/(10 + t))` at update `t` (from 1): early weights are soon forgotten.
    pub fn warmup(mut self) -> Self {
        self.warmup = true;
        self
    }

    /// Whether evaluations look at the averages; at first they do.
    pub fn evaluate(mut self, yes: bool) -> Self {
        self.evaluate = yes;
        self
    }

    /// Whether the averages are the model's weights when the run is over; at first they are not.
    pub fn use_at_end(mut self, yes: bool) -> Self {
        self.use_at_end = yes;
        self
    }

    fn update(&mut self, step: &dyn Checkpointed<R>) -> Result<()> {
        self.updates += 1;
        let t = self.updates as f64;
        let decay = if self.warmup { self.decay.min((1.0 + t) / (10.0 + t)) } else { self.decay };
        let mut parts = self.parts.iter_mut();
        for weight in weights(step)? {
            let part = parts.next().filter(|part| part.name == weight.name && part.start == weight.start);
            let part = part.ok_or_else(|| Error::state(&*weight.name, "was not cut like this when averaging began"))?;
            let row = weight.row.on(part.average.runtime())?.to_dtype(part.average.dtype())?;
            part.average = part.average.apply_program(&BLEND, &[&row], &[(1.0 - decay).into()])?;
        }
        Ok(())
    }

    /// Puts the averages into the model.
    fn swap_in<M: Module<R>, B>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let own = weights(run.step_state())?;
        // Not the memory that takes the averages.
        let copy = |part: CheckpointPart<R>| part.row.on(run.comm().runtime())?.copy();
        self.own = Some(own.into_iter().map(copy).collect::<Result<_>>()?);
        let averages = self.parts.iter().map(|part| part.average.clone()).collect();
        self.put(run, averages)
    }

    /// Puts the weights back.
    fn swap_out<M: Module<R>, B>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<()> {
        self.own.take().map_or(Ok(()), |own| self.put(run, own))
    }

    /// Puts rows in place of the weights' parts: in shards as they are, or whole on every rank.
    fn put<M: Module<R>, B>(&self, run: &mut Run<'_, R, M, B>, rows: Vec<Tensor<R>>) -> Result<()> {
        let of_type = |(row, part): (&Tensor<R>, &AveragedPart<R>)| row.to_dtype(part.dtype);
        let in_type = rows.iter().zip(&self.parts).map(of_type).collect::<Result<Vec<_>>>()?;
        if run.step_state().put_parameter_parts(&in_type)? { Ok(()) } else { self.put_whole(run, in_type) }
    }

    /// Gives every rank the parts of all ranks, parameter by parameter, as the model's values.
    fn put_whole<M: Module<R>, B>(&self, run: &Run<'_, R, M, B>, rows: Vec<Tensor<R>>) -> Result<()> {
        let (comm, table) = (run.comm(), self.table(run.comm())?);
        for parameter in run.model().parameters() {
            let leaf = parameter.leaf();
            let spec = leaf.spec();
            let here = parameter.placed().map_or_else(String::new, |placed| placed.placement().to_string());
            let Some(placements) = table.get(&*leaf.name()) else { continue };
            // Ranks along tensor have other pieces of one parameter: all ranks send all, and each takes its own.
            for (placement, pieces) in placements {
                let mut values = Vec::with_capacity(pieces.len());
                for &AveragedPiece { owner, index, len, .. } in pieces {
                    let own = (owner == comm.rank()).then(|| rows[index].clone());
                    values.push(broadcast(comm, own, owner, len, spec.dtype)?);
                }
                if here.is_empty() || *placement == here {
                    leaf.set(cat(&values.iter().collect::<Vec<_>>(), 0)?.reshape(spec.shape)?)?;
                }
            }
        }
        Ok(())
    }

    /// Which rank has which pieces of each parameter, in the order of their elements.
    fn table(&self, comm: &Comm<R>) -> Result<AveragedPieces> {
        let line = |(i, part): (usize, &AveragedPart<R>)| {
            format!("{} {} {i} {}\t{}\n", part.start, part.average.shape().numel(), part.name, part.placement)
        };
        let own: String = self.parts.iter().enumerate().map(line).collect();
        let mut table = AveragedPieces::new();
        for (owner, lines) in comm.exchange(own.as_bytes())?.into_iter().enumerate() {
            for line in String::from_utf8_lossy(&lines).lines() {
                let wrong = || Error::internal("WeightAveraging", format!("a rank sent `{line}`"));
                let (mut words, mut numbers) = (line.splitn(4, ' '), [0; 3]);
                for number in &mut numbers {
                    *number = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
                }
                let (name, placement) = words.next().and_then(|rest| rest.split_once('\t')).ok_or_else(wrong)?;
                let [start, len, index] = numbers;
                table.entry(name.into()).or_default().entry(placement.into()).or_default().push(AveragedPiece {
                    start,
                    len,
                    index,
                    owner,
                });
            }
        }
        table.values_mut().flat_map(BTreeMap::values_mut).for_each(|pieces| pieces.sort_by_key(|piece| piece.start));
        Ok(table)
    }
}

/// The pieces of each parameter, by what of it they are of where it is cut over ranks.
type AveragedPieces = BTreeMap<String, BTreeMap<String, Vec<AveragedPiece>>>;

/// A piece of a parameter, and the rank that has it as its part `index`.
struct AveragedPiece {
    start: usize,
    len: usize,
    index: usize,
    owner: usize,
}

/// This rank's part of the parameters.
fn weights<R: Runtime>(step: &dyn Checkpointed<R>) -> Result<Vec<CheckpointPart<R>>> {
    let named = |mut part: CheckpointPart<R>| {
        part.name = part.name.strip_prefix(PARAMETER)?.into();
        Some(part)
    };
    Ok(step.parameter_parts()?.into_iter().filter_map(named).collect())
}

fn broadcast<R: Runtime>(
    comm: &Comm<R>,
    own: Option<Tensor<R>>,
    owner: usize,
    len: usize,
    dtype: DType,
) -> Result<Tensor<R>> {
    let row = match &own {
        Some(own) => memory(own)?,
        None => TensorMut::alloc(comm.runtime(), Shape::new(&[len])?, dtype)?,
    };
    comm.broadcast(row, owner)?.wait()?.freeze()
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for WeightAveraging<R> {
    fn attach(&mut self, step: &mut dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        for weight in weights(step)? {
            let row = weight.row.on(comm.runtime())?;
            let wide = if row.dtype().is_half() { DType::F32 } else { row.dtype() };
            // Not the memory that updates write.
            let average = row.to_dtype(wide)?.copy()?;
            let CheckpointPart { name, placement, start, .. } = weight;
            self.parts.push(AveragedPart { name, placement, start, dtype: row.dtype(), average });
        }
        Ok(())
    }

    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin if self.use_at_end && run.model().parameters().is_empty() => {
                let why = "the model of this run has no parameters, as its training step has them: load `ema/` from the last checkpoint when the run is over";
                Err(Error::config("WeightAveraging", "use_at_end", why))
            }
            Event::StepEnd(metrics) if metrics.stepped() => self.update(run.step_state()),
            Event::BeforeEvaluate if self.evaluate => self.swap_in(run),
            Event::Evaluated(_) => self.swap_out(run),
            Event::End(_) if self.use_at_end => {
                // The optimizer is to learn of it, too, so they are put into the leaves.
                let averages = self.parts.iter().map(|part| part.average.to_dtype(part.dtype));
                let averages = averages.collect::<Result<Vec<_>>>()?;
                self.put_whole(run, averages)
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
        let part = |part: &AveragedPart<R>| {
            let AveragedPart { name, placement, start, average, .. } = part;
            CheckpointPart {
                name: in_checkpoint(name),
                placement: placement.clone(),
                start: *start,
                row: average.clone().into(),
            }
        };
        Ok(self.parts.iter().map(part).collect())
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        BTreeMap::from([(UPDATES.into(), self.updates), (EVALUATED.into(), u64::from(self.evaluate))])
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let wanted = |part: &AveragedPart<R>| {
            let elements = part.start..part.start + part.average.shape().numel();
            let (name, placement) = (in_checkpoint(&part.name), part.placement.clone());
            Wanted { name, placement, dtype: part.average.dtype(), elements }
        };
        Ok(self.parts.iter().map(wanted).collect())
    }

    fn check_restore(&mut self, _: &BTreeMap<String, u64>) -> Result<()> {
        Ok(())
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let wanted = self.wanted()?;
        for (part, wanted) in self.parts.iter_mut().zip(wanted) {
            part.average = read(&wanted)?;
        }
        self.updates = numbers.get(UPDATES).copied().unwrap_or(0);
        Ok(())
    }
}
