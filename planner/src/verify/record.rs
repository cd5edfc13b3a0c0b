//! The values of one rank in a run.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use autograd::{manual_seed, observe_ops, random_state, set_random_state};
use distributed::{
    combinations::Features,
    comm::{Comm, Communicator, CountingCommunicator},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    strategy::BatchShare,
    train::{Step, StepInput, TrainStep},
};
use nn::{Module, ModuleExt, parallel::TensorStyle};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{ViewOps, cat},
    placement::TensorPlacement,
};

use super::{
    Examples,
    call::CallRecord,
    observed::ObservedGradients,
    passes::{ObservedForwards, PassPlace},
};

/// A run of some steps.
pub(super) struct Trial {
    pub plan: ParallelPlan,
    /// The number of shares of each batch that one rank takes after one another; 0 on the ranks of a plan.
    pub shares: usize,
    pub steps: u64,
    /// The last step, of which op calls are recorded in place of results.
    pub observed: Option<u64>,
}

/// The values of one rank.
pub(super) struct RankRecord {
    pub rank: usize,
    pub features: Features,
    /// True if the model drew random values.
    pub draws: bool,
    /// True if the model exchanged values of a forward pass with ranks that read other examples.
    pub mixes: bool,
    /// The dtype of fewest digits among the outputs of op calls in the first step.
    pub narrowest: DType,
    /// The names of parameters that are copies of tied ones, and those of the tied ones.
    pub copies: BTreeMap<String, String>,
    pub parameters: BTreeMap<String, ParameterRecord>,
    pub initial: NamedValues,
    pub steps: Vec<StepRecord>,
    /// The full names of buffers.
    pub buffers: Vec<String>,
    /// The op calls of the observed step, by pass: of each micro-batch and share, and in a pipeline of each stage of
    /// the rank.
    pub passes: BTreeMap<PassPlace, Vec<CallRecord>>,
}

/// Values by name.
pub(super) type NamedValues = BTreeMap<String, Vec<f64>>;

/// A parameter, as a rank has it.
pub(super) struct ParameterRecord {
    /// The place among the parameters of the model.
    pub order: usize,
    pub placement: TensorPlacement,
    pub dtype: DType,
    pub trained: bool,
    /// True if each rank along tensor has a part of the gradient.
    pub is_partial: bool,
    /// True for a parameter of experts that are shared out among ranks.
    pub is_expert: bool,
}

/// The values of one step.
pub(super) struct StepRecord {
    /// False if the update was left out, since a gradient was not finite.
    pub stepped: bool,
    pub loss: f64,
    /// The total weight of the losses of all ranks.
    pub weight: f64,
    pub own_loss: Option<f64>,
    pub norm: Option<f64>,
    /// Gradients of this rank, over the total weight of the losses of all ranks.
    pub gradients: NamedValues,
    /// The names of the gradients in the order in which they were final: those of the last layers first.
    pub ready: Vec<String>,
    pub weights: NamedValues,
    pub buffers: NamedValues,
}

impl RankRecord {
    /// The name of a parameter in checkpoints: that of the first copy of a tied one.
    pub(super) fn saved_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.copies.get(name).map_or(name, String::as_str)
    }
}

impl Trial {
    pub(super) fn run<R, M, I>(
        &self,
        comm: Comm<R>,
        make: &impl Fn(&Mesh<R>) -> Result<(M, TrainStep<R>)>,
        batch: &impl Fn(&R, u64) -> Result<Vec<Tensor<R>>>,
        input: &impl Fn(&M, &Examples<'_, R>) -> Result<I>,
    ) -> Result<RankRecord>
    where
        R: Runtime,
        M: Module<R>,
        I: Into<StepInput<R>>,
    {
        manual_seed(0);
        let counts = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<R> = counts.clone();
        let (rt, mesh) = (comm.runtime().clone(), Mesh::new(&comm, self.plan.clone())?);
        let (model, mut step) = make(&mesh)?;
        let (share, own, properties) = (step.ranks().share, step.accumulation(), step.properties());
        let count = self.shares.max(1);
        step.set_accumulation(own * count)?;
        let gradients = ObservedGradients::of(&mut step);
        let results = self.observed.is_none();
        let mut record = RankRecord {
            rank: comm.rank(),
            features: properties.features,
            draws: false,
            mixes: false,
            narrowest: DType::F64,
            copies: copies(&modules(&model, &step), &properties.copies),
            parameters: parameters(&modules(&model, &step)),
            initial: if results { weights(&model, &step, true)? } else { NamedValues::new() },
            steps: Vec::new(),
            buffers: modules(&model, &step)
                .iter()
                .flat_map(|module| module.named_buffers())
                .map(|(name, _)| name)
                .collect(),
            passes: BTreeMap::new(),
        };
        // Each share continues its own stream of random values.
        let mut states: Vec<_> = (0..count).map(|_| random_state()).collect();
        if self.shares > 1 {
            states.iter_mut().zip(0..).for_each(|(state, stream)| state.stream = stream);
        }
        let (mut present, mut mixes) = (None, false);
        let of_run = step.pipeline().map_or(1, |pipeline| pipeline.schedule().micro_batches());
        for number in 0..self.steps {
            let tensors = batch(&rt, number)?;
            let mut take = |k: usize| {
                present.into_iter().for_each(|before: usize| states[before] = random_state());
                let taken = *present.insert(k % count);
                set_random_state(states[taken]);
                let share = if self.shares == 0 { share } else { BatchShare { index: taken, of: count } };
                let micro_batch = k / count;
                let own_rows = |tensor: &Tensor<R>| rows(tensor, (micro_batch, own), of_run, share);
                let tensors = tensors.iter().map(own_rows).collect::<Result<_>>()?;
                let examples = Examples { mesh: &mesh, step: number, micro_batch, share, tensors };
                let before = self.mixed(&counts);
                let result = input(&model, &examples);
                // A first step also agrees on things.
                mixes |= number + 1 == self.steps && self.mixed(&counts) > before;
                result
            };
            if self.observed == Some(number) {
                let forwards = ObservedForwards { model: &model, step: &mut step, is_alone: self.plan.world() == 1 };
                record.passes = forwards.passes(own * count, |k| Ok(take(k)?.into()))?;
                break;
            }
            let (metrics, seen) = observe_ops(|| step.step(take));
            let metrics = metrics?;
            let outputs = seen.iter().flat_map(|call| &call.outputs).map(|output| output.dtype);
            let trained = record.parameters.values().filter(|parameter| parameter.trained);
            let weights_of = trained.map(|parameter| parameter.dtype);
            let floats = outputs.chain(weights_of).filter(|dtype| dtype.is_float());
            record.narrowest = floats.fold(record.narrowest, |a, b| if b.size() < a.size() { b } else { a });
            record.draws |= seen.iter().any(|call| call.draws);
            record.mixes = mixes;
            let weight = metrics.weight()?;
            // Each rank along context reports the weight of whole sequences.
            let (gradients, ready) = gradients.take(weight * step.ranks().context_ranks as f64);
            let mut buffers = NamedValues::new();
            for (name, buffer) in modules(&model, &step).iter().flat_map(|module| module.named_buffers()) {
                // A counter of batches counts each share.
                if !buffer.spec().dtype.is_float() && self.shares > 1 {
                    continue;
                }
                buffers.insert(name, buffer.value().to_f64s()?);
            }
            record.steps.push(StepRecord {
                stepped: metrics.stepped(),
                loss: metrics.loss()?,
                weight,
                own_loss: metrics.own_loss()?,
                norm: metrics.grad_norm()?,
                gradients,
                ready,
                weights: if results { weights(&model, &step, false)? } else { NamedValues::new() },
                buffers,
            });
        }
        Ok(record)
    }
}

impl Trial {
    /// The number of calls among ranks that read other examples, but for those that gather units of parameters.
    fn mixed<R: Runtime>(&self, counts: &CountingCommunicator<R>) -> u64 {
        let place = |rank: usize| [Axis::Data, Axis::Shard].map(|axis| self.plan.coordinate(axis, rank));
        let mixes = |group: &[usize]| group.iter().any(|&rank| place(rank) != place(group[0]));
        let all =
            counts.by_group().into_iter().filter(|((group, _), _)| mixes(group)).map(|(_, traffic)| traffic.calls);
        let is_unit = |name: &Option<Arc<str>>| name.as_ref().is_some_and(|name| name.contains("unit `"));
        let units = counts.by_name().into_iter().filter(|(name, _)| is_unit(name)).map(|(_, traffic)| traffic.calls);
        all.sum::<u64>().saturating_sub(units.sum())
    }
}

/// The rows of a share in run `run` of `runs`: its part of each of the run's micro-batches.
fn rows<R: Runtime>(
    all: &Tensor<R>,
    (run, runs): (usize, usize),
    of_run: usize,
    share: BatchShare,
) -> Result<Tensor<R>> {
    let count = all.shape().dims().first().copied().unwrap_or(0);
    let parts = runs * of_run * share.of;
    if count == 0 || !count.is_multiple_of(parts) {
        let allowed = format!("a multiple of {} micro-batches of {} shares", runs * of_run, share.of);
        return Err(Error::range("Verify", "number of rows of the batch", count, allowed));
    }
    let len = count / parts;
    let part = |micro: usize| all.narrow(0, ((run * of_run + micro) * share.of + share.index) * len, len);
    let parts: Vec<Tensor<R>> = (0..of_run).map(part).collect::<Result<_>>()?;
    match &parts[..] {
        [one] => one.contiguous(),
        _ => cat(&parts.iter().collect::<Vec<_>>(), 0),
    }
}

/// The model, and the modules that the step holds.
pub(super) fn modules<'a, R: Runtime, M: Module<R>>(model: &'a M, step: &'a TrainStep<R>) -> Vec<&'a dyn Module<R>> {
    std::iter::once(model as &dyn Module<R>).chain(step.modules()).collect()
}

/// The names of copies of tied parameters, and those of the parameters in checkpoints.
pub(super) fn copies<R: Runtime>(modules: &[&dyn Module<R>], of: &HashMap<usize, String>) -> BTreeMap<String, String> {
    let named = modules.iter().flat_map(|module| module.named_parameters());
    named.filter_map(|(name, parameter)| Some((name, of.get(&parameter.leaf().id())?.clone()))).collect()
}

fn parameters<R: Runtime>(modules: &[&dyn Module<R>]) -> BTreeMap<String, ParameterRecord> {
    let named = modules.iter().flat_map(|module| module.named_parameters());
    let record = |(order, (name, parameter)): (usize, (String, nn::Param<R>))| {
        let whole = || TensorPlacement::whole(parameter.logical_shape());
        let placed = parameter.placed();
        let placement = placed.as_ref().map_or_else(whole, |placed| placed.placement().clone());
        let is_partial = placed.as_ref().is_some_and(|placed| placed.has_partial_gradient());
        let is_expert = placed.is_some_and(|placed| placed.style() == TensorStyle::Experts);
        let (dtype, trained) = (parameter.dtype(), parameter.requires_grad());
        (name, ParameterRecord { order, placement, dtype, trained, is_partial, is_expert })
    };
    named.enumerate().map(record).collect()
}

/// The values of all parameters, or of the trained ones, gathered from shards.
fn weights<R: Runtime, M: Module<R>>(model: &M, step: &TrainStep<R>, with_frozen: bool) -> Result<NamedValues> {
    let scope = step.gather_full_params()?;
    let mut values = NamedValues::new();
    let named = modules(model, step).into_iter().flat_map(|module| module.named_parameters());
    for (name, parameter) in named.filter(|(_, p)| with_frozen || p.requires_grad()) {
        values.insert(name, parameter.value()?.to_f64s()?);
    }
    scope.release()?;
    Ok(values)
}
