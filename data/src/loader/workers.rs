//! Threads that make batches ahead.
//!
//! Worker `w` of `W` makes batches `w`, `w + W`, `w + 2W` … and sends them through its own channel. The reader takes
//! from the channels in turn. Batches arrive in order without a sort, and a slow batch holds up no worker but its own.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{Builder, JoinHandle},
};

use numcore::{Error, Result, trace};

/// Running threads, and the channels they fill.
pub(crate) struct Workers<T> {
    lanes: Vec<Receiver<T>>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    /// The number of batches taken.
    taken: usize,
}

impl<T: Send + 'static> Workers<T> {
    /// Starts `count` threads. `make` gives the `k`-th batch, or `None` past the end. Its flag turns true once the
    /// batches are no longer wanted. No worker is more than `ahead` batches ahead.
    pub(crate) fn start(
        count: usize,
        ahead: usize,
        make: impl Fn(u64, &AtomicBool) -> Option<T> + Send + Sync + 'static,
    ) -> Result<Self> {
        let (make, stop) = (Arc::new(make), Arc::new(AtomicBool::new(false)));
        let mut workers = Workers { lanes: Vec::new(), threads: Vec::new(), stop, taken: 0 };
        for worker in 0..count {
            // One finished batch is in the hands of the thread that cannot send it.
            let (send, receive) = sync_channel(ahead.saturating_sub(1));
            let (make, stop) = (Arc::clone(&make), Arc::clone(&workers.stop));
            let rank = trace::rank();
            let work = move || {
                if let Some(rank) = rank {
                    trace::set_rank(rank);
                }
                work(worker as u64, count as u64, &*make, &stop, &send);
            };
            // If a thread cannot be started, dropping `workers` ends those before it.
            let thread = Builder::new().name(format!("loader-{worker}")).spawn(work);
            workers.threads.push(thread.map_err(|e| Error::io("worker thread of a loader", e))?);
            workers.lanes.push(receive);
        }
        Ok(workers)
    }

    /// The next batch in order; `None` past the end.
    pub(crate) fn next(&mut self) -> Option<T> {
        let lane = self.taken % self.lanes.len();
        // A worker ends without a batch only past the end, and all others past theirs.
        let made = self.lanes[lane].recv().ok()?;
        self.taken += 1;
        Some(made)
    }
}

fn work<T>(
    first: u64,
    count: u64,
    make: &(dyn Fn(u64, &AtomicBool) -> Option<T> + Send + Sync),
    stop: &AtomicBool,
    send: &SyncSender<T>,
) {
    let mut k = first;
    while !stop.load(Ordering::Relaxed) {
        // A channel without a reader: the loader was dropped.
        if make(k, stop).is_none_or(|made| send.send(made).is_err()) {
            return;
        }
        k += count;
    }
}

/// Calls `make`, and turns a panic into an error with its message: with any number of ranks or workers.
pub(crate) fn caught<T>(make: impl FnOnce() -> Result<T>) -> Result<T> {
    // A panic leaves at most one batch half done, and no caller sees that batch.
    catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|panic: Box<dyn Any + Send>| {
        let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::state("loader", format!("making a batch panicked: {words}")))
    })
}

/// Waits for the threads, each of which ends after the example it is reading.
impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.lanes.clear();
        for thread in self.threads.drain(..) {
            // Panics were caught within the thread; there is nothing else to learn from how it ended.
            let _ = thread.join();
        }
    }
}
