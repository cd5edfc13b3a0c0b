//! Compilation of many kernels on all processors.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use parking_lot::Mutex;
use runtime_cuda::driver::Fallible;

/// Calls `work` with every item, on all processors. An item that fails does not keep the others from theirs; the last
/// failure is returned.
pub(crate) fn for_each<T: Sync>(items: &[T], work: impl Fn(&T) -> Fallible<()> + Sync) -> Fallible<()> {
    let workers = thread::available_parallelism().map_or(1, |n| n.get()).min(items.len());
    let (next, outcome) = (AtomicUsize::new(0), Mutex::new(Ok(())));
    let worker = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item).unwrap_or_else(|e| *outcome.lock() = Err(e));
        }
    };
    thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(worker))));
    outcome.into_inner()
}
