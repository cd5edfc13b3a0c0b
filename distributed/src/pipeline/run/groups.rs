//! A world of several replicas of one pipeline.

use numcore::{Error, Result, Runtime};

use crate::{
    comm::{Collectives, Comm, Communicator, all_ok},
    mesh::{AsMesh, Mesh},
    plan::Axis,
};

/// The groups a rank is in.
pub struct PipelineGroups<R: Runtime> {
    /// All ranks.
    pub world: Comm<R>,
    /// The ranks of this rank's replica of the pipeline.
    pub pipe: Comm<R>,
    /// The ranks that have the same stages, one in each replica.
    pub data: Comm<R>,
}

impl<R: Runtime> PipelineGroups<R> {
    /// The groups of a pipeline of `ranks` ranks. On a mesh, stages are along its pipe axis, and replicas along data and shard. A communicator
    /// is cut into replicas: its rank `r` is rank `r % ranks` of replica `r / ranks`. Blocks.
    ///
    /// # Errors
    /// When the mesh has another number of ranks along its pipe axis, or the communicator cannot be cut into such pipelines.
    #[track_caller]
    pub fn new(mesh: &impl AsMesh<R>, ranks: usize) -> Result<Self> {
        let mesh = mesh.as_mesh();
        if mesh.is_communicator() { Self::of_world(mesh.world(), ranks) } else { Self::of_mesh(&mesh, ranks) }
    }

    #[track_caller]
    fn of_world(world: &Comm<R>, ranks: usize) -> Result<Self> {
        let (rank, size) = (world.rank(), world.size());
        let fits = if ranks > 0 && size.is_multiple_of(ranks) {
            Ok(())
        } else {
            let why = format!("the schedule is for {ranks} ranks: {size} ranks are no whole number of such pipelines");
            Err(Error::argument("pipeline groups", why))
        };
        all_ok(world, "pipeline groups", fits)?;
        let no_group = || Error::internal("pipeline groups", "the communicator gave no group");
        let pipe = world.split(Some(rank / ranks), rank % ranks)?.ok_or_else(no_group)?;
        let data = world.split(Some(rank % ranks), rank / ranks)?.ok_or_else(no_group)?;
        Ok(PipelineGroups { world: world.clone(), pipe, data })
    }

    fn of_mesh(mesh: &Mesh<R>, ranks: usize) -> Result<Self> {
        if mesh.plan().size(Axis::Pipe) != ranks {
            let why = format!("the schedule is for {ranks} ranks, the mesh is {}", mesh.plan());
            return Err(Error::argument("pipeline groups", why).on_rank(mesh.world().world_rank()));
        }
        if let Some(axis) = [Axis::Context, Axis::Tensor].into_iter().find(|&axis| mesh.plan().size(axis) > 1) {
            let why =
                format!("stages of a pipeline are not cut along {} yet, the mesh is {}", axis.name(), mesh.plan());
            return Err(Error::argument("pipeline groups", why).on_rank(mesh.world().world_rank()));
        }
        let (world, pipe, data) = (mesh.world().clone(), mesh.axis(Axis::Pipe).clone(), mesh.batch().clone());
        Ok(PipelineGroups { world, pipe, data })
    }

    /// The mesh of the replicas of one stage.
    pub(super) fn stage_mesh(&self, mesh: &Mesh<R>) -> Mesh<R> {
        if mesh.is_communicator() { Mesh::of(&self.data) } else { mesh.clone() }
    }
}
