//! The processes that run these tests together: those that `mpirun` has started.

/// What names of files that they share begin with: all have one parent.
pub fn id() -> u32 {
    std::os::unix::process::parent_id()
}

/// Returns when all of them have come here.
pub fn meet() {
    crate::ranks::meet();
}

/// What a rank's program may give out: other processes are told it.
pub use crate::comm::engine::Portable as Answer;
