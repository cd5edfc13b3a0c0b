//! A world of several replicas of one pipeline.

use numcore::{Error, Result, Runtime};

use crate::comm::{Collectives, Comm, unanimous};

/// The groups a rank is in. Rank `r` of the world is rank `r % p` of replica `r / p`, where `p` is the number of ranks of the pipeline.
pub struct Groups<R: Runtime> {
    /// All ranks.
    pub world: Comm<R>,
    /// The ranks of this rank's replica of the pipeline.
    pub pipe: Comm<R>,
    /// The ranks that have the same stages, one in each replica.
    pub data: Comm<R>,
}

impl<R: Runtime> Groups<R> {
    /// Replicas of a pipeline of `ranks` ranks. Blocks.
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
        unanimous(world, "pipeline groups", fits)?;
        let no_group = || Error::argument("pipeline groups", "the communicator gave no group");
        let pipe = world.split(Some(rank / ranks), rank % ranks)?.ok_or_else(no_group)?;
        let data = world.split(Some(rank % ranks), rank / ranks)?.ok_or_else(no_group)?;
        Ok(Groups { world: world.clone(), pipe, data })
    }
}
