//! A rank's place in a communicator of the library, and its part in launches of captured steps.

use std::{
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use comm::{ByteExchange, Comm, Communicator};
use numcore::{Error, LaunchParticipant, Result, Runtime};
use parking_lot::Mutex;

use super::{
    handle::Handle,
    watch::{WatchOwner, Watched},
    world::World,
};

/// The name of a launch in errors.
const LAUNCH: &str = "launch";

/// A rank's place in a communicator of the library. It lasts as long as the communicator, or a captured step with its
/// calls: the library destroys no communicator before these steps.
pub(crate) struct Member<H: Runtime> {
    pub(crate) control: Comm<H>,
    /// The control plane of all ranks, needed by groups that outlive the communicator of all.
    pub(crate) root: Comm<H>,
    pub(crate) handle: Arc<Handle>,
    pub(crate) world: Arc<World<H>>,
    pub(crate) watch: Arc<WatchOwner>,
    /// The number of calls in the last captured step.
    captured: Mutex<Arc<AtomicU32>>,
}

impl<H: Runtime> Member<H> {
    /// A place in a communicator with this control plane, and that of all ranks.
    pub(crate) fn new(
        [control, root]: [Comm<H>; 2],
        handle: Arc<Handle>,
        world: Arc<World<H>>,
        watch: Arc<WatchOwner>,
    ) -> Arc<Member<H>> {
        Arc::new(Member { control, root, handle, world, watch, captured: Mutex::default() })
    }

    /// Takes part, with a number of calls, in the launches of the step that is being captured on the queue of calls.
    /// The first call in a step makes sure that all ranks capture it. Returns false if no step is being captured.
    pub(crate) fn take_part(self: &Arc<Self>, calls: usize, at: &'static Location<'static>) -> Result<bool> {
        let Some(queue) = self.world.queue() else { return Ok(false) };
        let mut new = None;
        let is_captured = queue.at_launch(Arc::as_ptr(self) as usize, &mut || {
            let name = format!("captured step {}", self.control.next_number()).into();
            let calls = Arc::default();
            *self.captured.lock() = Arc::clone(&calls);
            new.insert(Arc::new(CapturedCalls { name, at, calls, member: self.clone() })).clone()
        });
        if let Some(new) = new {
            self.handle.capture();
            new.meet()?;
        }
        if is_captured {
            self.captured.lock().fetch_add(calls as u32, Ordering::Relaxed);
        }
        Ok(is_captured)
    }
}

impl<H: Runtime> Drop for Member<H> {
    fn drop(&mut self) {
        self.world.forget(&self.handle);
        self.watch.0.close(self.handle.clone());
    }
}

/// The calls of a captured step over one communicator.
struct CapturedCalls<H: Runtime> {
    name: Arc<str>,
    /// The line of the first call.
    at: &'static Location<'static>,
    /// The number of calls.
    calls: Arc<AtomicU32>,
    member: Arc<Member<H>>,
}

impl<H: Runtime> CapturedCalls<H> {
    /// Waits on the host until all ranks have come to the same step.
    fn meet(&self) -> Result<()> {
        let exchange = ByteExchange { of: Some(&self.name), ..ByteExchange::new(&[], self.at) };
        self.member.control.exchange_bytes(exchange).map(drop).inspect_err(|_| self.member.world.end())
    }
}

impl<H: Runtime> LaunchParticipant for CapturedCalls<H> {
    fn before(&self) -> Result<()> {
        self.member.world.check(LAUNCH)?;
        self.meet()
    }

    fn after(&self, queued: Result<(), &Error>) -> Result<()> {
        let Member { world, watch, .. } = &*self.member;
        if let Err(error) = queued {
            return Err(world.fail(LAUNCH, &error.to_string()));
        }
        if let Some(queue) = world.queue() {
            let (mark, calls) = (queue.mark()?, self.calls.load(Ordering::Relaxed));
            watch.0.add(Watched { op: LAUNCH, mark, since: Instant::now(), calls });
        }
        Ok(())
    }
}
