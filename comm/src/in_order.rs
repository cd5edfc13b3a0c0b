//! Calls in the order they were started, as on one queue of a device.

use std::{collections::VecDeque, fmt, panic::Location, sync::Arc, thread, time::Duration};

use numcore::{Error, Result, Runtime, TensorMut};
use parking_lot::{Condvar, Mutex};

use super::{
    ByteExchange, Call, Comm, Communicator, Guarantees, Pending, Work, communicator::of_inner, ranks::guarded,
};

/// A communicator on which a rank's calls, calls of groups split from it included, run one after another in the order
/// they were started. A transfer begins when everything before it has ended, as on an engine that works on one queue of
/// a device. Calls of one [`start_all`](Communicator::start_all) run together. It tests that a program does not rely on
/// independent transfers: one that does fails by the timeout.
pub struct InOrderCommunicator<R: Runtime> {
    inner: Comm<R>,
    queue: Arc<Queue<R>>,
}

/// The calls that one rank has started.
struct Queue<R: Runtime> {
    state: Mutex<State<R>>,
    changed: Condvar,
}

struct State<R: Runtime> {
    waiting: VecDeque<Started<R>>,
    /// True while calls taken from the queue have not ended.
    running: bool,
    /// The number of this rank's handles: the thread ends with the last.
    handles: usize,
}

/// Calls that were started together, and the slots of their results.
struct Started<R: Runtime> {
    inner: Comm<R>,
    calls: Vec<Call<R>>,
    results: Vec<Arc<Slot<R>>>,
}

struct Slot<R: Runtime> {
    value: Mutex<Option<Result<Option<TensorMut<R>>>>>,
    changed: Condvar,
}

impl<R: Runtime> InOrderCommunicator<R> {
    /// Wraps a communicator, with an empty queue. An error if the thread of the queue cannot be started.
    pub fn new(inner: Comm<R>) -> Result<Self> {
        let state = State { waiting: VecDeque::new(), running: false, handles: 1 };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let (own, rank) = (queue.clone(), inner.world_rank());
        thread::Builder::new()
            .name(format!("in-order-{rank}"))
            .spawn(move || while own.run_next() {})
            .map_err(|e| Error::io(format!("thread in-order-{rank}"), e))?;
        Ok(InOrderCommunicator { inner, queue })
    }

    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        self.queue.drain();
        self.inner.exchange_bytes(exchange)
    }
}

impl<R: Runtime> Communicator<R> for InOrderCommunicator<R> {
    of_inner!();

    fn guarantees(&self) -> Guarantees {
        Guarantees { independent_transfers: false, ..self.inner.guarantees() }
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        self.inner.poll()?;
        let results: Vec<Arc<Slot<R>>> = calls.iter().map(|_| Slot::new()).collect();
        let works = results.iter().map(|result| Work::pending(Queued(result.clone()))).collect();
        self.queue.state.lock().waiting.push_back(Started { inner: self.inner.clone(), calls, results });
        self.queue.changed.notify_all();
        Ok(works)
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        self.queue.drain();
        let Some(inner) = self.inner.split_at(color, key, at)? else { return Ok(None) };
        self.queue.state.lock().handles += 1;
        Ok(Some(Arc::new(InOrderCommunicator { inner, queue: self.queue.clone() })))
    }
}

impl<R: Runtime> Drop for InOrderCommunicator<R> {
    fn drop(&mut self) {
        self.queue.state.lock().handles -= 1;
        self.queue.changed.notify_all();
    }
}

impl<R: Runtime> fmt::Debug for InOrderCommunicator<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InOrder({:?})", self.inner)
    }
}

impl<R: Runtime> Queue<R> {
    /// Runs the next calls in the queue, and waits until they have ended. False when nothing more can come.
    fn run_next(&self) -> bool {
        let started = {
            let mut state = self.state.lock();
            loop {
                match (state.waiting.pop_front(), state.handles) {
                    (Some(started), _) => {
                        state.running = true;
                        break started;
                    }
                    (None, 0) => return false,
                    (None, _) => self.changed.wait(&mut state),
                }
            }
        };
        started.run();
        self.state.lock().running = false;
        self.changed.notify_all();
        true
    }

    /// Blocks until all started calls have ended, so that a blocking call runs after them, as on one queue.
    fn drain(&self) {
        let mut state = self.state.lock();
        while state.running || !state.waiting.is_empty() {
            self.changed.wait(&mut state);
        }
    }
}

impl<R: Runtime> Started<R> {
    /// Runs the calls, and fills every result in any case: their owners wait for them.
    fn run(self) {
        let Started { inner, calls, results } = self;
        // An error or a panic reaches the other ranks, as it would on the thread that made the calls.
        let works = guarded(&inner, |inner| inner.start_all(calls));
        match works {
            Ok(works) => results.iter().zip(works).for_each(|(result, work)| result.fill(work.wait())),
            Err(error) => {
                let why = error.to_string();
                let mut own = Some(error);
                let error = || own.take().unwrap_or_else(|| Error::internal("start", why.clone()));
                std::iter::repeat_with(error).zip(&results).for_each(|(error, result)| result.fill(Err(error)));
            }
        }
    }
}

impl<R: Runtime> Slot<R> {
    fn new() -> Arc<Self> {
        Arc::new(Slot { value: Mutex::new(None), changed: Condvar::new() })
    }

    fn fill(&self, value: Result<Option<TensorMut<R>>>) {
        *self.value.lock() = Some(value);
        self.changed.notify_all();
    }
}

struct Queued<R: Runtime>(Arc<Slot<R>>);

impl<R: Runtime> Pending<Option<TensorMut<R>>> for Queued<R> {
    fn wait(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        let mut value = self.0.value.lock();
        loop {
            match value.take() {
                Some(value) => return value,
                None => self.0.changed.wait(&mut value),
            }
        }
    }

    fn is_done(&self) -> bool {
        self.0.value.lock().is_some()
    }
}
