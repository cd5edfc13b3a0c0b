//! Synchronization of the ranks of one process: locks, threads, queues between them, time. They are in one place, so
//! that a test can put a scheduler under them that tries many orders of events (`tests/explore`).

use std::{io, thread::Builder};
pub(crate) use std::{
    sync::mpsc,
    thread::{Scope, ScopedJoinHandle, scope},
    time::Instant,
};

pub(crate) use parking_lot::{Condvar, Mutex};

/// Starts a detached thread.
pub(crate) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    Builder::new().name(name).spawn(run).map(|_| ())
}

/// Starts a thread in a scope.
pub(crate) fn spawn_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: String,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name).spawn_scoped(scope, run)
}
