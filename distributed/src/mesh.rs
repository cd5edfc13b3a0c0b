//! The ranks of a parallel plan with their communicators.

use std::{collections::BTreeMap, sync::Arc};

use nn::{
    Module, ModuleExt,
    parallel::{TensorPlan, cut_sequences},
};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use crate::{
    agreement::agree_on_lines,
    comm::{Collectives, Comm, Communicator, NoOpCommunicator},
    context_parallel::{ContextExchange, ContextRanks},
    plan::{Axis, ParallelPlan},
    tensor_parallel::TensorRanks,
};

/// A plan with its communicators, seen from one rank.
#[derive(Clone, Debug)]
#[doc(alias("DeviceMesh"))]
pub struct Mesh<R: Runtime> {
    plan: ParallelPlan,
    world: Comm<R>,
    axes: Vec<Comm<R>>,
    batch: Comm<R>,
    gradients: Comm<R>,
    /// Groups along several axes, made when they are first asked for.
    products: Arc<Mutex<BTreeMap<Vec<Axis>, Comm<R>>>>,
    is_communicator: bool,
}

impl<R: Runtime> Mesh<R> {
    /// The groups of `plan`. Every rank of `world` calls this.
    #[track_caller]
    pub fn new(world: &Comm<R>, plan: ParallelPlan) -> Result<Self> {
        if plan.world() != world.size() {
            let why = format!("the plan is of {} ranks, the communicator has {}", plan.world(), world.size());
            return Err(Error::config("Mesh", "plan", why));
        }
        world.agree("the parallel plan", plan.to_string().as_bytes())?;
        let axes = Axis::ALL.iter().map(|&a| split(world, &plan, &[a])).collect::<Result<_>>()?;
        let batch = split(world, &plan, &[Axis::Data, Axis::Shard])?;
        let gradients = match plan.size(Axis::Context) {
            1 => batch.clone(),
            _ => split(world, &plan, &[Axis::Data, Axis::Shard, Axis::Context])?,
        };
        let (world, products) = (world.clone(), Arc::default());
        Ok(Mesh { plan, world, axes, batch, gradients, products, is_communicator: false })
    }

    /// A communicator as a mesh of one axis, [`Axis::Data`]. Nothing is exchanged.
    pub fn of(comm: &Comm<R>) -> Self {
        let alone: Comm<R> = Arc::new(NoOpCommunicator::new(comm.runtime()));
        let axes = Axis::ALL.map(|axis| if axis == Axis::Data { comm.clone() } else { alone.clone() });
        let (plan, axes) = (ParallelPlan::along(Axis::Data, comm.size()), axes.to_vec());
        let [world, batch, gradients] = [comm, comm, comm].map(Comm::clone);
        Mesh { plan, world, axes, batch, gradients, products: Arc::default(), is_communicator: true }
    }

    /// The arrangement.
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

    /// The ranks along several axes together. A group is made when it is first asked for: all ranks ask for it at the same point of the
    /// program then.
    #[track_caller]
    pub fn group(&self, axes: &[Axis]) -> Result<Comm<R>> {
        let mut key: Vec<Axis> = axes.iter().copied().filter(|&axis| self.plan.size(axis) > 1).collect();
        key.sort_unstable();
        key.dedup();
        match key[..] {
            _ if key.iter().map(|&axis| self.plan.size(axis)).product::<usize>() == self.plan.world() => {
                return Ok(self.world.clone());
            }
            [] => return Ok(self.axes[axes.first().map_or(0, |&axis| axis as usize)].clone()),
            [axis] => return Ok(self.axis(axis).clone()),
            [Axis::Data, Axis::Shard] => return Ok(self.batch.clone()),
            _ => {}
        }
        if let Some(known) = self.products.lock().get(&key) {
            return Ok(known.clone());
        }
        let made = split(&self.world, &self.plan, &key)?;
        self.products.lock().insert(key, made.clone());
        Ok(made)
    }

    /// Cuts a model over the ranks along the tensor axis, as a plan says: each rank keeps its pieces of the parameters, and layers exchange
    /// what they need. Values are those of the whole model. Every rank calls it, before optimizers and trainers are made.
    ///
    /// A model that no rank is to hold in full is made of [`Init::lazily`](nn::Init::lazily): each rank then draws its pieces alone.
    ///
    /// # Errors
    /// On every rank along the axis, unless all have the same model and plan; and as [`TensorPlan::apply`] says.
    #[doc(alias = "parallelize_module")]
    #[track_caller]
    pub fn parallelize(&self, model: &(impl Module<R> + ?Sized), plan: &TensorPlan) -> Result<()> {
        let comm = self.axis(Axis::Tensor);
        if comm.size() > 1 {
            let model = described_parameters(model);
            agree_on_lines(comm, "the model and its tensor-parallel plan", &format!("{plan:?}\n{model}"))?;
        }
        plan.apply(model, &TensorRanks::group(comm)).map_err(|error| error.on_rank(self.world.world_rank()))
    }

    /// Cuts the sequences of a model over the ranks along the context axis: each computes on its part of the tokens, with all of the
    /// parameters, and attention sees the keys of all ranks by `exchange`. The model is given whole sequences, as on one rank, and its loss
    /// stands for them. Every rank calls it.
    ///
    /// # Errors
    /// On every rank along the axis, unless all have the same model and exchange; and as [`cut_sequences`] says.
    #[track_caller]
    pub fn context_parallel(&self, model: &(impl Module<R> + ?Sized), exchange: ContextExchange) -> Result<()> {
        let comm = self.axis(Axis::Context);
        if comm.size() > 1 {
            let model = described_parameters(model);
            agree_on_lines(comm, "the model and its context exchange", &format!("{exchange:?}\n{model}"))?;
        }
        let cut = cut_sequences(model, &ContextRanks::group(comm, exchange));
        cut.map_err(|error| error.on_rank(self.world.world_rank()))
    }

    /// The ranks among which a batch is shared out: those along data and shard.
    pub fn batch(&self) -> &Comm<R> {
        &self.batch
    }

    /// The ranks over which gradients and losses are summed: those along data, shard and context.
    pub fn gradients(&self) -> &Comm<R> {
        &self.gradients
    }

    /// Whether nobody has planned it: it is a communicator, so a pipeline may lay its replicas over it.
    pub(crate) fn is_communicator(&self) -> bool {
        self.is_communicator
    }
}

/// A model in a line for each parameter.
fn described_parameters<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> String {
    let line = |(name, p): (String, nn::Param<R>)| format!("{name} {} {}\n", p.dtype(), p.shape());
    model.named_parameters().into_iter().map(line).collect()
}

#[track_caller]
fn split<R: Runtime>(world: &Comm<R>, plan: &ParallelPlan, axes: &[Axis]) -> Result<Comm<R>> {
    let group = world.split(Some(plan.color(axes, world.rank())), world.rank())?;
    group.ok_or_else(|| Error::internal("Mesh", "the communicator gave no group"))
}

/// Whatever ranks can train over: a [`Mesh`], or a communicator, which is a mesh of one axis.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no mesh of ranks",
    label = "give a `Mesh`, a `Comm`, or a `NoOpCommunicator` to train on one rank"
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

impl<R: Runtime, M: AsMesh<R> + ?Sized> AsMesh<R> for &M {
    fn as_mesh(&self) -> Mesh<R> {
        (**self).as_mesh()
    }
}
