//! The thread that owns the transport: it takes commands, meets other ranks, moves data, watches deadlines, and hears of failures.

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

use comm::engine::Why;
use numcore::Result;

use super::{
    flight::{Flight, Meeting},
    job::{Advance, Trouble},
    meeting::Inbox,
    message::{GroupId, Header, Message, world_of},
    stream::{Event, Streams},
    tags::Tags,
    transport::Transport,
    world::World,
};

/// What communicators ask of the thread.
pub(crate) enum Command {
    /// A world of this process begins.
    Enter(Arc<World>),
    /// A call was made.
    Start(Box<Flight>),
    /// A world has failed here: the others are told.
    Failed(Arc<World>),
    /// The last handle of a group is gone.
    Leave { group: GroupId, members: Arc<[usize]> },
    /// Somebody waits.
    Wake,
    /// Somebody waits until all that was said has left: this is dropped then.
    Flush(SyncSender<()>),
    /// Messages of a recovery that has begun here: how many worlds were made, and where its outcome goes.
    Recover { made: u64, timeout: Duration, outcome: SyncSender<Result<(u64, Vec<usize>)>> },
    /// Nothing more will be started.
    Finish(Duration),
}

/// Between looks at the transport while calls are under way and nobody waits.
pub(crate) const NAP: Duration = Duration::from_micros(30);
/// The pause between polls once nothing has moved for [`LULL`]: ranks that wait for others leave them the CPU.
const LONG_NAP: Duration = Duration::from_micros(200);
const LULL: Duration = Duration::from_millis(5);
/// Between looks at the transport while nothing is under way.
const IDLE: Duration = Duration::from_millis(1);
/// For so long after anything moved the thread does not sleep while somebody waits.
const SPIN: Duration = Duration::from_micros(200);
const OUT_OF_TAGS: &str = "so many calls are under way that the transport has no tags left";
/// A rank that has left may have failed: for so long its own words are waited for.
pub(crate) const GRACE: Duration = Duration::from_millis(100);

pub(crate) struct Progress {
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) streams: Streams,
    pub(crate) commands: Receiver<Command>,
    pub(crate) worlds: BTreeMap<u64, Arc<World>>,
    pub(crate) inbox: Inbox,
    pub(crate) flights: Vec<Flight>,
    flushing: Vec<SyncSender<()>>,
    tags: Tags,
    /// The number of the next world that this process makes.
    next_world: u64,
    pub(crate) dead: Vec<bool>,
    pub(crate) gone: Vec<bool>,
    pub(crate) recovery: super::recover::Recovery,
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
            flushing: Vec::new(),
            tags: Tags::new(size, transport.tags()),
            next_world: 0,
            dead: vec![false; size],
            gone: vec![false; size],
            recovery: super::recover::Recovery::new(size),
            last_move: Instant::now(),
            transport,
        })
    }

    /// Serves until it is told to finish.
    pub(crate) fn run(mut self) {
        loop {
            match self.next_command() {
                Some(Command::Finish(timeout)) => return self.finish(timeout),
                Some(command) => self.obey(command),
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
            // Every handle is gone without a word: as if told.
            Err(RecvTimeoutError::Disconnected) => Some(Command::Finish(Duration::ZERO)),
        }
    }

    pub(crate) fn obey(&mut self, command: Command) {
        match command {
            Command::Enter(world) => self.enter(world),
            Command::Start(flight) => self.start(*flight),
            Command::Failed(world) => self.tell(&world),
            Command::Leave { group, members } => {
                let message = Message::Leave(group.clone());
                self.tell_others(&members, &message);
                self.inbox.forget(&group, &members, self.transport.rank());
                self.forget_worlds();
            }
            Command::Wake => self.last_move = Instant::now(),
            Command::Flush(done) => self.flushing.push(done),
            Command::Recover { made, timeout, outcome } => self.begin_recovery(made, timeout, outcome),
            Command::Finish(_) => {}
        }
    }

    /// Looks at everything once.
    pub(crate) fn turn(&mut self) {
        let mut events = Vec::new();
        if let Err(error) = self.streams.advance(&mut *self.transport, &mut events) {
            let peer = self.transport.rank();
            self.fail_worlds_of(peer, &error.to_string());
        }
        if !events.is_empty() {
            self.last_move = Instant::now();
        }
        events.into_iter().for_each(|event| self.hear(event));
        self.advance_recovery();
        self.advance_flights();
        if self.streams.is_flushed() {
            self.flushing.clear();
        }
    }

    pub(crate) fn hear(&mut self, event: Event) {
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
            Event::Message(from, Message::Recover { made, dead }) => self.hear_recovery(from, made, dead),
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
            world.fail(Why::Peer { peer: dead, cause: "its process has ended".into() });
        }
        self.enter_group(&[world.number].into(), &world.members, &world);
        self.next_world = world.number + 1;
        self.worlds.insert(world.number, world);
        self.forget_worlds();
    }

    /// Whether this process had its part in a world, and has left it.
    fn is_over(&self, world: u64) -> bool {
        world < self.next_world && !self.worlds.contains_key(&world)
    }

    /// Forgets the worlds that nobody in this process has a handle of.
    fn forget_worlds(&mut self) {
        let over = |world: &Arc<World>| Arc::strong_count(world) == 1;
        let over: Vec<u64> = self.worlds.values().filter(|world| over(world)).map(|world| world.number).collect();
        for number in over {
            self.worlds.remove(&number);
            self.inbox.forget_world(number);
        }
    }

    /// A group is known from now on; calls that others have made in it already are noted.
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
            let Some(tag) = self.take_tags(process, flight.job.tags()) else {
                flight.world.fail(Why::Peer { peer: flight.world_rank(), cause: OUT_OF_TAGS.into() });
                self.tell(&world);
                break;
            };
            (flight.met.tags[to].0, flight.tags[to]) = (tag, tag);
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
        match world.failure() {
            Some(failure) => flight.job.fail(failure),
            None => self.flights.push(flight),
        }
        self.last_move = Instant::now();
    }

    /// The first of `count` tags for messages to a process, which no call under way has.
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
                    self.tell(&world);
                    k = 0;
                }
            }
        }
    }

    /// Whether a flight is over.
    fn advance_one(&mut self, k: usize) -> Result<bool, (Arc<World>, Why)> {
        let flight = &mut self.flights[k];
        let world = flight.world.clone();
        let failed = |why| (world.clone(), why);
        match flight.meet(&mut self.inbox).map_err(failed)? {
            Meeting::Waiting => {
                flight.check_deadline().map_err(failed)?;
                return Ok(false);
            }
            Meeting::Moved => {
                self.last_move = Instant::now();
                return Ok(false);
            }
            Meeting::Complete => {}
        }
        match flight.job.advance(&mut *self.transport) {
            Ok(Advance::Done) => Ok(true),
            Ok(Advance::Moved) => {
                (self.last_move, flight.moved) = (Instant::now(), Instant::now());
                Ok(false)
            }
            Ok(Advance::Waiting) => flight.check_deadline().map(|()| false).map_err(failed),
            Err(trouble) => Err(failed(flight.trouble(trouble))),
        }
    }

    fn end(&mut self, k: usize) {
        self.last_move = Instant::now();
        let Flight { world, job, .. } = self.flights.swap_remove(k);
        if let Err(failure) = job.finish() {
            world.fail(failure.why);
            self.tell(&world);
        }
    }

    /// Tells the other members that a world has failed, and ends its calls here.
    fn tell(&mut self, world: &Arc<World>) {
        if let Some(failure) = world.failure() {
            self.tell_others(&world.members.clone(), &Message::Fail(world.number, failure));
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
            if world.fail(Why::Peer { peer, cause: cause.into() }) {
                self.tell(&world);
            }
        }
    }

    pub(crate) fn tell_others(&mut self, members: &[usize], message: &Message) {
        let own = self.transport.rank();
        members.iter().filter(|&&rank| rank != own).for_each(|&rank| self.streams.send(rank, message));
    }
}

impl Flight {
    /// What a trouble of its transfers means to the world.
    fn trouble(&self, trouble: Trouble) -> Why {
        match trouble {
            Trouble::Dead(rank) => Why::Peer { peer: self.members[rank], cause: "its process has ended".into() },
            Trouble::Other(cause) => Why::Peer { peer: self.world_rank(), cause },
        }
    }
}
