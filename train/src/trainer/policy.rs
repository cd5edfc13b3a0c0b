//! The policy of a configured run: when ranks exchange, and which of them computes how much.

use adaptive::{
    balance::{BalanceOptions, Balanced},
    local_updates::{LocalSteps, LocalUpdates, OuterChoice},
};
use distributed::{
    checkpoint::Checkpointed,
    checkpointed_by,
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    strategy::StepRanks,
    train::{Step, StepInput, StepProperties, StepWork, TrainStep, TrainingMetrics, WeightedSum},
};
use nn::Module;
use numcore::{Result, Runtime};

/// The policy by which ranks exchange gradients or weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Policy {
    /// Sums gradients over all ranks in every step: the results of one rank.
    #[default]
    Sync,
    /// Lets fast ranks compute more micro-batches of each step, by [`Balanced`].
    Cadence(BalanceOptions),
    /// Lets the ranks along data train by themselves and synchronize weights by a rule, by [`LocalSteps`].
    Async(OuterChoice, LocalUpdates),
}

/// The training step of a [`Policy`].
pub enum PolicyStep<R: Runtime> {
    /// The step itself.
    Sync(TrainStep<R>),
    /// The step with uneven micro-batches.
    Cadence(Balanced<TrainStep<R>>),
    /// The step of a rank that trains by itself.
    Async(LocalSteps<R, TrainStep<R>>),
}

impl Policy {
    /// The step over a mesh, of the plain step that `make` makes.
    #[track_caller]
    pub(super) fn step<R: Runtime>(
        &self,
        mesh: &Mesh<R>,
        model: &(impl Module<R> + ?Sized),
        make: impl FnOnce(&Mesh<R>) -> Result<TrainStep<R>>,
    ) -> Result<PolicyStep<R>> {
        Ok(match self {
            Policy::Sync => PolicyStep::Sync(make(mesh)?),
            Policy::Cadence(options) => PolicyStep::Cadence(Balanced::new(make(mesh)?, options.clone())?),
            Policy::Async(rule, updates) => {
                let (data, inner) = (mesh.axis(Axis::Data), make(&replica(mesh)?)?);
                let step = LocalSteps::new(data, model, inner, rule.rule(), updates.clone())?;
                PolicyStep::Async(if data.size() == mesh.world().size() { step } else { step.among(mesh.world()) })
            }
        })
    }
}

/// The mesh without its data axis: the ranks that take steps together between two synchronizations.
#[track_caller]
fn replica<R: Runtime>(mesh: &Mesh<R>) -> Result<Mesh<R>> {
    let axes = [Axis::Pipe, Axis::Shard, Axis::Context, Axis::Tensor];
    let sizes = axes.into_iter().chain([Axis::Expert]).map(|axis| (axis, mesh.plan().size(axis)));
    Mesh::new(&mesh.group(&axes)?, ParallelPlan::of(sizes.collect::<Vec<_>>())?)
}

impl<R: Runtime> PolicyStep<R> {
    /// The training step within the policy, with optimizer and gradients.
    pub fn inner(&self) -> &TrainStep<R> {
        match self {
            PolicyStep::Sync(step) => step,
            PolicyStep::Cadence(step) => step.inner(),
            PolicyStep::Async(step) => step.inner(),
        }
    }

    /// The training step within the policy, mutably: for schedules.
    pub fn inner_mut(&mut self) -> &mut TrainStep<R> {
        match self {
            PolicyStep::Sync(step) => step,
            PolicyStep::Cadence(step) => step.inner_mut(),
            PolicyStep::Async(step) => step.inner_mut(),
        }
    }

    fn get(&self) -> &dyn Step<R> {
        match self {
            PolicyStep::Sync(step) => step,
            PolicyStep::Cadence(step) => step,
            PolicyStep::Async(step) => step,
        }
    }

    fn get_mut(&mut self) -> &mut dyn Step<R> {
        match self {
            PolicyStep::Sync(step) => step,
            PolicyStep::Cadence(step) => step,
            PolicyStep::Async(step) => step,
        }
    }
}

impl<R: Runtime> Checkpointed<R> for PolicyStep<R> {
    checkpointed_by!(self => self.get(), self.get_mut());
}

impl<R: Runtime> Step<R> for PolicyStep<R> {
    fn ranks(&self) -> &StepRanks<R> {
        self.get().ranks()
    }

    fn accumulation(&self) -> usize {
        self.get().accumulation()
    }

    fn global_step(&self) -> u64 {
        self.get().global_step()
    }

    fn learning_rate(&self) -> f64 {
        self.get().learning_rate()
    }

    fn step(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        self.get_mut().step(work)
    }

    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum> {
        self.get_mut().evaluate(input)
    }

    fn properties(&self) -> StepProperties {
        self.get().properties()
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        self.get().modules()
    }
}
