//! The times at which kernels ran on the GPU, for a recording of spans.
//!
//! While kernels are recorded, each is launched between two marks (CUDA events) of its stream. A thread waits for the
//! marks, and reads the time between a first mark and each of them. Spans belong to that thread, so the GPU has a track
//! next to those of the host's threads.

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

use crate::driver::{CudaStream, Driver, DriverFailure, Fallible, Mark};

/// Measures the kernels of one queue.
pub(crate) struct KernelTimes {
    driver: Arc<dyn Driver>,
    stream: CudaStream,
    launched: Sender<LaunchedKernel>,
    pending: Arc<Pending>,
}

/// A launched kernel and the marks before and after it.
struct LaunchedKernel {
    name: &'static str,
    of: String,
    start: Mark,
    end: Mark,
}

/// The number of kernels that have no span yet.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    none: Condvar,
}

impl KernelTimes {
    /// Starts a thread that measures the kernels of `stream`; the thread, and so the track, is named `track`.
    pub(crate) fn new(driver: Arc<dyn Driver>, stream: CudaStream, track: String) -> Fallible<KernelTimes> {
        let origin = Origin::new(&*driver, stream)?;
        let (launched, kernels) = channel();
        let pending = Arc::new(Pending::default());
        let (own, done, rank) = (driver.clone(), pending.clone(), trace::rank());
        let watch = move || {
            rank.into_iter().for_each(trace::set_rank);
            watch(&*own, origin, &kernels, &done);
        };
        // The thread ends when the queue is dropped, and with it the sender.
        thread::Builder::new().name(track).spawn(watch).map_err(|e| DriverFailure::new(e.to_string()))?;
        Ok(KernelTimes { driver, stream, launched, pending })
    }

    /// Runs `launch` between two marks. `name` is the operation, `of` the kernel or the shape of a product.
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

/// A mark that was reached, and the time at which the host saw it.
struct Origin {
    mark: Mark,
    at: Instant,
}

impl Origin {
    fn new(driver: &dyn Driver, stream: CudaStream) -> Fallible<Origin> {
        let mark = timed_mark(driver, stream)?;
        driver.await_mark(mark)?;
        Ok(Origin { mark, at: Instant::now() })
    }

    /// The time at which a later mark was reached.
    fn when(&self, driver: &dyn Driver, mark: Mark) -> Fallible<Instant> {
        Ok(self.at + driver.elapsed(self.mark, mark)?)
    }
}

/// The distance at which the origin is replaced. The driver measures in single precision, so a near origin keeps times
/// exact to the microsecond.
const FAR: Duration = Duration::from_secs(1);

/// Records the spans of kernels in the order in which they were launched, until the queue is dropped.
fn watch(driver: &dyn Driver, mut origin: Origin, kernels: &Receiver<LaunchedKernel>, pending: &Pending) {
    for LaunchedKernel { name, of, start, end } in kernels {
        // A failure here is also a failure of the queue, which reports it.
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

/// Records a mark in `stream` that stores the time at which the stream reaches it.
pub(crate) fn timed_mark(driver: &dyn Driver, stream: CudaStream) -> Fallible<Mark> {
    let mark = driver.timed_mark()?;
    if let Err(failure) = driver.record(mark, stream) {
        driver.destroy_mark(mark);
        return Err(failure);
    }
    Ok(mark)
}
