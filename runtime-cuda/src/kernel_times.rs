//! When kernels ran on the GPU, for a recording of spans.
//!
//! While kernels are recorded, each is launched between two marks of its stream. A thread waits for the marks behind the launches, and reads how
//! long after a first mark they were reached. Spans belong to that thread, so the GPU has a track next to those of the host's threads.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use numcore::trace::{self, SpanKind};
use parking_lot::{Condvar, Mutex};

use crate::driver::{Driver, DriverFailure, Fallible, Mark, Stream};

/// Measures the kernels of one queue.
pub(crate) struct KernelTimes {
    driver: Arc<dyn Driver>,
    stream: Stream,
    launched: Sender<LaunchedKernel>,
    pending: Arc<Pending>,
}

/// A kernel between its marks.
struct LaunchedKernel {
    name: &'static str,
    of: String,
    start: Mark,
    end: Mark,
}

/// How many kernels have no span yet.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    none: Condvar,
}

impl KernelTimes {
    /// Of the queue of this stream; its track is named so.
    pub(crate) fn new(driver: Arc<dyn Driver>, stream: Stream, track: String) -> Fallible<KernelTimes> {
        let origin = Origin::new(&*driver, stream)?;
        let (launched, kernels) = channel();
        let pending = Arc::new(Pending::default());
        let (own, done, rank) = (driver.clone(), pending.clone(), trace::rank());
        let watch = move || {
            rank.into_iter().for_each(trace::set_rank);
            watch(&*own, origin, &kernels, &done);
        };
        // It ends when the queue is dropped, and with it the sender.
        thread::Builder::new().name(track).spawn(watch).map_err(|e| DriverFailure::new(e.to_string()))?;
        Ok(KernelTimes { driver, stream, launched, pending })
    }

    /// Runs `launch` of an operation, of this kernel or shape, between two marks.
    pub(crate) fn around(&self, name: &'static str, of: String, launch: impl FnOnce() -> Fallible<()>) -> Fallible<()> {
        let start = self.mark()?;
        let done = launch().and_then(|()| self.mark());
        let end = match done {
            Ok(end) => end,
            Err(failure) => {
                self.driver.destroy_mark(start);
                return Err(failure);
            }
        };
        *self.pending.count.lock() += 1;
        if self.launched.send(LaunchedKernel { name, of, start, end }).is_err() {
            *self.pending.count.lock() -= 1;
        }
        Ok(())
    }

    /// Waits until all kernels that are done have their spans.
    pub(crate) fn drain(&self) {
        let mut count = self.pending.count.lock();
        while *count > 0 {
            self.pending.none.wait(&mut count);
        }
    }

    fn mark(&self) -> Fallible<Mark> {
        timed_mark(&*self.driver, self.stream)
    }
}

/// A mark that was reached, and when.
struct Origin {
    mark: Mark,
    at: Instant,
}

impl Origin {
    fn new(driver: &dyn Driver, stream: Stream) -> Fallible<Origin> {
        let mark = timed_mark(driver, stream)?;
        driver.await_mark(mark)?;
        Ok(Origin { mark, at: Instant::now() })
    }

    /// When a mark was reached that comes after this one.
    fn when(&self, driver: &dyn Driver, mark: Mark) -> Fallible<Instant> {
        Ok(self.at + driver.elapsed(self.mark, mark)?)
    }
}

/// A driver measures in single precision: a later origin keeps what it says exact to the microsecond.
const FAR: Duration = Duration::from_secs(1);

/// Records the spans of kernels in the order in which they were launched, until the queue is dropped.
fn watch(driver: &dyn Driver, mut origin: Origin, kernels: &Receiver<LaunchedKernel>, pending: &Pending) {
    for LaunchedKernel { name, of, start, end } in kernels {
        // What fails here fails in the queue too, and is reported there.
        let times = driver.await_mark(end).and_then(|()| Ok((origin.when(driver, start)?, origin.when(driver, end)?)));
        driver.destroy_mark(start);
        match times {
            Ok((from, to)) => {
                trace::measured(SpanKind::Kernel, name, Some(&of), from, to);
                let far = to - origin.at > FAR;
                let other = if far { std::mem::replace(&mut origin, Origin { mark: end, at: to }).mark } else { end };
                driver.destroy_mark(other);
            }
            Err(_) => driver.destroy_mark(end),
        }
        let mut count = pending.count.lock();
        *count -= 1;
        if *count == 0 {
            pending.none.notify_all();
        }
    }
    driver.destroy_mark(origin.mark);
}

/// A mark that knows when the stream reached it.
pub(crate) fn timed_mark(driver: &dyn Driver, stream: Stream) -> Fallible<Mark> {
    let mark = driver.timed_mark()?;
    if let Err(failure) = driver.record(mark, stream) {
        driver.destroy_mark(mark);
        return Err(failure);
    }
    Ok(mark)
}
