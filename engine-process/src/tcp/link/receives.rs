//! The receives of a connection, and the messages that come to them.

use std::{
    io::{Read, Write},
    slice,
};

use super::{
    super::{
        frame::{
            Incoming, Outcome, PayloadTarget, TAKEN, TOO_LONG, TcpReceive, UNREADY, header, too_long, with_channel,
        },
        outbox::EAGER,
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
        if let Some(offer) = self.offers.iter().position(|&(of, offered, _)| (of, offered) == (on, tag)) {
            self.offers.remove(offer);
        }
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

    /// Copies a message that is lent to its receive. Without one it is dropped: the receive was withdrawn.
    pub(super) fn copy_lent(&mut self, on: u8, tag: u32, bytes: usize, done: &mut Vec<Outcome>) {
        self.outbox.urgent.extend(header(TAKEN, 0, 0));
        let Some(TcpReceive { request, into, room, .. }) = self.take_receive(on, tag) else { return };
        if bytes > room {
            return done.push((request, Err(too_long(bytes, room))));
        }
        // SAFETY: the receiver promises `room` bytes until the request has ended; they are initialised, and nothing
        // else refers to them.
        let place = unsafe { slice::from_raw_parts_mut(into, bytes) };
        if self.lending.copy(place) {
            done.push((request, Ok(bytes)));
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
