//! The thread that owns the transport: it takes commands, matches headers, moves data, and watches deadlines and
//! failures.

mod end;
mod recover;

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender},
    },
    thread,
    time::{Duration, Instant},
};

use comm::engine::FailureReason;
use numcore::Result;

pub(crate) use self::recover::Patience;
use crate::{
    flight::{Flight, Matching},
    inbox::Inbox,
    job::{Advance, JobError},
    message::{GroupId, Header, Message, world_of},
    stream::{Event, Streams},
    tags::Tags,
    transport::Transport,
    world::World,
};

/// Commands from communicators to the thread.
pub(crate) enum Command {
    /// Enters a new world of this process.
    Enter(Arc<World>),
    /// Starts a call.
    Start(Box<Flight>),
    /// Notifies the other members that a world has failed on this rank.
    Failed(Arc<World>),
    /// Leaves a group whose last handle was dropped.
    Leave { group: GroupId, members: Arc<[usize]> },
    /// Wakes the thread, because a caller waits.
    Wake,
    /// Asks for the end of all queued sends; the thread then drops the sender.
    Flush(SyncSender<()>),
    /// Begins a recovery: the number of worlds made so far, and the channel of the outcome.
    Recover { made: u64, patience: Patience, outcome: SyncSender<Result<(u64, Vec<usize>)>> },
    /// Ends the thread; nothing more will be started. The duration is the longest wait for the other processes.
    Finish(Duration),
}

/// The pause between polls while calls are under way and the thread does not spin.
const NAP: Duration = Duration::from_micros(30);
/// The pause between polls once nothing has moved for [`LULL`], so that waiting ranks leave the CPU to others.
const LONG_NAP: Duration = Duration::from_micros(200);
const LULL: Duration = Duration::from_millis(5);
/// The pause between polls while nothing is under way.
const IDLE: Duration = Duration::from_millis(1);
/// The time after any progress during which the thread polls without sleeping, if a caller waits.
const SPIN: Duration = Duration::from_micros(200);
const OUT_OF_TAGS: &str = "the transport has no free tags: too many calls are in flight";

pub(crate) struct Progress {
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) streams: Streams,
    pub(crate) commands: Receiver<Command>,
    pub(crate) worlds: BTreeMap<u64, Arc<World>>,
    pub(crate) inbox: Inbox,
    pub(crate) flights: Vec<Flight>,
    /// Groups that this process has left while calls are under way in them, with their members.
    left: Vec<(GroupId, Arc<[usize]>)>,
    flushing: Vec<SyncSender<()>>,
    tags: Tags,
    /// The least number that the next world of this process can have.
    next_world: u64,
    pub(crate) dead: Vec<bool>,
    pub(crate) gone: Vec<bool>,
    pub(crate) recovery: recover::Recovery,
    last_move: Instant,
}

impl Progress {
    pub(crate) fn new(mut transport: Box<dyn Transport>, commands: Receiver<Command>) -> Result<Self> {
        let streams = Streams::new(&mut *transport)?;
        let size = transport.size();
        Ok(Progress {
            streams,
            commands,
            worlds: BTreeMap::new(),
            inbox: Inbox::default(),
            flights: Vec::new(),
            left: Vec::new(),
            flushing: Vec::new(),
            tags: Tags::new(size, transport.tags()),
            next_world: 0,
            dead: vec![false; size],
            gone: vec![false; size],
            recovery: recover::Recovery::new(size),
            last_move: Instant::now(),
            transport,
        })
    }

    /// Runs until a command ends the thread.
    pub(crate) fn run(mut self) {
        loop {
            match self.next_command() {
                Some(Command::Finish(timeout)) => return self.finish(timeout),
                Some(command) => self.execute(command),
                None => {}
            }
            self.turn();
        }
    }

    fn next_command(&mut self) -> Option<Command> {
        let busy = !self.flights.is_empty() || !self.streams.is_flushed() || self.recovery.is_under_way();
        let waited = self.flights.iter().any(|flight| flight.job.is_waited_for());
        let moves = |flight: &Flight| flight.begun && flight.job.is_waited_for();
        let moving = self.transport.moves_while_tested() && self.flights.iter().any(moves);
        let nap = match (busy, waited) {
            (true, true) if moving || self.last_move.elapsed() < SPIN => {
                thread::yield_now();
                return self.commands.try_recv().ok();
            }
            (true, _) if self.last_move.elapsed() < LULL => NAP,
            (true, _) => LONG_NAP,
            (false, _) => IDLE,
        };
        match self.commands.recv_timeout(nap) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            // All handles are gone without a `Finish`, which counts as one without a wait.
            Err(RecvTimeoutError::Disconnected) => Some(Command::Finish(Duration::ZERO)),
        }
    }

    pub(crate) fn execute(&mut self, command: Command) {
        match command {
            Command::Enter(world) => self.enter(world),
            Command::Start(flight) => self.start(*flight),
            Command::Failed(world) => self.broadcast_failure(&world),
            Command::Leave { group, members } => {
                let message = Message::Leave(group.clone());
                self.send_to_all(&members, &message);
                self.left.push((group, members));
                self.forget_groups();
                self.forget_worlds();
            }
            Command::Wake => self.last_move = Instant::now(),
            Command::Flush(done) => self.flushing.push(done),
            Command::Recover { made, patience, outcome } => self.begin_recovery(made, patience, outcome),
            Command::Finish(_) => {}
        }
    }

    /// Polls everything once: streams, recovery and calls.
    pub(crate) fn turn(&mut self) {
        let mut events = Vec::new();
        if let Err(error) = self.streams.advance(&mut *self.transport, &mut events) {
            let peer = self.transport.rank();
            self.fail_worlds_of(peer, &error.to_string());
        }
        if !events.is_empty() {
            self.last_move = Instant::now();
        }
        events.into_iter().for_each(|event| self.handle(event));
        self.advance_recovery();
        self.advance_flights();
        self.forget_groups();
        if self.streams.is_flushed() {
            self.flushing.clear();
        }
    }

    pub(crate) fn handle(&mut self, event: Event) {
        match event {
            Event::Message(_, message) if message.world().is_some_and(|world| self.is_over(world)) => {}
            Event::Message(from, Message::Call(header)) => {
                let known = self.inbox.members(&header.group);
                if let (Some(world), Some(members)) = (self.worlds.get(&world_of(&header.group)), known) {
                    world.note(from, &members, header.key.number(), header.call.clone());
                }
                self.inbox.put(from, header);
            }
            Event::Message(from, Message::Leave(group)) => self.inbox.leave(from, group),
            Event::Message(_, Message::Fail(number, failure)) => match self.worlds.get(&number).cloned() {
                Some(world) => {
                    world.fail_as(failure);
                    self.drop_flights(&world);
                }
                None => self.inbox.failed(number, failure),
            },
            Event::Message(from, Message::Goodbye) => {
                self.gone[from] = true;
                self.recovery_lost();
            }
            Event::Message(from, Message::Recover { made, dead }) => self.store_announcement(from, made, dead),
            Event::Dead(rank) => {
                self.dead[rank] = true;
                self.fail_worlds_of(rank, "its process has ended");
                self.recovery_lost();
            }
            Event::Broken(rank, words) => self.fail_worlds_of(rank, &format!("its messages ended: {words}")),
        }
    }

    fn enter(&mut self, world: Arc<World>) {
        if let Some(failure) = self.inbox.failure_of(world.number) {
            world.fail_as(failure);
        }
        if let Some(&dead) = world.members.iter().find(|&&rank| self.dead[rank]) {
            world.fail(FailureReason::Peer { peer: dead, cause: "its process has ended".into() });
        }
        self.enter_group(&[world.number].into(), &world.members, &world);
        self.next_world = world.number + 1;
        self.worlds.insert(world.number, world);
        self.forget_worlds();
    }

    /// Tells whether this process has left a world that it was in.
    fn is_over(&self, world: u64) -> bool {
        world < self.next_world && !self.worlds.contains_key(&world)
    }

    /// Forgets the groups that this process has left, once its last call there has ended.
    fn forget_groups(&mut self) {
        let own = self.transport.rank();
        self.left.retain(|(group, members)| {
            let is_used = self.flights.iter().any(|flight| flight.group == *group);
            if !is_used {
                self.inbox.forget(group, members, own);
            }
            is_used
        });
    }

    /// Forgets the worlds of which this process holds no handle any more.
    fn forget_worlds(&mut self) {
        let over = |world: &Arc<World>| Arc::strong_count(world) == 1;
        let over: Vec<u64> = self.worlds.values().filter(|world| over(world)).map(|world| world.number).collect();
        for number in over {
            self.worlds.remove(&number);
            self.inbox.forget_world(number);
        }
    }

    /// Registers a group, and records the calls that other members have already made in it.
    fn enter_group(&mut self, group: &GroupId, members: &Arc<[usize]>, world: &World) {
        for (from, header) in self.inbox.enter(group, members) {
            world.note(from, members, header.key.number(), header.call.clone());
        }
    }

    fn start(&mut self, mut flight: Flight) {
        if let Some(failure) = flight.world.failure() {
            return flight.job.fail(failure);
        }
        let (world, group, members) = (flight.world.clone(), flight.group.clone(), flight.members.clone());
        self.enter_group(&group, &members, &world);
        for to in flight.peers.clone() {
            let process = flight.members[to];
            let count = flight.job.tags();
            let Some(tag) = self.take_tags(process, count) else {
                world.fail(FailureReason::Peer { peer: flight.world_rank(), cause: OUT_OF_TAGS.into() });
                break;
            };
            (flight.headers.tags[to].0, flight.tags[to]) = (tag, tag..tag + count);
            let header = Header {
                group: flight.group.clone(),
                key: flight.key,
                tag,
                call: flight.call.clone(),
                elements: flight.job.elements_for(to),
                payload: flight.payload.clone(),
            };
            self.streams.send(process, &Message::Call(header));
        }
        // Others may have begun the call by its header, and wait for messages with its tags: they are lost if it fails.
        self.flights.push(flight);
        if world.failure().is_some() {
            self.broadcast_failure(&world);
        }
        self.last_move = Instant::now();
    }

    /// The first of `count` tags for messages to a process, none of which a call under way uses. `None` if there are
    /// not enough.
    fn take_tags(&mut self, to: usize, count: u32) -> Option<u32> {
        let used: Vec<Range<u32>> = self.flights.iter().filter_map(|flight| flight.tags_to(to)).collect();
        self.tags.take(to, count, &used)
    }

    fn advance_flights(&mut self) {
        let mut k = 0;
        while k < self.flights.len() {
            match self.advance_one(k) {
                Ok(true) => self.end(k),
                Ok(false) => k += 1,
                Err((world, why)) => {
                    world.fail(why);
                    self.broadcast_failure(&world);
                    k = 0;
                }
            }
        }
    }

    /// Advances a call; returns true if it is over.
    fn advance_one(&mut self, k: usize) -> Result<bool, (Arc<World>, FailureReason)> {
        let flight = &mut self.flights[k];
        let world = flight.world.clone();
        let failed = |why| (world.clone(), why);
        match flight.match_headers(&mut self.inbox).map_err(failed)? {
            Matching::Waiting => {
                flight.check_deadline().map_err(failed)?;
                return Ok(false);
            }
            Matching::Moved => {
                self.last_move = Instant::now();
                return Ok(false);
            }
            Matching::Complete => {}
        }
        match flight.job.advance(&mut *self.transport) {
            Ok(Advance::Done) => Ok(true),
            Ok(Advance::Moved) => {
                (self.last_move, flight.moved) = (Instant::now(), Instant::now());
                Ok(false)
            }
            Ok(Advance::Waiting) => {
                let outcome = flight.check_gone(&self.gone).and_then(|()| flight.check_deadline());
                outcome.map(|()| false).map_err(failed)
            }
            Err(error) => Err(failed(flight.reason_of(error))),
        }
    }

    fn end(&mut self, k: usize) {
        self.last_move = Instant::now();
        let Flight { world, job, .. } = self.flights.swap_remove(k);
        if let Err(failure) = job.finish() {
            world.fail(failure.reason);
            self.broadcast_failure(&world);
        }
    }

    /// Notifies the other members that a world has failed, and ends its calls on this rank.
    fn broadcast_failure(&mut self, world: &Arc<World>) {
        if let Some(failure) = world.failure() {
            self.send_to_all(&world.members.clone(), &Message::Fail(world.number, failure));
        }
        self.drop_flights(world);
    }

    fn drop_flights(&mut self, world: &Arc<World>) {
        let Some(failure) = world.failure() else { return };
        let (over, rest) = std::mem::take(&mut self.flights).into_iter().partition(|f| f.world.number == world.number);
        self.flights = rest;
        let over: Vec<Flight> = over;
        for flight in over {
            for &to in &flight.members.clone()[..] {
                flight.tags_to(to).into_iter().for_each(|range| self.tags.lose(to, range));
            }
            flight.job.fail(failure.clone());
        }
    }

    pub(crate) fn fail_worlds_of(&mut self, peer: usize, cause: &str) {
        let hit: Vec<Arc<World>> = self.worlds.values().filter(|w| w.members.contains(&peer)).cloned().collect();
        for world in hit {
            if world.fail(FailureReason::Peer { peer, cause: cause.into() }) {
                self.broadcast_failure(&world);
            }
        }
    }

    pub(crate) fn send_to_all(&mut self, members: &[usize], message: &Message) {
        let own = self.transport.rank();
        members.iter().filter(|&&rank| rank != own).for_each(|&rank| self.streams.send(rank, message));
    }
}

impl Flight {
    /// The reason for the world's failure that a failed transfer gives.
    fn reason_of(&self, error: JobError) -> FailureReason {
        match error {
            JobError::Dead(rank) => {
                FailureReason::Peer { peer: self.members[rank], cause: "its process has ended".into() }
            }
            JobError::Other(cause) => FailureReason::Peer { peer: self.world_rank(), cause },
        }
    }
}
