//! The end of a process: pending calls, goodbyes and the end of the transport.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{NAP, Progress};
use crate::{flight::Flight, message::Message, stream::Event};

impl Progress {
    /// Completes the calls whose result no thread of this process waits for, since other ranks may wait for this rank's
    /// part of them. A call is given up once a process that has not joined it has ended, and at its own deadline. A
    /// process that has left the group fails it, as before the end. Others may compile kernels before the first
    /// of a kind, or save before one with a time of its own.
    fn finish_flights(&mut self) {
        while !self.flights.is_empty() {
            self.turn();
            let (gone, dead) = (&self.gone, &self.dead);
            let is_needed = |flight: &Flight| {
                let mut absent = flight.absent.iter().map(|&r| flight.members[r]);
                let is_lost = absent.any(|rank| gone[rank] || dead[rank]);
                !is_lost && flight.waited() < flight.timeout
            };
            self.flights.retain(is_needed);
            thread::sleep(NAP);
        }
        // Dropping a call that was queued behind the end reports the error to its caller.
        while self.commands.try_recv().is_ok() {}
    }

    /// Says goodbye to all processes and ends the transport. If the transport requires it, first waits for the goodbyes
    /// of all others, for at most `timeout`. If some are missing by then, all processes are aborted.
    pub(crate) fn finish(mut self, timeout: Duration) {
        self.finish_flights();
        let all: Vec<usize> = (0..self.transport.size()).collect();
        self.send_to_all(&all, &Message::Goodbye);
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
            // `MPI_Finalize` may wait for a dead process. All survivors have said goodbye, so this one just ends.
            true if self.dead.contains(&true) => {}
            true => drop(self.transport.finish()),
            false => self.transport.abort(),
        }
    }
}
