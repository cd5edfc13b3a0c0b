//! The ranks of a parallel plan with their communicators.

use std::sync::Arc;

use numcore::{Error, Result, Runtime};

use crate::{
    comm::{Collectives, Comm, Communicator, NoOpCommunicator},
    plan::{Axis, ParallelPlan},
};

/// A plan with its communicators, seen from one rank.
#[derive(Clone, Debug)]
#[doc(alias("DeviceMesh"))]
pub struct Mesh<R: Runtime> {
    plan: ParallelPlan,
    world: Comm<R>,
    axes: Vec<Comm<R>>,
    batch: Comm<R>,
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
        let group = |axes: &[Axis]| {
            let group = world.split(Some(plan.color(axes, world.rank())), world.rank())?;
            group.ok_or_else(|| Error::internal("Mesh", "the communicator gave no group"))
        };
        let axes = Axis::ALL.iter().map(|&a| group(&[a])).collect::<Result<_>>()?;
        let batch = group(&[Axis::Data, Axis::Shard])?;
        Ok(Mesh { plan, world: world.clone(), axes, batch, is_communicator: false })
    }

    /// A communicator as a mesh of one axis, [`Axis::Data`]. Nothing is exchanged.
    pub fn of(comm: &Comm<R>) -> Self {
        let alone: Comm<R> = Arc::new(NoOpCommunicator::new(comm.runtime()));
        let axes = Axis::ALL.map(|axis| if axis == Axis::Data { comm.clone() } else { alone.clone() });
        let (plan, axes) = (ParallelPlan::along(Axis::Data, comm.size()), axes.to_vec());
        Mesh { plan, world: comm.clone(), axes, batch: comm.clone(), is_communicator: true }
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

    /// The ranks among which a batch is shared out: those along data and shard.
    pub fn batch(&self) -> &Comm<R> {
        &self.batch
    }

    /// Whether nobody has planned it: it is a communicator, so a pipeline may lay its replicas over it.
    pub(crate) fn is_communicator(&self) -> bool {
        self.is_communicator
    }
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
