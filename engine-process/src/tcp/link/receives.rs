//! The receives of a connection, and the messages that come to them.

use std::{
    io::{Read, Write},
    slice,
};

use super::{
    super::{
        frame::{
            Incoming, LentMessage, Outcome, PayloadTarget, Stashed, TAKEN, TOO_LONG, TcpReceive, UNREADY, header,
            too_long, with_channel,
        },
        outbox::{ANNOUNCED, EAGER},
    },
    STASH, TcpLink,
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

    /// Takes note of a message that is lent, and copies it if its receive has begun.
    pub(super) fn lent(&mut self, on: u8, tag: u32, bytes: usize, done: &mut Vec<Outcome>) -> Result<(), String> {
        self.forget_offer(on, tag);
        let message = self.lending.next(bytes);
        match self.take_receive(on, tag) {
            Some(receive) => self.copy_lent(&receive, message, done),
            None if self.leaving => self.outbox.urgent.extend(header(TAKEN, message.number, 0)),
            None if self.stash.len() > ANNOUNCED => return Err(format!("it lends more than {ANNOUNCED} messages")),
            None => self.stash.push_back((on, tag, Stashed::Lent(message))),
        }
        Ok(())
    }

    /// Copies a message that is lent to its receive.
    pub(super) fn copy_lent(&mut self, receive: &TcpReceive, message: LentMessage, done: &mut Vec<Outcome>) {
        let (&TcpReceive { request, into, room, .. }, LentMessage { number, address, bytes }) = (receive, message);
        if bytes > room {
            self.outbox.urgent.extend(header(TAKEN, number, room + 1));
            return done.push((request, Err(too_long(bytes, room))));
        }
        // SAFETY: the receiver promises `room` bytes until the request has ended; they are initialised, and nothing
        // else refers to them.
        let place = unsafe { slice::from_raw_parts_mut(into, bytes) };
        if self.lending.copy(address, place) {
            done.push((request, Ok(bytes)));
            self.outbox.urgent.extend(header(TAKEN, number, 0));
        }
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
