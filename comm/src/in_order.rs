//! Calls in the order they were started, as on one queue of a device.

use std::{collections::VecDeque, fmt, panic::Location, sync::Arc, thread, time::Duration};

use numcore::{Error, Result, Runtime, TensorMut};
use parking_lot::{Condvar, Mutex};

use super::{Call, Comm, Communicator, Guarantees, Pending, Work, communicator::of_inner};

/// A communicator on which a rank's calls, those of groups split from it included, run one after another in the order they were started:
/// a transfer begins when everything before it has ended, as on an engine that works on one queue of a device. Calls of one
/// [`start_all`](Communicator::start_all) run together. To test that a program does not rely on transfers being independent: one that
/// does ends by the deadline here.
pub struct InOrderCommunicator<R: Runtime> {
    inner: Comm<R>,
    queue: Arc<Queue<R>>,
}

/// What one rank has started.
struct Queue<R: Runtime> {
    state: Mutex<State<R>>,
    changed: Condvar,
}

struct State<R: Runtime> {
    waiting: VecDeque<Vec<Waiting<R>>>,
    /// Handles of this rank: the thread ends with the last.
    handles: usize,
}

struct Waiting<R: Runtime> {
    inner: Comm<R>,
    call: Call<R>,
    result: Arc<Slot<R>>,
}

struct Slot<R: Runtime> {
    value: Mutex<Option<Result<Option<TensorMut<R>>>>>,
    changed: Condvar,
}

impl<R: Runtime> InOrderCommunicator<R> {
    /// With nothing started. An error if there is no thread for its queue.
    pub fn new(inner: Comm<R>) -> Result<Self> {
        let state = State { waiting: VecDeque::new(), handles: 1 };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let (own, rank) = (queue.clone(), inner.world_rank());
        thread::Builder::new()
            .name(format!("in-order-{rank}"))
            .spawn(move || while own.run_next() {})
            .map_err(|e| Error::argument("InOrderCommunicator", format!("no thread for rank {rank}: {e}")))?;
        Ok(InOrderCommunicator { inner, queue })
    }

    fn exchange_on_host(&self, own: &[u8], at: &'static Location<'static>) -> Result<Vec<Vec<u8>>> {
        self.inner.exchange_bytes(own, at)
    }
}

impl<R: Runtime> Communicator<R> for InOrderCommunicator<R> {
    of_inner!();

    fn guarantees(&self) -> Guarantees {
        Guarantees { independent_transfers: false, ..self.inner.guarantees() }
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let mut works = self.start_all(vec![call])?;
        works.pop().ok_or_else(|| Error::argument("start", "a call was started, and nothing is in flight"))
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        self.inner.poll()?;
        let waiting = |call| Waiting { inner: self.inner.clone(), call, result: Slot::new() };
        let group: Vec<Waiting<R>> = calls.into_iter().map(waiting).collect();
        let works = group.iter().map(|one| Work::pending(Queued(one.result.clone()))).collect();
        self.queue.state.lock().waiting.push_back(group);
        self.queue.changed.notify_all();
        Ok(works)
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
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
    /// Runs what was started next, and waits until it has ended. False when nothing more can come.
    fn run_next(&self) -> bool {
        let group = {
            let mut state = self.state.lock();
            loop {
                match (state.waiting.pop_front(), state.handles) {
                    (Some(group), _) => break group,
                    (None, 0) => return false,
                    (None, _) => self.changed.wait(&mut state),
                }
            }
        };
        let started = |Waiting { inner, call, result }: Waiting<R>| (inner.start(call), result);
        let started: Vec<_> = group.into_iter().map(started).collect();
        for (work, result) in started {
            result.fill(work.and_then(Work::wait));
        }
        true
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
