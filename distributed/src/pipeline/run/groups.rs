//! A world of several replicas of one pipeline.

use numcore::{Error, Result, Runtime};

use crate::{
    comm::{Collectives, Comm, Communicator, all_ok},
    mesh::{AsMesh, Mesh},
    plan::Axis,
};

/// The groups of ranks that one rank is in.
pub struct PipelineGroups<R: Runtime> {
    /// All ranks.
    pub world: Comm<R>,
    /// The ranks of this rank's replica of the pipeline. Along tensor and context they have this rank's position.
    pub pipe: Comm<R>,
    /// The ranks that have the same stages, or the same pieces of them, one in each replica.
    pub data: Comm<R>,
    /// The ranks whose losses together are those of a step. Ranks along tensor have equal losses, so only those at this
    /// rank's position along tensor are included.
    pub losses: Comm<R>,
    /// This rank's position along tensor.
    pub(crate) tensor_rank: usize,
    /// The number of ranks that have parts of the same sequences.
    pub(crate) context_ranks: usize,
    /// The number of this rank's random stream. Ranks that have parts of the same sequences, or pieces of the same
    /// layers, draw from the same stream.
    pub(crate) random_stream: usize,
}

impl<R: Runtime> PipelineGroups<R> {
    /// Makes the groups of a pipeline of `ranks` ranks. Blocks.
    ///
    /// On a mesh, stages are along pipe, replicas along data and shard, parts of sequences along context, and pieces of
    /// layers along tensor. A communicator is cut into replicas: its rank `r` is rank `r % ranks` of replica
    /// `r / ranks`.
    ///
    /// # Errors
    /// Fails if the mesh has another number of ranks along its pipe axis, or the communicator cannot be cut into such
    /// pipelines.
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
            Err(Error::schedule("pipeline groups", why))
        };
        all_ok(world, "pipeline groups", fits)?;
        let no_group = || Error::internal("pipeline groups", "the communicator gave no group");
        let pipe = world.split(Some(rank / ranks), rank % ranks)?.ok_or_else(no_group)?;
        let data = world.split(Some(rank % ranks), rank / ranks)?.ok_or_else(no_group)?;
        let losses = world.clone();
        Ok(PipelineGroups {
            world: losses.clone(),
            pipe,
            data,
            losses,
            tensor_rank: 0,
            context_ranks: 1,
            random_stream: rank,
        })
    }

    fn of_mesh(mesh: &Mesh<R>, ranks: usize) -> Result<Self> {
        if mesh.plan().size(Axis::Pipe) != ranks {
            let why = format!("the schedule is for {ranks} ranks, the mesh is {}", mesh.plan());
            return Err(Error::schedule("pipeline groups", why).on_rank(mesh.world().world_rank()));
        }
        let (world, pipe, data) = (mesh.world().clone(), mesh.axis(Axis::Pipe).clone(), mesh.batch().clone());
        let losses = mesh.group(&[&[Axis::Pipe][..], &Axis::GRADIENTS].concat())?;
        // Made by all ranks together at this point: ranks of different stages request it at different moments.
        mesh.group(Axis::STEP)?;
        let context_ranks = mesh.plan().size(Axis::Context);
        // Context is the innermost of the axes of `losses`.
        let random_stream = losses.rank() / context_ranks;
        let tensor_rank = mesh.axis(Axis::Tensor).rank();
        Ok(PipelineGroups { world, pipe, data, losses, tensor_rank, context_ranks, random_stream })
    }

    /// The mesh of the replicas of one stage.
    pub(crate) fn stage_mesh(&self, mesh: &Mesh<R>) -> Mesh<R> {
        if mesh.is_communicator() { Mesh::of(&self.data) } else { mesh.clone() }.of_stages()
    }
}
