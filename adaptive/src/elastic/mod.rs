//! Elastic training: ranks are lost and others join, and the run goes on.
//!
//! At intervals the ranks *commit*: each copies its part of a checkpoint to host memory. So do its neighbours
//! ([`Elastic::copies`]), so that the part survives a lost rank. When a rank is lost, the communicator is dead. The
//! survivors [meet](distributed::comm::Rendezvous) in a new world, build model and step over it, and restore the last
//! commit. Each reads the elements of its new pieces, as from a checkpoint of another number of ranks. A newcomer joins
//! after a commit, in the same way.
//!
//! An error that names another rank makes this rank meet the others again. With any other error, its own, it leaves.
//!
//! **Invariants**: ranks drop a commit only once all have the next one, with its copies. All ranks restore the same
//! commit: of those with all pieces present, the one of the highest generation, and the last in it. A run that has
//! committed never restarts from its beginning: if the commit is lost, going on is an error.

mod restore;
mod run;
mod store;
mod world;

pub use restore::Restored;
pub use run::Elastic;
pub use world::ElasticWorld;
