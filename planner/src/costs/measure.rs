//! Measurement of a model: one rank of a plan runs it part by part, on the runtime without values.

use std::sync::Arc;

use autograd::{Backward, BackwardHook, Leaf, LeafGrad, Var};
use distributed::{
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::Loss,
    zero::UnitOf,
};
use nn::{ModuleExt, Param, Stage, parallel::TensorStyle};
use numcore::{
    Error, KernelWork, NullRuntime, Result, Runtime, Tensor, TensorMut, Within,
    ops::{Apply, Spec},
};

use super::{BackwardWork, ExchangeCosts, ModelCosts, ParameterCosts, PartCosts};
use crate::{
    TrainingPlan,
    lone::{CallCounts, LoneRank},
};

/// A loss: a function of the last part's outputs and the targets.
type LossFn = dyn Fn(&[Var<NullRuntime>], &[Var<NullRuntime>]) -> Result<Loss<NullRuntime>>;

/// A model for [`ModelCosts::measure`]: its parts with their loss, and a micro-batch. It is the model that is trained,
/// on the runtime without values; cut it by the given mesh, and take its parts apart after that.
pub struct PlannedModel {
    parts: Vec<Box<dyn Stage<NullRuntime>>>,
    loss: Box<LossFn>,
    inputs: Vec<Tensor<NullRuntime>>,
    targets: Vec<Tensor<NullRuntime>>,
}

impl PlannedModel {
    /// The parts of a model, in order, and the loss of the last one's outputs.
    pub fn new<S: Stage<NullRuntime> + 'static>(
        parts: impl IntoIterator<Item = S>,
        loss: impl Fn(&[Var<NullRuntime>], &[Var<NullRuntime>]) -> Result<Loss<NullRuntime>> + 'static,
    ) -> Self {
        let parts = parts.into_iter().map(|part| Box::new(part) as _).collect();
        PlannedModel { parts, loss: Box::new(loss), inputs: Vec::new(), targets: Vec::new() }
    }

    /// Sets the inputs and the targets of a micro-batch of one rank, as in
    /// [`MicroBatches::split`](distributed::pipeline::MicroBatches::split).
    pub fn micro_batch(self, inputs: Vec<Tensor<NullRuntime>>, targets: Vec<Tensor<NullRuntime>>) -> Self {
        PlannedModel { inputs, targets, ..self }
    }
}

impl ModelCosts {
    /// Measures a model under a plan: its pieces along tensor, context and expert, its micro-batch, and what is
    /// recomputed. Each part runs forward and backward on its own, under [`TrainingPlan::recompute`].
    ///
    /// `make` is called once, with a mesh of as few ranks as have pieces of the model. It cuts the model by it as in
    /// training. `recomputes` is [`Machine::recomputes`](crate::Machine::recomputes). Mixtures of experts are measured
    /// with balanced loads. Costs are those of the first rank along each axis.
    ///
    /// # Errors
    /// Fails as the model does, and if it has no parts.
    pub fn measure(
        plan: &TrainingPlan,
        recomputes: bool,
        make: impl FnOnce(&Mesh<NullRuntime>) -> Result<PlannedModel>,
    ) -> Result<Self> {
        plan.check()?;
        let rt = NullRuntime::recomputing(recomputes);
        let axes = measured(plan)?;
        let (comm, counts) = LoneRank::world(&rt, 0, axes.world());
        let mesh = Mesh::new(&comm, axes)?;
        let model = make(&mesh)?;
        if model.parts.is_empty() {
            return Err(Error::config("ModelCosts::measure", "parts", "the model has no parts"));
        }
        let meter = Meter { rt, counts, mesh, plan };
        let (mut values, mut parts) = (model.inputs.clone(), Vec::with_capacity(model.parts.len()));
        for (number, part) in model.parts.iter().enumerate() {
            let loss = (number + 1 == model.parts.len()).then_some((&*model.loss, &model.targets[..]));
            let (costs, outputs) =
                meter.part(&**part, &values, number == 0, loss).within(format_args!("part {number}"))?;
            parts.push(costs);
            values = outputs;
        }
        number(&mut parts);
        Ok(ModelCosts { parts })
    }
}

/// The ranks that have pieces of a model: those along context and tensor, and as many along data as experts need.
fn measured(plan: &TrainingPlan) -> Result<ParallelPlan> {
    let data = plan.expert / gcd(plan.expert, plan.context);
    let axes =
        [(Axis::Data, data), (Axis::Context, plan.context), (Axis::Tensor, plan.tensor), (Axis::Expert, plan.expert)];
    ParallelPlan::of(axes)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The counters of a measurement.
struct Meter<'a> {
    rt: NullRuntime,
    counts: CallCounts,
    mesh: Mesh<NullRuntime>,
    plan: &'a TrainingPlan,
}

/// Outputs of a part.
type Values = Vec<Var<NullRuntime>>;

/// The kernels and exchanges of a pass.
type PassCosts = (KernelWork, Vec<ExchangeCosts>);

impl Meter<'_> {
    /// Measures a part, and returns its outputs without their history.
    fn part(
        &self,
        part: &dyn Stage<NullRuntime>,
        values: &[Tensor<NullRuntime>],
        is_first: bool,
        loss: Option<(&LossFn, &[Tensor<NullRuntime>])>,
    ) -> Result<(PartCosts, Vec<Tensor<NullRuntime>>)> {
        let inputs_of = |values: &[Tensor<NullRuntime>]| inputs(values, is_first);
        // The first pass also agrees on things, and makes some once: it is no pass of a step.
        self.forward(part, &inputs_of(values)?, loss)?;
        let live = self.live();
        self.rt.reset_peak();
        let inputs = inputs_of(values)?;
        let (forward, (outputs, roots)) = self.pass(|| self.forward(part, &inputs, loss))?;
        let saved = self.live() - live;
        let specs: Vec<_> = outputs.iter().map(Apply::spec).collect();
        let output = specs.iter().map(|spec| (spec.shape.numel() * spec.dtype.size()) as u64).sum();
        let mut gradients = PartGradients::of(part)?;
        let held = self.live() - live - saved;
        drop(outputs);
        let (backward, ()) = self.pass(|| seeded(roots)?.run(&mut gradients))?;
        let peak = self.rt.memory().total.peak as u64 - live;

        // An input counts if the second part reads it: memory of its own shows that. Those of a batch are kept anyway.
        let before = self.live();
        let copy = |value: &Tensor<NullRuntime>| if is_first { Ok(value.clone()) } else { value.copy() };
        let again = inputs_of(&values.iter().map(copy).collect::<Result<Vec<_>>>()?)?;
        let (_, roots) = self.forward(part, &again, loss)?;
        self.counts.take();
        let wanted: Vec<&Var<NullRuntime>> = again.iter().filter(|x| x.requires_grad()).collect();
        let ((input, _), deferred) = self.pass(|| seeded(roots)?.inputs_only(&wanted, &mut gradients))?;
        drop(again);
        let kept = self.live() - before;
        let ((weights, _), ()) = self.pass(|| deferred.run(&mut gradients))?;

        let costs = PartCosts {
            forward: forward.0,
            forward_exchanges: forward.1,
            backward: BackwardWork { all: backward.0, input, weights },
            backward_exchanges: backward.1,
            saved,
            deferred: kept,
            transient: peak.saturating_sub(saved + held),
            input: values.iter().map(|value| value.memory_bytes() as u64).sum(),
            output,
            parameters: parameters(part),
        };
        let empty = |spec: &Spec| Tensor::zeros(&self.rt, spec.shape, spec.dtype);
        Ok((costs, specs.iter().map(empty).collect::<Result<_>>()?))
    }

    fn live(&self) -> u64 {
        self.rt.memory().total.live as u64
    }

    /// Runs a part, and its loss if it is the last. Returns its outputs and the roots of its backward pass.
    fn forward(
        &self,
        part: &dyn Stage<NullRuntime>,
        inputs: &[Var<NullRuntime>],
        loss: Option<(&LossFn, &[Tensor<NullRuntime>])>,
    ) -> Result<(Values, Values)> {
        let outputs = self.plan.recompute.run(|| part.forward_values(inputs))?;
        let Some((loss, targets)) = loss else { return Ok((outputs.clone(), outputs)) };
        let targets: Vec<_> = targets.iter().cloned().map(Var::new).collect();
        let total = loss(&outputs, &targets)?.total().clone();
        Ok((vec![total.clone()], vec![total]))
    }

    /// Counts a pass.
    fn pass<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<(PassCosts, T)> {
        let before = self.rt.work();
        self.counts.take();
        let result = f()?;
        Ok(((self.rt.work().since(before), self.exchanges()), result))
    }

    /// The exchanges since the last call, by axis and kind. Where groups of two axes are the same ranks, a call is
    /// counted for the inner one.
    fn exchanges(&self) -> Vec<ExchangeCosts> {
        let axes = [Axis::Tensor, Axis::Context, Axis::Expert];
        let of = |members: &[usize]| {
            let here = |axis: &Axis| self.mesh.axis(*axis).members() == members && members.len() > 1;
            axes.into_iter().find(here).unwrap_or(Axis::Data)
        };
        let mut all: Vec<ExchangeCosts> = Vec::new();
        for ((members, kind, _), traffic) in self.counts.take() {
            let axis = of(&members);
            let known = all.iter().position(|costs| (costs.axis, costs.kind) == (axis, kind));
            let at = known.unwrap_or_else(|| {
                all.push(ExchangeCosts { axis, kind, calls: 0, payload: 0, sent: 0 });
                all.len() - 1
            });
            all[at].calls += traffic.calls;
            all[at].payload += traffic.payload;
            all[at].sent += traffic.sent;
        }
        all
    }
}

/// The values of a part's inputs as variables. Floating ones have gradients, but for those of the first part, which are
/// the batch's.
fn inputs(values: &[Tensor<NullRuntime>], is_first: bool) -> Result<Vec<Var<NullRuntime>>> {
    let var = |value: &Tensor<NullRuntime>| match value.dtype().is_float() && !is_first {
        true => Var::leaf("input", value.clone()),
        false => Ok(Var::new(value.clone())),
    };
    values.iter().map(var).collect()
}

/// A backward pass from these roots, with gradients of their shapes.
fn seeded(roots: Vec<Var<NullRuntime>>) -> Result<Backward<NullRuntime>> {
    let mut roots = roots.into_iter().filter(|root| root.requires_grad());
    let nothing = || Error::config("ModelCosts::measure", "parts", "no output of the part needs a gradient");
    let ones = |root: &Var<NullRuntime>| -> Result<Var<NullRuntime>> {
        let spec = root.spec();
        Ok(Var::new(Tensor::ones(root.runtime(), spec.shape, spec.dtype)?))
    };
    let first = roots.next().ok_or_else(nothing)?;
    let gradient = ones(&first)?;
    roots.try_fold(Backward::from(&first, &gradient)?, |backward, root| {
        let gradient = ones(&root)?;
        backward.seed(&root, &gradient)
    })
}

/// Memory for the gradients of a part's parameters, as a training step has it before a pass. Gradients of its inputs
/// are dropped.
struct PartGradients(Vec<(usize, Option<TensorMut<NullRuntime>>)>);

impl PartGradients {
    fn of(part: &dyn Stage<NullRuntime>) -> Result<Self> {
        let trained = part.parameters().into_iter().filter(|p| p.requires_grad());
        let memory = |p: Param<NullRuntime>| {
            let (leaf, spec) = (p.leaf(), p.spec());
            Ok((leaf.id(), Some(TensorMut::alloc(leaf.runtime(), spec.shape, spec.dtype)?)))
        };
        trained.map(memory).collect::<Result<_>>().map(PartGradients)
    }

    fn slot(&mut self, leaf: &Arc<Leaf<NullRuntime>>) -> Option<&mut Option<TensorMut<NullRuntime>>> {
        self.0.iter_mut().find(|(id, _)| *id == leaf.id()).map(|(_, memory)| memory)
    }
}

impl BackwardHook<NullRuntime> for PartGradients {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<NullRuntime>>) -> Result<Option<TensorMut<NullRuntime>>> {
        Ok(self.slot(leaf).and_then(Option::take))
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<NullRuntime>>, gradient: LeafGrad<NullRuntime>) -> Result<()> {
        if let (Some(slot), LeafGrad::Slot(memory)) = (self.slot(leaf), gradient) {
            *slot = Some(memory);
        }
        Ok(())
    }
}

/// The parameters of a part, each once.
fn parameters(part: &dyn Stage<NullRuntime>) -> Vec<ParameterCosts> {
    let of = |(name, p): (String, Param<NullRuntime>)| ParameterCosts {
        name,
        shape: p.shape().dims().to_vec(),
        dtype: p.dtype(),
        trained: p.requires_grad(),
        expert: p.placed().is_some_and(|placed| placed.style() == TensorStyle::Experts),
        partial: p.placed().is_some_and(|placed| placed.has_partial_gradient()),
        origin: p.origin(),
        unit: 0,
    };
    part.named_parameters().into_iter().map(of).collect()
}

/// Replaces identities by numbers in the order of the model, which are equal in every run, and numbers the units.
fn number(parts: &mut [PartCosts]) {
    let (units, mut origins, mut names) = (UnitOf::layers(), Vec::new(), vec![String::new()]);
    for parameter in parts.iter_mut().flat_map(|part| &mut part.parameters) {
        parameter.origin = number_of(parameter.origin, &mut origins);
        parameter.unit = number_of(units.of(&parameter.name), &mut names);
    }
}

/// The number of a value among known ones, to which a new one is added.
fn number_of<T: PartialEq>(value: T, known: &mut Vec<T>) -> usize {
    let at = known.iter().position(|other| *other == value);
    at.unwrap_or_else(|| {
        known.push(value);
        known.len() - 1
    })
}
