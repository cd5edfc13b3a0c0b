//! One connection: frames that are written from the memory of sends, and read into that of receives.
//!
//! A frame is a header of 16 bytes and a payload. A message of at most [`EAGER`] bytes is written at once. A longer one
//! waits until the other end has announced a receive of its tag, so that its payload goes straight into place. Receives
//! are announced when they begin, which is usually before the message is sent. Only those of more than [`EAGER`] bytes
//! are. So a message that waits is offered, and the other end finds that its receive is too short. Between processes of
//! one host, a long message is [lent](super::lent) in place of its payload.

mod receives;

use std::{
    collections::VecDeque,
    io::{ErrorKind, IoSliceMut, Read, Write},
    ptr, slice,
    time::{Duration, Instant},
};

use super::{
    frame::{
        ADDRESS, CONTROL, DATA, GOODBYE, HEADER, HEARD, HEARTBEAT, Incoming, LENDER, LENT, LentCopy, LinkEnded, MARK,
        OFFER, Outcome, Outgoing, PayloadTarget, READS, READY, RESENT, Stashed, TAKEN, TOO_LONG, TURN, TcpReceive,
        UNREAD, UNREADY, header, is_closed, kind, too_long,
    },
    lent::Lending,
    outbox::{ANNOUNCED, EAGER, Outbox},
};
use crate::Channel;

/// The bytes that are read at once, when they do not go straight into place.
const BUFFER: usize = 64 << 10;
/// The most bytes of one frame, by the trait.
const LONGEST: u64 = (1 << 31) - 1;
/// The most of a length with its channel.
const LONGER: u64 = LONGEST << 1 | 1;
/// The most bytes that are copied from the memory of the other end before other connections have their turn.
const COPIED: usize = 64 << 20;
/// The most bytes of messages without a receive.
const STASH: usize = 64 << 20;
/// The bytes of messages of the control channel without a receive, after which no more are read.
const CONTROL_STASH: usize = 1 << 20;

/// A connection to another process, with the messages that wait at either end.
pub(super) struct TcpLink<S> {
    /// None once the other end has broken the rules.
    stream: Option<S>,
    buffer: Box<[u8]>,
    /// The part of the buffer that was read and not yet used.
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    receives: Vec<TcpReceive>,
    /// Messages without a receive, in order of arrival.
    stash: VecDeque<(u8, u32, Stashed)>,
    stashed: [usize; 2],
    /// Messages that wait at the other end, in their order: channel, tag and length.
    offers: VecDeque<(u8, u32, usize)>,
    outbox: Outbox,
    lending: Lending,
    /// Messages that are copied from the memory of the other end, and those that it was asked to send instead.
    copies: VecDeque<LentCopy>,
    asked: Vec<LentCopy>,
    pub(super) ended: Option<LinkEnded>,
    /// True once the other end has said goodbye, or has heard this one's.
    has_left: bool,
    was_heard: bool,
    leaving: bool,
    last_read: Instant,
    last_write: Instant,
    last_turn: Instant,
}

impl<S: Read + Write> TcpLink<S> {
    pub(super) fn new(stream: S) -> Self {
        let now = Instant::now();
        TcpLink {
            stream: Some(stream),
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            incoming: None,
            receives: Vec::new(),
            stash: VecDeque::new(),
            stashed: [0; 2],
            offers: VecDeque::new(),
            outbox: Outbox::default(),
            lending: Lending::default(),
            copies: VecDeque::new(),
            asked: Vec::new(),
            ended: None,
            has_left: false,
            was_heard: false,
            leaving: false,
            last_read: now,
            last_write: now,
            last_turn: now,
        }
    }

    /// Lends long messages to the other end, which is on this host, if the system and the other end allow it.
    pub(super) fn lend(&mut self) {
        for (k, word) in self.lending.begin().into_iter().flatten().enumerate() {
            self.outbox.urgent.extend(header(LENDER, k as u32, word as usize));
        }
    }

    /// Queues a message and writes what the connection takes at once.
    ///
    /// # Safety
    /// The bytes stay in place and unchanged until the request has ended or the link is dropped.
    pub(super) unsafe fn send(
        &mut self,
        on: Channel,
        from: *const u8,
        bytes: usize,
        tag: u32,
        request: usize,
        done: &mut Vec<Outcome>,
    ) {
        let header = header(kind(on), tag, bytes);
        self.outbox.push(Outgoing { header, from, bytes, written: 0, request: Some(request) });
        self.write(done);
    }

    /// Starts a receive, or ends it with a message that has arrived.
    ///
    /// # Safety
    /// Nothing else uses the bytes until the request has ended or the link is dropped.
    pub(super) unsafe fn receive(
        &mut self,
        on: Channel,
        into: *mut u8,
        room: usize,
        tag: u32,
        request: usize,
        done: &mut Vec<Outcome>,
    ) {
        let receive = TcpReceive { on: kind(on), tag, request, into, room };
        let is_its = |(on, tag, _): &(u8, u32, Stashed)| (*on, *tag) == (receive.on, receive.tag);
        match self.stash.iter().position(is_its).and_then(|place| self.stash.remove(place)) {
            Some((.., Stashed::Here(payload))) => return self.unstash(&receive, &payload, done),
            Some((.., Stashed::Lent(message))) => {
                self.begin_copy(receive, message, done);
                return self.write(done);
            }
            None => self.receives.push(receive),
        }
        // A message that is lent waits for no receive.
        if room > EAGER && !self.lending.reads() {
            self.outbox.urgent.extend(header(READY, tag, usize::from(kind(on))));
            self.write(done);
        } else if self.offers.iter().any(|&(of, offered, _)| (of, offered) == (kind(on), tag)) {
            self.refuse_too_long(kind(on), tag, done);
            self.write(done);
        }
    }

    /// Ends a receive with a message that lies in memory of its own.
    fn unstash(&mut self, receive: &TcpReceive, payload: &[u8], done: &mut Vec<Outcome>) {
        self.stashed[usize::from(receive.on)] -= payload.len();
        if payload.len() > receive.room {
            return done.push((receive.request, Err(too_long(payload.len(), receive.room))));
        }
        // SAFETY: the receiver promises `room` bytes, which the message fits; it lies in separate memory.
        unsafe { ptr::copy_nonoverlapping(payload.as_ptr(), receive.into, payload.len()) };
        done.push((receive.request, Ok(payload.len())));
    }

    /// Withdraws a receive: nothing is written to its memory any more.
    pub(super) fn cancel(&mut self, request: usize) {
        if let Some(place) = self.receives.iter().position(|receive| receive.request == request) {
            let receive = self.receives.remove(place);
            self.unannounce(&receive);
        }
        if let Some(place) = self.copies.iter().position(|copy| copy.receive.request == request) {
            let copy = self.copies.remove(place);
            let taken = copy.map(|copy| header(TAKEN, copy.message.number, 0));
            self.outbox.urgent.extend(taken.into_iter().flatten());
        }
        // The bytes that were asked for it are discarded.
        self.asked.retain(|copy| copy.receive.request != request);
        if let Some(Incoming { target, .. }) = &mut self.incoming
            && matches!(target, PayloadTarget::InPlace { request: of, .. } if *of == request)
        {
            *target = PayloadTarget::Nowhere;
        }
    }

    /// Allows the other end more time until its first bytes come.
    pub(super) fn await_first(&mut self, most: Duration) {
        self.last_read = self.last_read.checked_add(most).unwrap_or(self.last_read);
    }

    /// Writes and reads what the connection allows, and ends it if nothing has come for `silence`.
    pub(super) fn turn(&mut self, silence: Duration, done: &mut Vec<Outcome>) {
        if self.ended.is_some() {
            return;
        }
        let now = Instant::now();
        // A pause of this process is not one of the other.
        if now.duration_since(self.last_turn) > silence / 8 {
            self.last_read = self.last_read.max(now);
        }
        self.last_turn = now;
        self.beat(now, silence, done);
        if let Err(ended) = self.read(now, done) {
            self.end(ended);
            self.stream = None;
        } else if now.duration_since(self.last_read) > silence {
            let why = format!("nothing came for {silence:?}, though a running process writes every {:?}", silence / 8);
            // The connection stays open: a process that was stopped must not take this one for dead.
            self.end(LinkEnded::Broken(why));
        } else {
            self.copy(done);
        }
    }

    /// Writes what the connection takes, or a heartbeat if nothing was written for an eighth of the `silence`.
    pub(super) fn beat(&mut self, now: Instant, silence: Duration, done: &mut Vec<Outcome>) {
        if now.duration_since(self.last_write) > silence / 8 && self.outbox.is_empty() {
            self.outbox.urgent.extend(header(HEARTBEAT, 0, 0));
        }
        self.write(done);
    }

    /// Says goodbye after all messages that can be sent. Messages that no one receives are dropped from now on.
    pub(super) fn leave(&mut self, done: &mut Vec<Outcome>) {
        self.leaving = true;
        self.outbox.queue.push_back(Outgoing::of_link(header(GOODBYE, 0, 0)));
        self.write(done);
    }

    /// Tells whether the other end has read everything, or never will.
    pub(super) fn is_over(&self) -> bool {
        self.was_heard || self.ended.is_some()
    }

    /// Tells whether this process copies long messages from the memory of the other end.
    pub(super) fn reads(&self) -> bool {
        self.lending.reads()
    }

    /// Tells whether the other end copies long messages from the memory of this process.
    #[cfg(test)]
    pub(super) fn lends(&self) -> bool {
        self.outbox.lends
    }

    /// Forbids the reading of the other end's memory.
    #[cfg(test)]
    pub(super) fn forbid(&mut self) {
        self.lending.forbid();
    }

    #[cfg(test)]
    pub(super) fn stream(&mut self) -> &mut S {
        self.stream.as_mut().expect("it is open")
    }

    fn end(&mut self, mut ended: LinkEnded) {
        if let (LinkEnded::Broken(why), Some(unread)) = (&mut ended, self.lending.why_given_up()) {
            why.push_str(&format!("; before, its memory could not be copied: {unread}"));
        }
        self.ended = Some(if self.has_left { LinkEnded::Left } else { ended });
        // First of all: memory of sends is used again once they have ended.
        self.lending.end();
        self.incoming = None;
        self.receives.clear();
        self.copies.clear();
        self.asked.clear();
        self.offers.clear();
        self.outbox = Outbox::default();
    }

    fn write(&mut self, done: &mut Vec<Outcome>) {
        let (None, Some(stream)) = (&self.ended, &mut self.stream) else { return };
        if self.outbox.write(stream, done) {
            self.last_write = Instant::now();
        }
    }

    fn read(&mut self, now: Instant, done: &mut Vec<Outcome>) -> Result<(), LinkEnded> {
        let mut budget = TURN;
        loop {
            self.parse(done)?;
            if budget == 0 || (self.stashed[usize::from(CONTROL)] > CONTROL_STASH && !self.leaving) {
                return Ok(());
            }
            if self.incoming.is_none() {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            } else {
                // Its payload was all that the buffer had.
                (self.start, self.end) = (0, 0);
            }
            let (Some(stream), rest) = (&mut self.stream, &mut self.buffer[self.end..]) else { return Ok(()) };
            let count = match &mut self.incoming {
                Some(Incoming { target, read, bytes }) => {
                    let place: &mut [u8] = match target {
                        // SAFETY: the receiver promises its bytes until the request has ended, which is when all are
                        // read; they are initialised, and nothing else refers to them.
                        PayloadTarget::InPlace { into, .. } => unsafe {
                            slice::from_raw_parts_mut(into.add(*read), *bytes - *read)
                        },
                        PayloadTarget::Stash { payload, .. } => &mut payload[*read..],
                        PayloadTarget::Nowhere => &mut [],
                    };
                    let straight = place.len();
                    let mut places = [IoSliceMut::new(place), IoSliceMut::new(rest)];
                    stream.read_vectored(&mut places).inspect(|&count| {
                        *read += count.min(straight);
                        self.end += count - count.min(straight);
                    })
                }
                None => stream.read(rest).inspect(|count| self.end += count),
            };
            match count {
                Ok(0) => return Err(LinkEnded::Dead),
                Ok(count) => {
                    self.last_read = now;
                    budget = budget.saturating_sub(count);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_closed(&error) => return Err(LinkEnded::Dead),
                Err(error) => return Err(LinkEnded::Broken(error.to_string())),
            }
        }
    }

    /// Takes what has been read apart: payloads into place, and frames of the link itself.
    fn parse(&mut self, done: &mut Vec<Outcome>) -> Result<(), LinkEnded> {
        loop {
            if let Some(incoming) = &mut self.incoming {
                let taken = incoming.take(&self.buffer[self.start..self.end]);
                self.start += taken;
                if incoming.read < incoming.bytes {
                    return Ok(());
                }
                match self.incoming.take() {
                    Some(Incoming { target: PayloadTarget::InPlace { request, .. }, bytes, .. }) => {
                        done.push((request, Ok(bytes)));
                    }
                    Some(Incoming { target: PayloadTarget::Stash { on, tag, payload }, .. }) => {
                        match self.take_receive(on, tag) {
                            // It began while the message was arriving.
                            Some(receive) => {
                                self.unannounce(&receive);
                                self.unstash(&receive, &payload, done);
                            }
                            None => self.stash.push_back((on, tag, Stashed::Here(payload))),
                        }
                    }
                    _ => {}
                }
            }
            let Some(&head) = self.buffer[self.start..self.end].first_chunk::<HEADER>() else { return Ok(()) };
            self.start += HEADER;
            self.frame(head, done).map_err(LinkEnded::Broken)?;
        }
    }

    fn frame(&mut self, head: [u8; HEADER], done: &mut Vec<Outcome>) -> Result<(), String> {
        let [kind, MARK, 0, 0, a, b, c, d, length @ ..] = head else {
            return Err(format!("it has sent {head:02x?} where a message should begin"));
        };
        let (tag, length) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(length));
        match (kind, length) {
            (CONTROL | DATA, 0..=LONGEST) => self.message(kind, tag, length as usize, done)?,
            (READY, 0..=1) => self.outbox.announce(length as u8, tag)?,
            (UNREADY, 0..=1) => self.outbox.retract(length as u8, tag),
            (OFFER, 0..=LONGER) => {
                let on = length as u8 & 1;
                self.offers.push_back((on, tag, (length >> 1) as usize));
                if self.offers.len() > ANNOUNCED {
                    return Err(format!("it offers more than {ANNOUNCED} messages"));
                }
                self.refuse_too_long(on, tag, done);
            }
            (TOO_LONG, 0..=LONGER) => self.outbox.refuse(length as u8 & 1, tag, (length >> 1) as usize, done),
            (HEARTBEAT, 0) => {}
            (LENDER, word) if self.lending.hear(tag as usize, word)? => self.outbox.urgent.extend(header(READS, 0, 0)),
            (LENDER, _) => {}
            (READS, 0) if self.lending.lends() => self.outbox.begin_lending(),
            (ADDRESS, address) => self.lending.address = address,
            (LENT, 0..=LONGER) => self.lent(length as u8 & 1, tag, (length >> 1) as usize, done)?,
            (TAKEN, 0..=LONGEST) => self.outbox.taken(tag, (length as usize).checked_sub(1), done)?,
            (UNREAD, 0) => self.outbox.resend(tag)?,
            (RESENT, 0..=LONGEST) => self.resent(tag, length as usize)?,
            (GOODBYE, 0) => {
                self.has_left = true;
                self.outbox.urgent.extend(header(HEARD, 0, 0));
            }
            (HEARD, 0) if self.leaving => self.was_heard = true,
            _ => return Err(format!("it has sent a message of kind {kind} and {length} bytes")),
        }
        self.write(done);
        Ok(())
    }
}
