//! A world of several replicas of one pipeline.

use numcore::{Error, Result, Runtime};

use crate::{
    comm::{Collectives, Comm, Communicator, all_ok},
    plan::{Axis, Mesh},
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
    /// Replicas of a pipeline of `ranks` ranks: rank `r` of the world is rank `r % ranks` of replica `r / ranks`. Blocks.
    ///
    /// # Errors
    /// When the world cannot be cut into such pipelines.
    pub fn new(world: &Comm<R>, ranks: usize) -> Result<Self> {
        let (rank, size) = (world.rank(), world.size());
        let fits = if ranks > 0 && size.is_multiple_of(ranks) {
            Ok(())
        } else {
            let why = format!("the schedule is for {ranks} ranks: {size} ranks are no whole number of such pipelines");
            Err(Error::argument("pipeline groups", why))
        };
        all_ok(world, "pipeline groups", fits)?;
        let no_group = || Error::argument("pipeline groups", "the communicator gave no group");
        let pipe = world.split(Some(rank / ranks), rank % ranks)?.ok_or_else(no_group)?;
        let data = world.split(Some(rank % ranks), rank / ranks)?.ok_or_else(no_group)?;
        Ok(PipelineGroups { world: world.clone(), pipe, data })
    }

    /// Those of a mesh along whose pipe axis there are `ranks` ranks.
    ///
    /// # Errors
    /// When there are not so many.
    pub fn of(mesh: &Mesh<R>, ranks: usize) -> Result<Self> {
        if mesh.plan().size(Axis::Pipe) != ranks {
            let why = format!("the schedule is for {ranks} ranks, the mesh is {}", mesh.plan());
            return Err(Error::argument("pipeline groups", why).on_rank(mesh.world().world_rank()));
        }
        let (world, pipe, data) = (mesh.world().clone(), mesh.axis(Axis::Pipe).clone(), mesh.batch().clone());
        Ok(PipelineGroups { world, pipe, data })
    }
}

/// What replicas of a pipeline are spread over.
pub(super) enum Over<'a, R: Runtime> {
    /// A world, one pipeline after another.
    World(&'a Comm<R>),
    /// A mesh, along its pipe axis.
    Mesh(&'a Mesh<R>),
}

impl<R: Runtime> Over<'_, R> {
    /// All ranks.
    pub(super) fn world(&self) -> &Comm<R> {
        match self {
            Over::World(world) => world,
            Over::Mesh(mesh) => mesh.world(),
        }
    }

    /// The groups for a pipeline of so many ranks. Blocks.
    pub(super) fn groups(&self, ranks: usize) -> Result<PipelineGroups<R>> {
        match self {
            Over::World(world) => PipelineGroups::new(world, ranks),
            Over::Mesh(mesh) => PipelineGroups::of(mesh, ranks),
        }
    }
}
