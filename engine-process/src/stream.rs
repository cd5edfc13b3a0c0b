//! Ordered streams of messages between all processes, in packets that a transport sends at once.
//!
//! One receive per peer is always posted, so a message arrives without an answer. If the transport reports deaths, that
//! receive ends with [`Test::Dead`] when its peer dies.

use std::collections::VecDeque;

use numcore::Result;

use super::{
    message::Message,
    transport::{Channel, Request, Test, Transport},
};

/// Bytes of a packet. With MPI's own header it is the largest that shared memory takes without a handshake.
const PACKET: usize = 3968;
/// The number of packets to one peer under way at once.
const UNDER_WAY: usize = 16;
const TAG: u32 = 0;
/// The most bytes in a message; a longer length cannot have been written by another process.
pub(crate) const LARGEST: usize = 1 << 30;

/// An event from a peer.
#[derive(Debug)]
pub(crate) enum Event {
    Message(usize, Message),
    /// The process has died.
    Dead(usize),
    /// The stream of this rank has broken; the string is the transport's reason.
    Broken(usize, String),
}

/// The streams to and from every other process.
pub(crate) struct Streams {
    peers: Vec<Option<Peer>>,
}

struct Peer {
    /// A vector and not a box: it may be moved while the transport holds the address of its memory.
    packet: Vec<u8>,
    receive: Option<Request>,
    arrived: Vec<u8>,
    /// Bytes to be sent; `sends` holds the packets under way, the oldest first.
    queue: VecDeque<u8>,
    sends: VecDeque<(Request, Vec<u8>)>,
}

impl Streams {
    pub(crate) fn new(transport: &mut dyn Transport) -> Result<Self> {
        let (own, size) = (transport.rank(), transport.size());
        let mut peer = |rank| (rank != own).then(|| Peer::new(transport, rank)).transpose();
        Ok(Streams { peers: (0..size).map(&mut peer).collect::<Result<_>>()? })
    }

    /// Queues a message. Messages for a dead process are dropped.
    pub(crate) fn send(&mut self, to: usize, message: &Message) {
        let Some(Some(peer)) = self.peers.get_mut(to) else { return };
        if peer.receive.is_none() {
            return;
        }
        let bytes = message.to_bytes();
        peer.queue.extend((bytes.len() as u64).to_le_bytes());
        peer.queue.extend(bytes);
    }

    /// Tells whether all queued messages have been sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.peers
            .iter()
            .flatten()
            .all(|peer| peer.receive.is_none() || (peer.queue.is_empty() && peer.sends.is_empty()))
    }

    /// Moves packets and appends the events that have arrived to `events`.
    ///
    /// # Errors
    /// The first error of several peers. Bytes that could not be sent stay queued.
    pub(crate) fn advance(&mut self, transport: &mut dyn Transport, events: &mut Vec<Event>) -> Result<()> {
        let mut outcome = Ok(());
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if let Some(peer) = peer {
                let pushed = peer.push(transport, rank);
                outcome = outcome.and(pushed).and(peer.pull(transport, rank, events));
            }
        }
        outcome
    }

    /// Withdraws the receives that are posted.
    pub(crate) fn close(&mut self, transport: &mut dyn Transport) {
        for peer in self.peers.iter_mut().flatten() {
            peer.withdraw(transport);
            // Packets that have not been sent belong to the transport from now on, so they are leaked.
            peer.sends.drain(..).for_each(std::mem::forget);
        }
    }
}

impl Peer {
    fn new(transport: &mut dyn Transport, rank: usize) -> Result<Self> {
        let packet = vec![0; PACKET];
        let (arrived, queue, sends) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let mut peer = Peer { packet, receive: None, arrived, queue, sends };
        peer.post(transport, rank)?;
        Ok(peer)
    }

    fn post(&mut self, transport: &mut dyn Transport, rank: usize) -> Result<()> {
        // SAFETY: the packet is this peer's. It is read only once the request has ended, and leaked if it never does.
        let request = unsafe { transport.receive(Channel::Control, self.packet.as_mut_ptr(), PACKET, rank, TAG) }?;
        self.receive = Some(request);
        Ok(())
    }

    /// Withdraws the receive that is posted.
    fn withdraw(&mut self, transport: &mut dyn Transport) {
        let Some(request) = self.receive.take() else { return };
        transport.cancel(&request);
        // Tested repeatedly: a cancelled receive ends only when MPI next looks at it.
        let ended = (0..1000).any(|_| transport.test(&request) != Test::Pending);
        if !ended {
            std::mem::forget(std::mem::take(&mut self.packet));
        }
    }

    fn push(&mut self, transport: &mut dyn Transport, rank: usize) -> Result<()> {
        while let Some((request, _)) = self.sends.front_mut() {
            match transport.test(request) {
                Test::Pending => break,
                // The receive from this peer reports whether it is dead or broken.
                _ => self.sends.pop_front(),
            };
        }
        while !self.queue.is_empty() && self.sends.len() < UNDER_WAY {
            let length = self.queue.len().min(PACKET);
            let packet: Vec<u8> = self.queue.range(..length).copied().collect();
            // SAFETY: the packet lies on the heap beside its request until that has ended.
            let request = unsafe { transport.send(Channel::Control, packet.as_ptr(), length, rank, TAG) }?;
            self.queue.drain(..length);
            self.sends.push_back((request, packet));
        }
        Ok(())
    }

    fn pull(&mut self, transport: &mut dyn Transport, rank: usize, events: &mut Vec<Event>) -> Result<()> {
        while let Some(request) = &mut self.receive {
            match transport.test(request) {
                Test::Pending => return Ok(()),
                Test::Done(length) => {
                    self.arrived.extend(&self.packet[..length]);
                    self.post(transport, rank)?;
                    if let Some(event) = self.parse(rank, events) {
                        self.withdraw(transport);
                        self.end(event, events);
                    }
                }
                Test::Dead => self.end(Event::Dead(rank), events),
                Test::Failed(words) => self.end(Event::Broken(rank, words), events),
            }
        }
        Ok(())
    }

    fn end(&mut self, event: Event, events: &mut Vec<Event>) {
        self.receive = None;
        self.queue.clear();
        events.push(event);
    }

    /// Parses the whole messages that have arrived. Returns an event if the following bytes cannot be a message, which
    /// ends the stream.
    fn parse(&mut self, rank: usize, events: &mut Vec<Event>) -> Option<Event> {
        let mut rest = &self.arrived[..];
        while let Some((length, after)) = rest.split_first_chunk::<8>() {
            let length = u64::from_le_bytes(*length);
            if length > LARGEST as u64 {
                return Some(Event::Broken(rank, format!("one has a length of {length} bytes")));
            }
            let Some((message, after)) = after.split_at_checked(length as usize) else { break };
            rest = after;
            events.push(match Message::from_bytes(message) {
                Ok(message) => Event::Message(rank, message),
                Err(error) => Event::Broken(rank, error.to_string()),
            });
        }
        let read = self.arrived.len() - rest.len();
        self.arrived.drain(..read);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use numcore::Error;

    use super::*;

    /// The first of three processes; its sends to the second fail for a while.
    #[derive(Default)]
    struct Flaky {
        fails: usize,
        sent: [Vec<u8>; 3],
    }

    impl Transport for Flaky {
        fn name(&self) -> &'static str {
            "a test's"
        }

        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            3
        }

        fn tags(&self) -> u32 {
            1 << 15
        }

        fn reports_deaths(&self) -> Result<(), String> {
            Ok(())
        }

        fn ends_together(&self) -> bool {
            false
        }

        // SAFETY: asked of callers as the trait says.
        unsafe fn send(&mut self, _: Channel, from: *const u8, bytes: usize, to: usize, _: u32) -> Result<Request> {
            if to == 1 && self.fails > 0 {
                self.fails -= 1;
                return Err(Error::argument("send", "no space left"));
            }
            // SAFETY: the caller's promise: the bytes are there.
            self.sent[to].extend_from_slice(unsafe { slice::from_raw_parts(from, bytes) });
            Ok(Request(1))
        }

        // SAFETY: asked of callers as the trait says.
        unsafe fn receive(&mut self, _: Channel, _: *mut u8, _: usize, _: usize, _: u32) -> Result<Request> {
            Ok(Request(0))
        }

        fn test(&mut self, request: &Request) -> Test {
            if request.0 == 1 { Test::Done(0) } else { Test::Pending }
        }

        fn cancel(&mut self, _: &Request) {}

        fn moves_while_tested(&self) -> bool {
            false
        }

        fn abort(&mut self) {}

        fn finish(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_length_that_no_message_has_breaks_the_stream() {
        let mut flaky = Flaky::default();
        let mut peer = Peer::new(&mut flaky, 1).unwrap();
        let (message, mut events) = (Message::Goodbye.to_bytes(), Vec::new());
        peer.arrived.extend((message.len() as u64).to_le_bytes());
        peer.arrived.extend(&message);
        peer.arrived.extend(u64::MAX.to_le_bytes());
        assert!(matches!(peer.parse(1, &mut events), Some(Event::Broken(1, _))));
        assert!(matches!(events[..], [Event::Message(1, Message::Goodbye)]));
    }

    #[test]
    fn what_could_not_be_sent_is_sent_later_and_delays_nobody_else() {
        let mut flaky = Flaky { fails: 2, ..Flaky::default() };
        let mut streams = Streams::new(&mut flaky).unwrap();
        let group: crate::message::GroupId = [0, 7].into();
        for _ in 0..1000 {
            (1..3).for_each(|rank| streams.send(rank, &Message::Leave(group.clone())));
        }
        assert!(streams.advance(&mut flaky, &mut Vec::new()).is_err());
        assert!(!flaky.sent[2].is_empty() && flaky.sent[1].is_empty());
        while !streams.is_flushed() {
            let _ = streams.advance(&mut flaky, &mut Vec::new());
        }
        assert_eq!(flaky.sent[1], flaky.sent[2]);
        // A complete message is its length and its bytes.
        let message = Message::Leave(group).to_bytes();
        assert_eq!(flaky.sent[1].len(), 1000 * (8 + message.len()));
    }
}
