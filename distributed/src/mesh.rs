//! The ranks of a parallel plan with their communicators.

use std::{collections::BTreeMap, panic::Location, sync::Arc};

use nn::{
    Module, ModuleExt,
    parallel::{ContextRoles, ExpertGroups, TensorPlan, cut_sequences_of_part},
};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use crate::{
    comm::{Collectives, Comm, Communicator, NoOpCommunicator, abort_on_err, all_ok},
    context_parallel::{ContextExchange, ContextRanks},
    plan::{Axis, ParallelPlan},
    tensor_parallel::TensorRanks,
};

/// A parallel plan with its communicators, seen from one rank.
#[derive(Clone, Debug)]
#[doc(alias("DeviceMesh"))]
pub struct Mesh<R: Runtime> {
    plan: ParallelPlan,
    world: Comm<R>,
    axes: Vec<Comm<R>>,
    batch: Comm<R>,
    gradients: Comm<R>,
    /// Groups along several axes. Each is made at the first request.
    products: Arc<Mutex<BTreeMap<Vec<Axis>, Comm<R>>>>,
    role: MeshRole,
}

/// The use of a mesh.
#[derive(Clone, Copy, Debug, Default)]
struct MeshRole {
    /// True for a mesh that a communicator stands for.
    is_communicator: bool,
    /// True for the mesh of experts, in which ranks along tensor read different data and have different experts.
    of_experts: bool,
    /// True for the mesh of a pipeline's stages, whose passes come in turn.
    of_stages: bool,
}

impl<R: Runtime> Mesh<R> {
    /// Makes the groups of `plan`. Every rank of `world` calls this.
    ///
    /// # Errors
    /// Fails unless the plan has as many ranks as `world`, and is equal on all of them.
    #[track_caller]
    pub fn new(world: &Comm<R>, plan: ParallelPlan) -> Result<Self> {
        if plan.world() != world.size() {
            let why = format!("the plan is of {} ranks, the communicator has {}", plan.world(), world.size());
            return Err(Error::config("Mesh", "plan", why));
        }
        world.agree("the parallel plan", plan.to_string().as_bytes())?;
        let mut axes = Axis::ALL.iter().map(|&a| split(world, &plan, &[a])).collect::<Result<Vec<_>>>()?;
        axes.push(match plan.size(Axis::Expert) {
            1 => Arc::new(NoOpCommunicator::new(world.runtime())),
            _ => split(world, &plan, &[Axis::Expert])?,
        });
        let batch = split(world, &plan, &Axis::EXAMPLES)?;
        let gradients = match plan.size(Axis::Context) {
            1 => batch.clone(),
            _ => split(world, &plan, &Axis::GRADIENTS)?,
        };
        let (world, products) = (world.clone(), Arc::default());
        Ok(Mesh { plan, world, axes, batch, gradients, products, role: MeshRole::default() })
    }

    /// The ranks of [`gradients`](Mesh::gradients), arranged for experts: copies of an expert along data and shard,
    /// different experts along tensor. Every rank calls this.
    #[track_caller]
    pub(crate) fn of_experts(&self) -> Result<Self> {
        let experts = Mesh::new(&self.gradients, self.plan.of_experts())?;
        Ok(Mesh { role: MeshRole { is_communicator: false, of_experts: true, ..self.role }, ..experts })
    }

    /// Tells whether this is a mesh [of experts](Mesh::of_experts).
    pub(crate) fn is_of_experts(&self) -> bool {
        self.role.of_experts
    }

    /// The mesh as that of each of a pipeline's stages.
    pub(crate) fn of_stages(self) -> Self {
        Mesh { role: MeshRole { of_stages: true, ..self.role }, ..self }
    }

    /// Tells whether this is a mesh [of stages](Mesh::of_stages). Strategies of several stages share its ranks, and a
    /// pass of one may come between two of another.
    pub(crate) fn is_of_stages(&self) -> bool {
        self.role.of_stages
    }

    /// Makes a mesh of one axis, [`Axis::Data`], from a communicator. Nothing is exchanged.
    pub fn of(comm: &Comm<R>) -> Self {
        let alone: Comm<R> = Arc::new(NoOpCommunicator::new(comm.runtime()));
        let axes = Axis::ALL.into_iter().chain([Axis::Expert]);
        let axes = axes.map(|axis| if axis == Axis::Data { comm.clone() } else { alone.clone() }).collect();
        let (plan, products) = (ParallelPlan::along(Axis::Data, comm.size()), Arc::default());
        let [world, batch, gradients] = [comm, comm, comm].map(Comm::clone);
        let role = MeshRole { is_communicator: true, ..MeshRole::default() };
        Mesh { plan, world, axes, batch, gradients, products, role }
    }

    /// The sizes of the axes.
    pub fn plan(&self) -> &ParallelPlan {
        &self.plan
    }

    /// All ranks.
    pub fn world(&self) -> &Comm<R> {
        &self.world
    }

    /// The ranks along an axis.
    pub fn axis(&self, axis: Axis) -> &Comm<R> {
        &self.axes[axis as usize]
    }

    /// The ranks along several axes together. The group is made at the first request, so all ranks must make that
    /// request at the same point of the program.
    ///
    /// # Errors
    /// Fails if `Axis::Expert` is combined with another axis of several ranks.
    #[track_caller]
    pub fn group(&self, axes: &[Axis]) -> Result<Comm<R>> {
        let key = self.several(axes);
        if key.len() > 1 && key.contains(&Axis::Expert) {
            let why = "the expert axis is laid over data, shard and context, and makes no groups with others: ask for it alone, or for those";
            return Err(Error::unsupported("Mesh::group", why).on_rank(self.world.world_rank()));
        }
        match key[..] {
            [Axis::Expert] => return Ok(self.axis(Axis::Expert).clone()),
            _ if key.iter().map(|&axis| self.plan.size(axis)).product::<usize>() == self.plan.world() => {
                return Ok(self.world.clone());
            }
            [] => return Ok(self.axes[axes.first().map_or(0, |&axis| axis as usize)].clone()),
            [axis] => return Ok(self.axis(axis).clone()),
            _ if key == self.several(&Axis::EXAMPLES) => return Ok(self.batch.clone()),
            _ => {}
        }
        if let Some(known) = self.products.lock().get(&key) {
            return Ok(known.clone());
        }
        let made = split(&self.world, &self.plan, &key)?;
        self.products.lock().insert(key, made.clone());
        Ok(made)
    }

    /// The axes of several ranks among `axes`, each once, in order.
    fn several(&self, axes: &[Axis]) -> Vec<Axis> {
        let mut key: Vec<Axis> = axes.iter().copied().filter(|&axis| self.plan.size(axis) > 1).collect();
        key.sort_unstable();
        key.dedup();
        key
    }

    /// Cuts layers over the ranks along the tensor axis, and shares out experts among those along the expert axis, by a
    /// plan. Each rank keeps its pieces of the parameters, and layers exchange the values they need. Results are those
    /// of the unsharded model. Every rank calls it, before optimizers and training steps are made.
    ///
    /// In a pipeline each rank gives its stages:
    /// [`PipelineModel::parallelize`](crate::pipeline::PipelineModel::parallelize).
    ///
    /// A model that no rank is to hold in full is made with [`Init::lazily`](nn::Init::lazily): each rank then draws
    /// its pieces alone.
    ///
    /// # Errors
    /// On every rank, in this call or its next, unless all ranks along these axes have the same model and plan. Errors
    /// of [`TensorPlan::apply`] as well.
    #[doc(alias("parallelize_module"))]
    #[track_caller]
    pub fn parallelize(&self, model: &(impl Module<R> + ?Sized), plan: &TensorPlan) -> Result<()> {
        // Ranks of other stages and replicas wait for this one, not along the axes whose ranks differ.
        abort_on_err(&self.world, self.cut(model, plan))
    }

    #[track_caller]
    fn cut(&self, model: &(impl Module<R> + ?Sized), plan: &TensorPlan) -> Result<()> {
        let (comm, experts) = (self.axis(Axis::Tensor), self.axis(Axis::Expert));
        for comm in [comm, experts].into_iter().filter(|comm| comm.size() > 1) {
            let model = described_parameters(model);
            comm.agree("the model and its tensor-parallel plan", format!("{plan:?}\n{model}").as_bytes())?;
        }
        let found = self.found_along_pipe(model, plan)?;
        // Ranks of their own: the exchanges of a recomputed mixture do not come between gradients, whose order is
        // another on each rank.
        let examples = match plan.has_experts() && self.gradients.size() > 1 {
            true => split(&self.world, &self.plan, &Axis::GRADIENTS)?,
            false => self.gradients.clone(),
        };
        let experts = ExpertGroups { experts: TensorRanks::group(experts), examples: TensorRanks::group(&examples) };
        let applied = plan.apply_to_part(model, &TensorRanks::group(comm), Some(&experts), &found);
        match self.axis(Axis::Pipe) {
            pipe if pipe.size() > 1 => all_ok(pipe, "parallelize", applied),
            _ => applied,
        }
    }

    /// One `bool` for each pattern of a plan: true if it names something in a model of which each rank along pipe has
    /// its part.
    fn found_along_pipe(&self, model: &(impl Module<R> + ?Sized), plan: &TensorPlan) -> Result<Vec<bool>> {
        let (own, pipe) = (plan.found_in(model), self.axis(Axis::Pipe));
        if pipe.size() == 1 {
            return Ok(own);
        }
        pipe.agree("the tensor-parallel plan", format!("{plan:?}").as_bytes())?;
        let all = pipe.exchange(&own.iter().map(|&found| u8::from(found)).collect::<Vec<_>>())?;
        Ok((0..own.len()).map(|k| all.iter().any(|part| part.get(k) == Some(&1))).collect())
    }

    /// Cuts the sequences of a model over the ranks along the context axis. Each rank computes its part of the tokens
    /// with all parameters, and attention sees the keys of all ranks by `exchange`. The model's input is whole
    /// sequences, as on one rank, and its loss stands for them. Every rank calls it.
    ///
    /// In a pipeline each rank gives its stages:
    /// [`PipelineModel::context_parallel`](crate::pipeline::PipelineModel::context_parallel).
    ///
    /// # Errors
    /// On every rank along the axis, unless all have the same model and exchange. Errors of
    /// [`cut_sequences`](nn::parallel::cut_sequences) as well.
    #[track_caller]
    pub fn context_parallel(&self, model: &(impl Module<R> + ?Sized), exchange: ContextExchange) -> Result<()> {
        let comm = self.axis(Axis::Context);
        if comm.size() > 1 {
            let model = described_parameters(model);
            comm.agree("the model and its context exchange", format!("{exchange:?}\n{model}").as_bytes())?;
        }
        let all = self.roles_along_pipe(ContextRoles::of(model), exchange)?;
        let cut = cut_sequences_of_part(model, &ContextRanks::group(comm, exchange), all);
        match self.axis(Axis::Pipe) {
            pipe if pipe.size() > 1 => all_ok(pipe, "context_parallel", cut),
            _ => cut.map_err(|error| error.on_rank(self.world.world_rank())),
        }
    }

    /// The roles of places in a model of which each rank along pipe has its part.
    fn roles_along_pipe(&self, own: ContextRoles, exchange: ContextExchange) -> Result<ContextRoles> {
        let pipe = self.axis(Axis::Pipe);
        pipe.agree("the context exchange", format!("{exchange:?}").as_bytes())?;
        let all = pipe.exchange_equal([u8::from(own.cuts), u8::from(own.attends)])?;
        let any = |k: usize| all.iter().any(|roles| roles[k] == 1);
        Ok(ContextRoles { cuts: any(0), attends: any(1) })
    }

    /// The ranks among which a batch is shared out: those along data and shard.
    pub fn batch(&self) -> &Comm<R> {
        &self.batch
    }

    /// The ranks over which gradients and losses are summed: those along data, shard and context.
    pub fn gradients(&self) -> &Comm<R> {
        &self.gradients
    }

    /// Tells whether the mesh was made from a communicator, without a plan. A pipeline may lay its replicas over it.
    pub(crate) fn is_communicator(&self) -> bool {
        self.role.is_communicator
    }
}

/// A description of a model, a line for each parameter.
fn described_parameters<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> String {
    let line = |(name, p): (String, nn::Param<R>)| format!("{name} {} {}\n", p.dtype(), p.shape());
    model.named_parameters().into_iter().map(line).collect()
}

#[track_caller]
fn split<R: Runtime>(world: &Comm<R>, plan: &ParallelPlan, axes: &[Axis]) -> Result<Comm<R>> {
    let group = world.split_by(&|rank| plan.color(axes, rank), Location::caller())?;
    group.ok_or_else(|| Error::internal("Mesh", "the communicator gave no group"))
}

/// The ranks of a training: a [`Mesh`], a communicator (a mesh of one axis), or a runtime (a mesh of one rank).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no mesh of ranks",
    label = "give a `Mesh`, a `Comm`, or the runtime to train on one rank"
)]
pub trait AsMesh<R: Runtime> {
    /// The mesh. Nothing is exchanged.
    fn as_mesh(&self) -> Mesh<R>;
}

impl<R: Runtime> AsMesh<R> for Mesh<R> {
    fn as_mesh(&self) -> Mesh<R> {
        self.clone()
    }
}

impl<R: Runtime> AsMesh<R> for Comm<R> {
    fn as_mesh(&self) -> Mesh<R> {
        Mesh::of(self)
    }
}

impl<R: Runtime> AsMesh<R> for NoOpCommunicator<R> {
    fn as_mesh(&self) -> Mesh<R> {
        Mesh::of(&(Arc::new(self.clone()) as Comm<R>))
    }
}

/// A runtime is a mesh of one rank.
impl<R: Runtime> AsMesh<R> for R {
    fn as_mesh(&self) -> Mesh<R> {
        NoOpCommunicator::new(self).as_mesh()
    }
}
