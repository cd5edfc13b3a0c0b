//! The watch thread of queued work. It ends the world if a device does not reach the end of a call. It also does if the
//! library or another rank fails while the device waits.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use numcore::{Error, QueueMark, Result, Runtime};
use parking_lot::{Condvar, Mutex};

use super::{handle::Handle, world::World};

/// The interval of checks while calls are under way.
const TICK: Duration = Duration::from_millis(5);

/// The interval of checks while none is under way. The library ends an abort on one rank only once all ranks have
/// called it.
const IDLE_TICK: Duration = Duration::from_millis(100);

/// The longest wait of a rank's last communicator for communicators that are being destroyed.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// A call whose operations are on the device's queue.
pub(crate) struct Watched {
    pub(crate) op: &'static str,
    pub(crate) mark: Arc<dyn QueueMark>,
    /// The time at which it was queued, or at which the call before it had ended.
    pub(crate) since: Instant,
    /// The number of calls that it is: those of a step in a launch, each of which has its time.
    pub(crate) calls: u32,
}

/// The calls of one rank in the order of its queue, and communicators that are to be destroyed after them.
pub(crate) struct Watch {
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    calls: VecDeque<Watched>,
    closing: Vec<Arc<Handle>>,
    /// The number of communicators that are being destroyed now.
    closers: usize,
    ended: bool,
}

impl Watch {
    /// Starts a thread that watches the calls of a world.
    pub(crate) fn start<H: Runtime>(world: &Arc<World<H>>) -> Result<Arc<Watch>> {
        let watch = Arc::new(Watch { state: Mutex::default(), changed: Condvar::new() });
        let (own, world) = (watch.clone(), world.clone());
        let rank = world.world_rank;
        thread::Builder::new()
            .name(format!("nccl-{rank}"))
            .spawn(move || own.run(&world))
            .map_err(|why| Error::io(format!("thread nccl-{rank}"), why))?;
        Ok(watch)
    }

    pub(crate) fn add(&self, call: Watched) {
        self.state.lock().calls.push_back(call);
        self.changed.notify_all();
    }

    /// Destroys a communicator once the queue has reached the end of its work.
    pub(crate) fn close(&self, handle: Arc<Handle>) {
        self.state.lock().closing.push(handle);
        self.changed.notify_all();
    }

    /// Lets the thread end when nothing is left.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits until nothing is left to destroy, for at most [`LAST_WAIT`]: other ranks of the machine may keep their
    /// communicators.
    fn wait_for_end(&self) {
        let deadline = Instant::now() + LAST_WAIT;
        let mut state = self.state.lock();
        while !(state.calls.is_empty() && state.closing.is_empty() && state.closers == 0) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }

    fn run<H: Runtime>(self: &Arc<Self>, world: &Arc<World<H>>) {
        while self.wait_for_work() {
            self.look(world);
        }
    }

    /// Waits until a check may find something; false at the end.
    fn wait_for_work(&self) -> bool {
        let mut state = self.state.lock();
        if !state.calls.is_empty() {
            self.changed.wait_for(&mut state, TICK);
        } else if state.closing.is_empty() && !state.ended {
            self.changed.wait_for(&mut state, IDLE_TICK);
        }
        !(state.ended && state.calls.is_empty() && state.closing.is_empty())
    }

    /// Removes calls that have ended, and ends the world if one cannot end.
    pub(crate) fn look<H: Runtime>(self: &Arc<Self>, world: &Arc<World<H>>) {
        let failure = self.passed(world.timeout);
        if let Some((op, cause)) = failure.or_else(|| world.late_error()) {
            world.fail(op, &cause);
        } else if world.is_over() {
            world.end();
        }
        let idle = {
            let mut state = self.state.lock();
            // Marks are in the order of the queue, so an empty list means that all work is done.
            let idle = if state.calls.is_empty() { std::mem::take(&mut state.closing) } else { Vec::new() };
            state.closers += idle.len();
            idle
        };
        for handle in idle {
            let (watch, world) = (self.clone(), world.clone());
            // A separate thread, since the library waits there for other ranks of the machine.
            let closer = thread::Builder::new().name(format!("nccl-close-{}", world.world_rank)).spawn(move || {
                let is_over = || world.is_over();
                // A device without a context has nothing to destroy, so an error is ignored.
                let _ = world.enter("close", || handle.close(&world.wait_limit(&is_over)));
                watch.closed();
            });
            if closer.is_err() {
                self.closed();
            }
        }
        self.changed.notify_all();
    }

    fn closed(&self) {
        self.state.lock().closers -= 1;
        self.changed.notify_all();
    }

    /// Removes calls that have ended. Returns the first that cannot end, with the reason.
    fn passed(&self, timeout: Duration) -> Option<(&'static str, String)> {
        let mut state = self.state.lock();
        while let Some(Watched { op, mark, since, calls }) = state.calls.front() {
            let (op, timeout) = (*op, timeout.saturating_mul(*calls));
            let late = since.elapsed() > timeout;
            match mark.is_reached() {
                Ok(true) => {
                    state.calls.pop_front();
                    // The device begins a call after the one before it.
                    state.calls.front_mut().into_iter().for_each(|next| next.since = next.since.max(Instant::now()));
                }
                Ok(false) if late => {
                    state.calls.clear();
                    let why = format!(
                        "the device has not finished {op} in {timeout:?}: the device of another rank hangs, or a link is down"
                    );
                    return Some((op, why));
                }
                Ok(false) => return None,
                Err(error) => {
                    state.calls.clear();
                    return Some((op, error.to_string()));
                }
            }
        }
        None
    }
}

/// The owner of the watch thread, which ends with the last of a rank's communicators.
pub(crate) struct WatchOwner(pub(crate) Arc<Watch>);

impl Drop for WatchOwner {
    fn drop(&mut self) {
        self.0.end();
        self.0.wait_for_end();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use comm::{Comm, Communicator, Ranks};
    use numcore::{ErrorKind, NullRuntime};

    use super::*;

    /// A mark that a test reaches on command, or never.
    #[derive(Default)]
    struct Point {
        reached: AtomicBool,
        broken: bool,
    }

    impl QueueMark for Point {
        fn is_reached(&self) -> Result<bool> {
            match self.broken {
                true => Err(Error::argument("record", "the device is gone")),
                false => Ok(self.reached.load(Ordering::Acquire)),
            }
        }
    }

    fn watched(mark: &Arc<Point>, age: Duration) -> Watched {
        let since = Instant::now().checked_sub(age).expect("the clock is older");
        Watched { op: "all_reduce", mark: mark.clone(), since, calls: 1 }
    }

    /// The results of both ranks after rank 1 has checked these calls.
    fn looked(timeout: Duration, calls: impl Fn() -> Vec<Watched> + Sync) -> Vec<Result<usize>> {
        let program = |control: Comm<NullRuntime>| {
            let world = World::new(&control, None);
            let watch = Arc::new(Watch { state: Mutex::default(), changed: Condvar::new() });
            if control.rank() == 1 {
                calls().into_iter().for_each(|call| watch.add(call));
                watch.look(&world);
            }
            comm::Collectives::barrier(&control)?;
            let left = watch.state.lock().calls.len();
            Ok(left)
        };
        Ranks::new(2).timeout(timeout).outcomes(|_| Ok(NullRuntime::new()), program).expect("two ranks")
    }

    #[test]
    fn calls_that_end_are_forgotten_in_the_order_of_the_queue() {
        let point = |reached| Arc::new(Point { reached: AtomicBool::new(reached), broken: false });
        let calls = || [true, true, false, true].map(|reached| watched(&point(reached), Duration::ZERO)).into();
        let left: Vec<usize> = looked(Duration::from_secs(60), calls).into_iter().map(Result::unwrap).collect();
        assert_eq!(left, [0, 2]);
    }

    #[test]
    fn a_call_has_its_time_from_the_end_of_the_one_before() {
        let calls = || {
            let age = Duration::from_secs(600);
            let first = Arc::new(Point { reached: AtomicBool::new(true), broken: false });
            vec![watched(&first, age), watched(&Arc::default(), age)]
        };
        let left: Vec<usize> = looked(Duration::from_secs(300), calls).into_iter().map(Result::unwrap).collect();
        assert_eq!(left, [0, 1]);
    }

    #[test]
    fn a_device_that_does_not_come_to_the_end_of_a_call_is_an_error_on_all() {
        let calls = || vec![watched(&Arc::default(), Duration::from_millis(400))];
        for outcome in looked(Duration::from_millis(300), calls) {
            let error = outcome.unwrap_err();
            let ErrorKind::Peer { peer: 1, cause, .. } = error.kind() else { panic!("{error}") };
            assert!(cause.contains("has not finished all_reduce in 300ms"), "{error}");
        }
    }

    #[test]
    fn a_device_that_fails_is_an_error_on_all() {
        let broken = || Arc::new(Point { broken: true, ..Point::default() });
        for outcome in looked(Duration::from_secs(60), || vec![watched(&broken(), Duration::ZERO)]) {
            assert!(outcome.unwrap_err().to_string().contains("the device is gone"));
        }
    }
}
