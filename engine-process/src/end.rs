//! The end of a process among others.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    flight::Flight,
    message::Message,
    progress::{NAP, Progress},
    stream::Event,
};

impl Progress {
    /// Calls whose result nobody waits for are seen through, since others may wait for their part of them: until their deadline, or until the
    /// processes they need have come to their end.
    fn finish_flights(&mut self) {
        while !self.flights.is_empty() {
            self.turn();
            let (gone, dead) = (&self.gone, &self.dead);
            let lost =
                |flight: &Flight| flight.absent.iter().any(|&r| gone[flight.members[r]] || dead[flight.members[r]]);
            self.flights.retain(|flight| !lost(flight) && flight.since.elapsed() < flight.world.timeout);
            thread::sleep(NAP);
        }
        // Dropped, calls that were queued behind the end tell their callers.
        while self.commands.try_recv().is_ok() {}
    }

    /// Says goodbye and waits, for so long, until all others have, if the transport needs that; then ends it. Where some have not, all processes are ended.
    pub(crate) fn finish(mut self, timeout: Duration) {
        self.finish_flights();
        let all: Vec<usize> = (0..self.transport.size()).collect();
        self.tell_others(&all, &Message::Goodbye);
        let own = self.transport.rank();
        let begun = Instant::now();
        let mut events = Vec::new();
        let settled = loop {
            if self.streams.advance(&mut *self.transport, &mut events).is_err() {
                break false;
            }
            for event in events.drain(..) {
                match event {
                    Event::Message(from, Message::Goodbye) => self.gone[from] = true,
                    Event::Dead(rank) => self.dead[rank] = true,
                    Event::Broken(..) | Event::Message(..) => {}
                }
            }
            let is_over = |rank| rank == own || self.gone[rank] || self.dead[rank];
            let ended = !self.transport.ends_together() || (0..self.transport.size()).all(is_over);
            if ended && self.streams.is_flushed() {
                break true;
            }
            if begun.elapsed() > timeout {
                break false;
            }
            thread::sleep(NAP);
        };
        self.streams.close(&mut *self.transport);
        match settled {
            // `MPI_Finalize` may wait for a process that has died: all that are left have said goodbye, and just end.
            true if self.dead.contains(&true) => {}
            true => drop(self.transport.finish()),
            false => self.transport.abort(),
        }
    }
}
