//! The communicator of a rank on a GPU.

use std::{
    fmt,
    panic::Location,
    sync::Arc,
    time::{Duration, Instant},
};

use comm::{
    ByteExchange, Call, Comm, Communicator, ErrorTiming, Group, Guarantees, Pending, SumOrder, Work, engine::Combiner,
};
use numcore::{Error, ErrorKind, QueueMark, Result, Runtime, Tensor, TensorMut};
use parking_lot::Mutex;

use super::{
    bootstrap::exchange_id,
    handle::{CallFailure, Handle, pause},
    member::Member,
    moves::{CallBuffers, Moving, QueueContext, QueueError},
    nccl::Nccl,
    watch::{Watch, WatchOwner, Watched},
    world::World,
};

/// The communicator of a rank on its own GPU, made by [`Nccl::communicator`] and by `split`.
///
/// Calls run one after another, in the order in which this rank starts them, on one queue of the device with a high
/// priority. [`Work::wait`] waits on the host until all ranks have started the call, and orders the caller's queue
/// after it. An error of the device or of a link may come later: at [`Work::done`], at [`poll`](Communicator::poll) or
/// at the next call.
pub struct NcclCommunicator<R: Runtime, H: Runtime> {
    nccl: Nccl,
    rt: R,
    member: Arc<Member<H>>,
    /// The combiner on the queue of all calls of the rank. Its lock is held while calls are queued, so all threads of a
    /// rank queue in one order.
    combiner: Arc<Mutex<Combiner<R>>>,
}

impl Nccl {
    /// Makes a communicator of the ranks of `control`, each on the GPU of its own `rt`. Blocks until all ranks have
    /// made the call.
    ///
    /// Calls over it, and over groups split from it, run one after another in the order in which a rank starts them. So
    /// all ranks must start them in one order. Transfers that must run together are started by
    /// [`start_all`](comm::Communicator::start_all).
    ///
    /// # Errors
    /// An error if a rank's runtime is not on a GPU that NCCL can reach, or two ranks are on one GPU. Also if ranks
    /// have different versions of the library or different options, or one does not come before the deadline of
    /// `control`.
    #[track_caller]
    pub fn communicator<R: Runtime, H: Runtime>(&self, control: &Comm<H>, rt: &R) -> Result<Comm<R>> {
        let made = NcclCommunicator::of_all(self, control, rt, Location::caller());
        // Other ranks wait and do not know yet of an error that this rank found by itself.
        let made = made.inspect_err(|error| match error.kind() {
            ErrorKind::Peer { .. } | ErrorKind::Timeout { .. } | ErrorKind::Mismatch { .. } => {}
            _ => control.abort(&error.to_string()),
        });
        Ok(Arc::new(made?))
    }
}

impl<R: Runtime, H: Runtime> NcclCommunicator<R, H> {
    fn of_all(nccl: &Nccl, control: &Comm<H>, rt: &R, at: &'static Location<'static>) -> Result<Self> {
        const OP: &str = "Nccl::communicator";
        let queue = rt.fork_for_communication()?;
        let device = queue.device_queue();
        // A rank on an unreachable device takes part in the exchange, so that all ranks report the same reason.
        let unreachable = device.is_none() && !nccl.api.takes_host_memory();
        let world = World::new(control, device);
        let id = exchange_id(nccl, control, unreachable.then(|| rt.device().to_string()), at)?;
        let made = world.enter(OP, || {
            let raw = nccl.api.init(control.size(), &id, control.rank());
            let raw = raw.map_err(|status| CallFailure::Failed(nccl.api.error_text(status, None)))?;
            let handle = Handle::new(nccl.api.clone(), raw);
            let is_over = || world.is_over();
            handle.joined(&world.wait_limit(&is_over)).map(|()| handle)
        })?;
        let handle = Arc::new(made.map_err(|failure| world.failure_error(OP, failure))?);
        world.keep(&handle);
        // Without this exchange, a rank that goes on and fails at once would abort communicators that others are still
        // making.
        let of = Some(&"NCCL's ranks".into());
        control.exchange_bytes(ByteExchange { of, ..ByteExchange::new(&[], at) })?;
        let watch = Arc::new(WatchOwner(Watch::start(&world)?));
        let member = Member::new([control.clone(), control.clone()], handle, world, watch);
        let combiner = Arc::new(Mutex::new(Combiner::new(queue)));
        Ok(NcclCommunicator { nccl: nccl.clone(), rt: rt.clone(), member, combiner })
    }

    fn world(&self) -> &Arc<World<H>> {
        &self.member.world
    }

    /// Refuses what ranks do on the host in a captured step: launches would not repeat it.
    fn refuse_while_capturing(&self, op: &'static str) -> Result<()> {
        let why = "the host cannot take part in a captured step, whose launches would not repeat it";
        if self.rt.is_capturing() { Err(Error::usage(op, why).on_rank(self.world().world_rank)) } else { Ok(()) }
    }

    /// Queues calls: collectives one after another, then transfers between two ranks together.
    fn queue(
        &self,
        calls: Vec<Call<R>>,
        combiner: &mut Combiner<R>,
        is_captured: bool,
    ) -> Result<Vec<Queued<R>>, QueueError> {
        let mut by = QueueContext {
            world: self.world(),
            handle: &self.member.handle,
            combiner,
            rank: self.rank(),
            n: self.size(),
            chunk: self.nccl.chunk,
            native_sums: self.nccl.native_sums,
            host: self.nccl.api.takes_host_memory(),
        };
        let op = calls.first().map_or("start", |call| call.what().name());
        let mut moving = calls.into_iter().map(|call| Moving::of(call, &by)).collect::<Result<Vec<_>>>()?;
        let mut transfers = Vec::new();
        for call in &mut moving {
            match call.is_transfer() {
                true => transfers.extend(call.transfers(&by)?),
                false => call.queue(&mut by)?,
            }
        }
        by.run(op, &transfers)?;
        let queued = |call: Moving<R>| {
            let memory = call.finish()?;
            let queue = by.combiner.runtime();
            // The end of a captured call is that of each launch.
            let device = self.world().queue().filter(|_| !is_captured);
            let mark = device.map(|queue| queue.mark()).transpose()?;
            Ok(Queued { memory, after: queue.record()?, mark })
        };
        Ok(moving.into_iter().map(queued).collect::<Result<_>>()?)
    }

    /// The error of calls that could not be queued. The library gives no reasons, so the reason comes from the control
    /// plane, if the ranks can exchange it.
    fn stopped(&self, op: &'static str, stop: QueueError, handshakes: Vec<Work<Option<TensorMut<H>>>>) -> Error {
        let world = self.world();
        match stop {
            QueueError::Error(error) => {
                world.fail(op, &error.to_string());
                error.on_rank(world.world_rank)
            }
            QueueError::Library(failure @ CallFailure::Failed(_)) => world.failure_error(op, failure),
            QueueError::Library(failure) => {
                let known = handshakes.into_iter().find_map(|handshake| handshake.wait().err());
                known.inspect(|_| world.end()).unwrap_or_else(|| world.failure_error(op, failure))
            }
        }
    }
}

/// A call whose operations are queued.
struct Queued<R: Runtime> {
    memory: CallBuffers<R>,
    after: R::Event,
    mark: Option<Arc<dyn QueueMark>>,
}

impl<R: Runtime, H: Runtime> Communicator<R> for NcclCommunicator<R, H> {
    fn group(&self) -> &Group {
        self.member.control.group()
    }

    fn runtime(&self) -> &R {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        self.member.control.timeout()
    }

    fn guarantees(&self) -> Guarantees {
        let native = self.nccl.native_sums;
        Guarantees {
            order: if native { SumOrder::Fixed } else { SumOrder::RankOrder },
            by_layout: native,
            equal_on_all_ranks: true,
            nan_wins: !native,
            independent_transfers: false,
            exchanges_on_host: true,
            errors: ErrorTiming::AfterWait,
        }
    }

    fn next_number(&self) -> u64 {
        self.member.control.next_number()
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let op = call.what().name();
        let mut works = self.start_all(vec![call])?;
        works.pop().ok_or_else(|| Error::internal(op, "a call was started, and nothing is in flight"))
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        let Some((op, at)) = calls.first().map(|call| (call.what().name(), call.at())) else { return Ok(Vec::new()) };
        let world = self.world();
        world.check(op)?;
        let ops: Vec<&'static str> = calls.iter().map(|call| call.what().name()).collect();
        // Locked from here on, so that all threads of a rank announce their calls in the order in which they queue
        // them.
        let mut combiner = self.combiner.lock();
        combiner.runtime().wait(&self.rt.record()?)?;
        let is_captured = self.member.take_part(calls.len(), at)?;
        let control = &self.member.control;
        let handshakes = calls.iter().map(|call| control.start(call.header())).collect::<Result<Vec<_>>>()?;
        let queued = match self.queue(calls, &mut combiner, is_captured) {
            Ok(queued) => queued,
            Err(stop) => return Err(self.stopped(op, stop, handshakes)),
        };
        let works = queued.into_iter().zip(handshakes).zip(ops).map(|((queued, handshake), op)| {
            let Queued { memory: CallBuffers { input: _input, output }, after, mark } = queued;
            if let Some(mark) = mark.clone() {
                self.member.watch.0.add(Watched { op, mark, since: Instant::now(), calls: 1 });
            }
            let (world, rt) = (world.clone(), self.rt.clone());
            Work::pending(InFlight { op, world, handshake, rt, _input, output, after, mark, is_captured })
        });
        Ok(works.collect())
    }

    fn exchange_bytes(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        self.refuse_while_capturing("exchange_bytes")?;
        self.member.control.exchange_bytes(exchange)
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        const OP: &str = "split";
        self.refuse_while_capturing(OP)?;
        let world = self.world();
        let order = self.combiner.lock();
        let part = self.member.control.split_at(color, key, at)?;
        // The color is the new group's first member, by its rank in this group; the key is the order of the control
        // plane.
        let place = part.as_ref().map(|part| {
            let first = part.members()[0];
            let color = self.members().iter().position(|&member| member == first).unwrap_or_default();
            (color as i32, part.rank() as i32)
        });
        // The library requires that nothing is under way.
        let mark = world.queue().map(|queue| queue.mark()).transpose()?;
        until_reached(OP, world, mark.as_deref())?;
        let is_over = || world.is_over();
        let (color, key) = (place.map(|place| place.0), place.map_or(0, |place| place.1));
        let made = world.enter(OP, || self.member.handle.split(&world.wait_limit(&is_over), color, key))?;
        let made = made.map_err(|failure| world.failure_error(OP, failure))?;
        drop(order);
        let Some(control) = part else { return Ok(None) };
        let handle = made.ok_or_else(|| world.fail(OP, "NCCL gave a rank with a color no communicator"))?;
        let handle = Arc::new(handle);
        world.keep(&handle);
        let (root, watch) = (self.member.root.clone(), self.member.watch.clone());
        let member = Member::new([control, root], handle, world.clone(), watch);
        let (nccl, combiner) = (self.nccl.clone(), self.combiner.clone());
        Ok(Some(Arc::new(NcclCommunicator { nccl, rt: self.rt.clone(), member, combiner })))
    }

    fn poll(&self) -> Result<()> {
        let world = self.world();
        world.check("poll")?;
        match world.late_error() {
            Some((op, cause)) => Err(world.fail(op, &cause)),
            None => Ok(()),
        }
    }

    fn abort_for(&self, world_rank: usize, cause: &str) {
        self.member.control.abort_for(world_rank, cause);
        self.world().end();
    }
}

impl<R: Runtime, H: Runtime> fmt::Debug for NcclCommunicator<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {})", self.rank(), self.size())
    }
}

/// A call in flight.
struct InFlight<R: Runtime, H: Runtime> {
    op: &'static str,
    world: Arc<World<H>>,
    handshake: Work<Option<TensorMut<H>>>,
    rt: R,
    /// Kept until the call is waited for, since dropping its memory earlier would wait for the queue.
    _input: Option<Tensor<R>>,
    output: Option<TensorMut<R>>,
    after: R::Event,
    mark: Option<Arc<dyn QueueMark>>,
    is_captured: bool,
}

impl<R: Runtime, H: Runtime> InFlight<R, H> {
    /// Waits until all ranks have started the call without a failure.
    fn wait_for_start(self) -> Result<StartedCall<R, H>> {
        let InFlight { op, world, handshake, rt, _input, output, after, mark, .. } = self;
        // A mismatch or failure of another rank also ends the work queued on this one.
        handshake.wait().inspect_err(|_| world.end())?;
        rt.wait(&after)?;
        world.check(op)?;
        Ok(StartedCall { op, world, output, mark })
    }
}

/// A call that all ranks have started.
struct StartedCall<R: Runtime, H: Runtime> {
    op: &'static str,
    world: Arc<World<H>>,
    output: Option<TensorMut<R>>,
    mark: Option<Arc<dyn QueueMark>>,
}

/// Waits on the host until the queue has reached a mark. The watch thread ends the world if that takes too long.
fn until_reached<H: Runtime>(op: &'static str, world: &World<H>, mark: Option<&dyn QueueMark>) -> Result<()> {
    let mut rounds = 0;
    while let Some(mark) = mark
        && !mark.is_reached()?
    {
        world.check(op)?;
        pause(&mut rounds);
    }
    world.check(op)
}

impl<R: Runtime, H: Runtime> Pending<Option<TensorMut<R>>> for InFlight<R, H> {
    fn wait(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        Ok(self.wait_for_start()?.output)
    }

    fn done(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        if self.is_captured {
            let why = "a captured call is done after a launch of its step: use `wait` in the step";
            return Err(Error::usage(self.op, why));
        }
        let StartedCall { op, world, output, mark } = self.wait_for_start()?;
        until_reached(op, &world, mark.as_deref())?;
        if let Some((_, cause)) = world.late_error() {
            return Err(world.fail(op, &cause));
        }
        Ok(output)
    }

    fn is_done(&self) -> bool {
        self.handshake.is_done()
    }
}
