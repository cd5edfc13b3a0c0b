//! The transport of messages over one connection to each other process.

use std::{
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use numcore::{Error, Result};

use super::{
    frame::{LinkEnded, Outcome},
    link::TcpLink,
};
use crate::{Channel, Request, Test, Transport};

/// The least time for which a process that leaves waits for the others to have read its last messages.
const LINGER: Duration = Duration::from_secs(2);

pub(super) struct TcpTransport<S: Read + Write> {
    rank: usize,
    silence: Duration,
    peers: Vec<Option<TcpPeer<S>>>,
    /// The operations under way, by the numbers of their requests; `free` lists those that can be used again.
    operations: Vec<TcpOperation>,
    free: Vec<usize>,
    done: Vec<Outcome>,
    last_beat: Instant,
}

struct TcpPeer<S> {
    link: TcpLink<S>,
    /// True once a receive of the control channel has reported the end.
    is_reported: bool,
}

enum TcpOperation {
    With { peer: usize, on: Channel, is_send: bool },
    Ended(Test),
}

impl<S: Read + Write> TcpTransport<S> {
    /// Takes the connections to the other processes, by rank.
    pub(super) fn new(rank: usize, connections: Vec<Option<S>>, silence: Duration) -> Self {
        let peer = |stream| TcpPeer { link: TcpLink::new(stream), is_reported: false };
        let peers = connections.into_iter().map(|stream| stream.map(peer)).collect();
        TcpTransport {
            rank,
            silence,
            peers,
            operations: Vec::new(),
            free: Vec::new(),
            done: Vec::new(),
            last_beat: Instant::now(),
        }
    }

    /// Allows the others this time to end their joining, in which they write nothing.
    pub(super) fn await_others(mut self, most: Duration) -> Self {
        self.peers.iter_mut().flatten().for_each(|peer| peer.link.await_first(most));
        self
    }

    /// Lends long messages to a process of this host.
    pub(super) fn lend_to(&mut self, rank: usize) {
        self.peers[rank].iter_mut().for_each(|peer| peer.link.lend());
    }

    /// Tells whether a process copies long messages from the memory of this one.
    #[cfg(test)]
    pub(super) fn lends_to(&self, rank: usize) -> bool {
        self.peers[rank].as_ref().is_some_and(|peer| peer.link.lends())
    }

    /// Forbids the reading of a process's memory.
    #[cfg(test)]
    pub(super) fn forbid(&mut self, rank: usize) {
        self.peers[rank].iter_mut().for_each(|peer| peer.link.forbid());
    }

    fn register(&mut self, peer: usize, on: Channel, is_send: bool) -> usize {
        let operation = TcpOperation::With { peer, on, is_send };
        let Some(number) = self.free.pop() else {
            self.operations.push(operation);
            return self.operations.len() - 1;
        };
        self.operations[number] = operation;
        number
    }

    /// Writes to all processes in time, though the turns of one may take long.
    fn beat(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.last_beat) > self.silence / 16 {
            self.last_beat = now;
            self.peers.iter_mut().flatten().for_each(|peer| peer.link.beat(now, self.silence, &mut self.done));
        }
    }

    /// Records the operations that have ended.
    fn settle(&mut self) {
        for (request, outcome) in self.done.drain(..) {
            self.operations[request] = TcpOperation::Ended(outcome.map_or_else(Test::Failed, Test::Done));
        }
    }

    /// The state of an operation with a process from which nothing more comes.
    fn end_of(&mut self, peer: usize, on: Channel, is_send: bool) -> Test {
        let Some(Some(peer)) = self.peers.get_mut(peer) else { return Test::Pending };
        let test = match &peer.link.ended {
            // It takes nothing more, by its own choice.
            Some(LinkEnded::Left) if is_send => return Test::Done(0),
            None | Some(LinkEnded::Left) => return Test::Pending,
            Some(LinkEnded::Dead) => Test::Dead,
            Some(LinkEnded::Broken(why)) => Test::Failed(why.clone()),
        };
        // The control channel's receive names the process, so it is the first to fail.
        peer.is_reported |= on == Channel::Control;
        if peer.is_reported { test } else { Test::Pending }
    }

    /// Says goodbye to all others, after all messages that can be sent.
    pub(super) fn say_goodbye(&mut self) {
        self.peers.iter_mut().flatten().for_each(|peer| peer.link.leave(&mut self.done));
    }

    /// Lets all connections make progress; returns true once the others have read the goodbye, or never will.
    pub(super) fn has_parted(&mut self) -> bool {
        self.peers.iter_mut().flatten().for_each(|peer| peer.link.turn(self.silence, &mut self.done));
        self.peers.iter().flatten().all(|peer| peer.link.is_over())
    }
}

impl<S: Read + Write> Transport for TcpTransport<S> {
    fn name(&self) -> &'static str {
        "TCP"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn tags(&self) -> u32 {
        1 << 30
    }

    fn reports_deaths(&self) -> Result<(), String> {
        Ok(())
    }

    fn ends_together(&self) -> bool {
        false
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn send(&mut self, on: Channel, from: *const u8, bytes: usize, to: usize, tag: u32) -> Result<Request> {
        let request = self.register(to, on, true);
        let Some(Some(peer)) = self.peers.get_mut(to) else {
            return Err(Error::range("send", "rank", to, "another process"));
        };
        if peer.link.ended.is_none() {
            // SAFETY: the caller's promise; the link is dropped with this transport.
            unsafe { peer.link.send(on, from, bytes, tag, request, &mut self.done) };
        }
        self.settle();
        Ok(Request(request))
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn receive(&mut self, on: Channel, into: *mut u8, bytes: usize, from: usize, tag: u32) -> Result<Request> {
        let request = self.register(from, on, false);
        let Some(Some(peer)) = self.peers.get_mut(from) else {
            return Err(Error::range("receive", "rank", from, "another process"));
        };
        // SAFETY: the caller's promise; the link is dropped with this transport.
        unsafe { peer.link.receive(on, into, bytes, tag, request, &mut self.done) };
        self.settle();
        Ok(Request(request))
    }

    fn test(&mut self, request: &Request) -> Test {
        if let TcpOperation::With { peer, .. } = self.operations[request.0]
            && let Some(Some(peer)) = self.peers.get_mut(peer)
        {
            peer.link.turn(self.silence, &mut self.done);
            self.beat();
            self.settle();
        }
        let test = match &mut self.operations[request.0] {
            TcpOperation::Ended(test) => test.clone(),
            &mut TcpOperation::With { peer, on, is_send } => self.end_of(peer, on, is_send),
        };
        if test != Test::Pending {
            self.free.push(request.0);
        }
        test
    }

    fn cancel(&mut self, request: &Request) {
        if let TcpOperation::With { peer, .. } = self.operations[request.0] {
            if let Some(Some(peer)) = self.peers.get_mut(peer) {
                peer.link.cancel(request.0);
            }
            self.operations[request.0] = TcpOperation::Ended(Test::Done(0));
        }
    }

    fn moves_while_tested(&self) -> bool {
        // This thread copies messages that others lend, and they wait for that.
        self.peers.iter().flatten().any(|peer| peer.link.reads())
    }

    fn abort(&mut self) {}

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl<S: Read + Write> Drop for TcpTransport<S> {
    /// Waits for a while until the others have read the last messages, which an earlier end could cost them.
    fn drop(&mut self) {
        let (begun, most) = (Instant::now(), LINGER.max(self.silence));
        self.say_goodbye();
        while !self.has_parted() && begun.elapsed() < most {
            thread::sleep(Duration::from_micros(200));
        }
    }
}
