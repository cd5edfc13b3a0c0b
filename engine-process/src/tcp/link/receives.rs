//! The receives of a connection, and the messages that come to them.

use std::{
    io::{Read, Write},
    slice,
};

use super::{
    super::{
        frame::{
            Incoming, LentCopy, LentMessage, Outcome, PayloadTarget, READY, Stashed, TAKEN, TOO_LONG, TcpReceive,
            UNREAD, UNREADY, header, too_long, with_channel,
        },
        outbox::{ANNOUNCED, EAGER},
    },
    COPIED, STASH, TcpLink,
};

impl<S: Read + Write> TcpLink<S> {
    /// Ends receives whose message waits at the other end, and for ever: they are too short, and were not announced.
    pub(super) fn refuse_too_long(&mut self, on: u8, tag: u32, done: &mut Vec<Outcome>) {
        loop {
            let offer = self.offers.iter().position(|&(of, offered, _)| (of, offered) == (on, tag));
            let place = self.receives.iter().position(|receive| (receive.on, receive.tag) == (on, tag));
            let (Some(offer), Some(place)) = (offer, place) else { return };
            let (bytes, room) = (self.offers[offer].2, self.receives[place].room);
            if room > EAGER || bytes <= room {
                return;
            }
            self.offers.remove(offer);
            done.push((self.receives.remove(place).request, Err(too_long(bytes, room))));
            self.outbox.urgent.extend(header(TOO_LONG, tag, with_channel(room, on)));
        }
    }

    /// Begins to read a message: to its receive, or to memory of its own.
    pub(super) fn message(&mut self, on: u8, tag: u32, bytes: usize, done: &mut Vec<Outcome>) -> Result<(), String> {
        self.forget_offer(on, tag);
        let target = match self.take_receive(on, tag) {
            Some(receive) => {
                if bytes <= EAGER {
                    self.unannounce(&receive);
                }
                if bytes > receive.room {
                    done.push((receive.request, Err(too_long(bytes, receive.room))));
                    PayloadTarget::Nowhere
                } else {
                    PayloadTarget::InPlace { request: receive.request, into: receive.into }
                }
            }
            None if self.leaving => PayloadTarget::Nowhere,
            None => {
                let stashed = &mut self.stashed[usize::from(on)];
                if *stashed + bytes > STASH {
                    return Err(format!("it has sent more than {STASH} bytes that no call of this process receives"));
                }
                *stashed += bytes;
                PayloadTarget::Stash { on, tag, payload: vec![0; bytes] }
            }
        };
        self.incoming = Some(Incoming { target, read: 0, bytes });
        Ok(())
    }

    /// Takes note of a message that is lent, and begins its copy if its receive has begun.
    pub(super) fn lent(&mut self, on: u8, tag: u32, bytes: usize, done: &mut Vec<Outcome>) -> Result<(), String> {
        self.forget_offer(on, tag);
        let message = self.lending.next(bytes)?;
        match self.take_receive(on, tag) {
            Some(receive) => {
                if !self.lending.reads() {
                    self.unannounce(&receive);
                }
                self.begin_copy(receive, message, done);
            }
            None if self.leaving => self.outbox.urgent.extend(header(TAKEN, message.number, 0)),
            None if self.stash.len() > ANNOUNCED => return Err(format!("it lends more than {ANNOUNCED} messages")),
            None => self.stash.push_back((on, tag, Stashed::Lent(message))),
        }
        Ok(())
    }

    /// Begins to copy a message that is lent, unless its receive is shorter.
    pub(super) fn begin_copy(&mut self, receive: TcpReceive, message: LentMessage, done: &mut Vec<Outcome>) {
        if message.bytes > receive.room {
            self.outbox.urgent.extend(header(TAKEN, message.number, receive.room + 1));
            return done.push((receive.request, Err(too_long(message.bytes, receive.room))));
        }
        self.copies.push_back(LentCopy { receive, message, copied: 0 });
    }

    /// Copies messages that are lent, in turns. One that cannot be copied is asked for.
    pub(super) fn copy(&mut self, done: &mut Vec<Outcome>) {
        let mut budget = COPIED;
        while let Some(LentCopy { receive, message, copied }) = self.copies.front_mut().filter(|_| budget > 0) {
            let (part, from) = ((message.bytes - *copied).min(budget), message.address.wrapping_add(*copied as u64));
            // SAFETY: the receiver promises `room` bytes, which the message fits, until the request has ended; they are
            // initialised, and nothing else refers to them.
            let place = unsafe { slice::from_raw_parts_mut(receive.into.add(*copied), part) };
            let outcome = self.lending.copy(from, place);
            (*copied, budget) = (*copied + part, budget - part);
            if outcome.is_ok() && *copied < message.bytes {
                continue;
            }
            let (request, number, bytes) = (receive.request, message.number, message.bytes);
            let copy = self.copies.pop_front();
            if let Err(why) = outcome {
                self.outbox.urgent.extend(header(UNREAD, number, 0));
                self.asked.extend(copy);
                self.read_no_more(why);
            } else {
                self.outbox.urgent.extend(header(TAKEN, number, 0));
                done.push((request, Ok(bytes)));
            }
        }
        self.write(done);
    }

    /// Announces all receives from now on, and those that have begun, as the other end lends nothing any more.
    fn read_no_more(&mut self, why: String) {
        if self.lending.give_up(why) {
            let long = self.receives.iter().filter(|receive| receive.room > EAGER);
            let announced = long.map(|receive| header(READY, receive.tag, usize::from(receive.on)));
            self.outbox.urgent.extend(announced.flatten());
        }
    }

    /// Begins to read the bytes of a message that this process has asked for.
    pub(super) fn resent(&mut self, number: u32, bytes: usize) -> Result<(), String> {
        let place = self.asked.iter().position(|copy| copy.message.number == number);
        let target = match place.map(|place| self.asked.swap_remove(place)) {
            Some(LentCopy { receive, message, .. }) if message.bytes == bytes => {
                PayloadTarget::InPlace { request: receive.request, into: receive.into }
            }
            Some(_) => return Err(format!("it has sent {bytes} bytes in place of the message that it has lent")),
            // Its receive was withdrawn.
            None => PayloadTarget::Nowhere,
        };
        self.incoming = Some(Incoming { target, read: 0, bytes });
        Ok(())
    }

    /// Forgets the first offer of a tag, whose message has come.
    fn forget_offer(&mut self, on: u8, tag: u32) {
        if let Some(offer) = self.offers.iter().position(|&(of, offered, _)| (of, offered) == (on, tag)) {
            self.offers.remove(offer);
        }
    }

    /// Takes the first receive of a tag.
    pub(super) fn take_receive(&mut self, on: u8, tag: u32) -> Option<TcpReceive> {
        let place = self.receives.iter().position(|receive| (receive.on, receive.tag) == (on, tag))?;
        Some(self.receives.remove(place))
    }

    pub(super) fn unannounce(&mut self, receive: &TcpReceive) {
        if receive.room > EAGER {
            self.outbox.urgent.extend(header(UNREADY, receive.tag, usize::from(receive.on)));
        }
    }
}
