//! Elastic ranks: ranks are lost and others come, and the run goes on.
//!
//! Every so often the ranks *commit*: each copies what it saves to host memory, and so do its neighbours ([`Elastic::copies`]), so that what
//! a lost rank had is still there. When a rank is lost, the communicator is dead, and those that are left [meet](crate::comm::Rendezvous) in a world of their
//! own, build model and step anew over it, and take up the last commit: each reads the elements that its new pieces are made of, as from a checkpoint
//! that another number of ranks has saved. A newcomer is taken in after a commit, in the same way.
//!
//! An error that names another rank means: meet again. Any other is the rank's own, and it leaves.
//!
//! **Invariants**: a commit is given up only once all ranks have the next one, with its copies. Of the commits whose pieces are all there the one with the
//! highest generation, and in it the last, is taken up, by all ranks. A run that has committed something never begins anew: where that is lost, going on is an error.

mod restore;
mod run;
mod store;
mod world;

pub use restore::Restored;
pub use run::Elastic;
pub use world::ElasticWorld;
