//! Messages to be sent over one connection.

use std::{
    collections::VecDeque,
    io::{ErrorKind, IoSlice, Write},
};

use super::frame::{
    ADDRESS, HEADER, LENT, OFFER, Outcome, Outgoing, RESENT, TURN, header, part, too_long, with_channel,
};

/// The most bytes of a message that is sent before its receive is known.
pub(super) const EAGER: usize = 16 << 10;
/// The most announced receives without a message, and offered messages without a receive.
pub(super) const ANNOUNCED: usize = 1 << 16;

#[derive(Default)]
pub(super) struct Outbox {
    pub(super) queue: VecDeque<Outgoing>,
    /// Headers that overtake messages.
    pub(super) urgent: Vec<u8>,
    /// Long messages for which no receive was announced, and short ones of their tag that follow them.
    held: VecDeque<Outgoing>,
    /// Receives that the other end has announced, without a message so far.
    announced: VecDeque<(u8, u32)>,
    /// True if the other end copies long messages from the memory of this process.
    pub(super) lends: bool,
    /// The messages that are lent, with their numbers.
    lent: VecDeque<(u32, Outgoing)>,
    /// The number of messages that were lent so far.
    numbered: u32,
    /// True after an error of the connection.
    has_failed: bool,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.urgent.is_empty()
    }

    /// Queues a message, or offers it and holds it until its receive is announced.
    pub(super) fn push(&mut self, message: Outgoing) {
        let (on, tag) = message.address();
        if message.bytes > EAGER && self.lends {
            self.lend(message);
        } else if message.bytes > EAGER || self.held.iter().any(|held| held.address() == (on, tag)) {
            let (bytes, held) = (message.bytes, self.held.len());
            self.held.push_back(message);
            self.release(on, tag);
            if self.held.len() > held {
                self.queue.push_back(Outgoing::of_link(header(OFFER, tag, with_channel(bytes, on))));
            }
        } else {
            self.queue.push_back(message);
        }
    }

    /// Notes a receive of the other end.
    pub(super) fn announce(&mut self, on: u8, tag: u32) -> Result<(), String> {
        self.announced.push_back((on, tag));
        self.release(on, tag);
        let is_full = self.announced.len() > ANNOUNCED;
        if is_full { Err(format!("it waits for more than {ANNOUNCED} messages")) } else { Ok(()) }
    }

    /// Ends the first held message of a tag, whose receive is too short.
    pub(super) fn refuse(&mut self, on: u8, tag: u32, room: usize, done: &mut Vec<Outcome>) {
        if let Some(message) =
            self.held.iter().position(|held| held.address() == (on, tag)).and_then(|place| self.held.remove(place))
        {
            done.extend(message.request.map(|request| (request, Err(too_long(message.bytes, room)))));
            self.release(on, tag);
        }
    }

    /// Forgets a receive that has ended otherwise.
    pub(super) fn retract(&mut self, on: u8, tag: u32) {
        if let Some(place) = self.announced.iter().position(|announced| *announced == (on, tag)) {
            self.announced.remove(place);
        }
    }

    /// Queues the held messages of a tag for which receives are announced, in their order.
    fn release(&mut self, on: u8, tag: u32) {
        while let Some(place) = self.held.iter().position(|held| held.address() == (on, tag)) {
            if self.held[place].bytes > EAGER {
                let Some(announced) = self.announced.iter().position(|of| *of == (on, tag)) else { return };
                self.announced.remove(announced);
            }
            self.queue.extend(self.held.remove(place));
        }
    }

    /// Lends long messages from now on, and those that are held: the other end needs no announced receives for them.
    pub(super) fn begin_lending(&mut self) {
        self.lends = true;
        self.announced.clear();
        for message in std::mem::take(&mut self.held) {
            if message.bytes > EAGER { self.lend(message) } else { self.queue.push_back(message) }
        }
    }

    fn lend(&mut self, message: Outgoing) {
        let ((on, tag), bytes) = (message.address(), message.bytes);
        self.queue.push_back(Outgoing::of_link(header(ADDRESS, 0, message.from as usize)));
        self.queue.push_back(Outgoing::of_link(header(LENT, tag, with_channel(bytes, on))));
        self.lent.push_back((self.numbered, message));
        self.numbered = self.numbered.wrapping_add(1);
    }

    /// Ends a message that is lent: the other end has it, or has less room for it.
    pub(super) fn taken(&mut self, number: u32, room: Option<usize>, done: &mut Vec<Outcome>) -> Result<(), String> {
        let Outgoing { request, bytes, .. } = self.take_lent(number)?;
        done.extend(request.map(|request| (request, room.map_or(Ok(0), |room| Err(too_long(bytes, room))))));
        Ok(())
    }

    /// Queues the bytes of a message that is lent, which the other end cannot copy. Nothing is lent any more.
    pub(super) fn resend(&mut self, number: u32) -> Result<(), String> {
        self.lends = false;
        let message = self.take_lent(number)?;
        self.queue.push_back(Outgoing { header: header(RESENT, number, message.bytes), ..message });
        Ok(())
    }

    fn take_lent(&mut self, number: u32) -> Result<Outgoing, String> {
        let place = self.lent.iter().position(|(own, _)| *own == number);
        let (_, message) =
            place.and_then(|place| self.lent.remove(place)).ok_or("it has copied a message that nobody lends")?;
        Ok(message)
    }

    /// Writes what the connection takes. Returns true if it took anything. After an error nothing is written any more:
    /// reading finds the end.
    pub(super) fn write(&mut self, stream: &mut impl Write, done: &mut Vec<Outcome>) -> bool {
        let mut total = 0;
        if self.has_failed {
            self.queue.clear();
            self.urgent.clear();
        }
        while total < TURN && !self.is_empty() {
            // A message that has begun goes on: headers come between messages.
            let message = self.queue.front_mut().filter(|message| message.written > 0 || self.urgent.is_empty());
            let written = match &message {
                Some(message) => {
                    let sent = message.written.saturating_sub(HEADER);
                    // SAFETY: the sender promises its bytes until the request has ended, which is when all are written.
                    let payload = unsafe { part(message.from.wrapping_add(sent), message.bytes - sent) };
                    let head = &message.header[message.written.min(HEADER)..];
                    stream.write_vectored(&[IoSlice::new(head), IoSlice::new(payload)])
                }
                None => stream.write(&self.urgent),
            };
            match (written, message) {
                (Ok(count @ 1..), Some(message)) => {
                    total += count;
                    message.written += count;
                    if message.written == HEADER + message.bytes {
                        done.extend(message.request.map(|request| (request, Ok(0))));
                        self.queue.pop_front();
                    }
                }
                (Ok(count @ 1..), None) => {
                    total += count;
                    self.urgent.drain(..count);
                }
                (Err(error), _) if error.kind() == ErrorKind::WouldBlock => break,
                (Err(error), _) if error.kind() == ErrorKind::Interrupted => {}
                (Ok(0) | Err(_), _) => {
                    self.has_failed = true;
                    self.queue.clear();
                    self.urgent.clear();
                }
            }
        }
        total > 0
    }
}
