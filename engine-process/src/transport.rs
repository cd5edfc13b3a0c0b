//! The interface of libraries that carry messages between processes.

use numcore::Result;

/// The purpose of a message. Messages of one channel never match receives of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Packets of the message streams, which carry headers.
    Control,
    /// Data of calls.
    Data,
}

/// An operation under way, identified by a number of its transport. It must be tested until it ends. Dropping it leaves
/// the operation, and the memory it was given, to the transport.
#[derive(Debug, PartialEq, Eq)]
pub struct Request(pub usize);

/// The state of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    /// The operation is under way.
    Pending,
    /// The operation has ended, with the number of bytes that arrived.
    Done(usize),
    /// The process at the other end has died.
    Dead,
    /// The operation failed, with the transport's reason.
    Failed(String),
}

/// Messages between two processes, by MPI's rules. An operation is started and then tested until it has ended. A
/// message matches the first receive that was started for its sender, channel and tag. Messages with equal sender,
/// channel and tag stay in order.
///
/// A transport has no collectives: this crate makes them of messages. It is used only on the thread that made it.
pub trait Transport {
    /// The name of the transport in error messages.
    fn name(&self) -> &'static str;

    /// The rank of this process among all that were started.
    fn rank(&self) -> usize;

    /// The number of processes that were started.
    fn size(&self) -> usize;

    /// The exclusive upper bound of tags, at least 2¹⁵.
    fn tags(&self) -> u32;

    /// Returns `Ok` if the transport reports the death of a process to the others.
    ///
    /// # Errors
    /// The reason that it does not. A world with a dead process then ends at a deadline, and the survivors can make no
    /// other.
    fn reports_deaths(&self) -> Result<(), String>;

    /// Tells whether [`finish`](Transport::finish) needs all processes to be at their end.
    fn ends_together(&self) -> bool;

    /// Starts to send `bytes` bytes, fewer than 2³¹.
    ///
    /// # Safety
    /// The bytes stay in place and unchanged until the request has ended, and forever if it never does.
    unsafe fn send(&mut self, on: Channel, from: *const u8, bytes: usize, to: usize, tag: u32) -> Result<Request>;

    /// Starts to receive at most `bytes` bytes, fewer than 2³¹.
    ///
    /// # Safety
    /// Nothing else reads or writes the bytes until the request has ended, or ever if it does not.
    unsafe fn receive(&mut self, on: Channel, into: *mut u8, bytes: usize, from: usize, tag: u32) -> Result<Request>;

    /// Lets the transport make progress, and returns the state of a request. Not called again once the request has
    /// ended.
    fn test(&mut self, request: &Request) -> Test;

    /// Withdraws a receive that no message will match. The caller still tests it until it has ended.
    fn cancel(&mut self, request: &Request);

    /// Tells whether operations advance only while they are [tested](Transport::test). The caller then tests without
    /// pausing.
    fn moves_while_tested(&self) -> bool;

    /// Aborts all processes that it can, this one included, with an exit code other than 0. Does nothing if the
    /// transport cannot abort.
    fn abort(&mut self);

    /// Ends the transport after the last message. Not called once a process has died, since the end might wait for it.
    fn finish(self: Box<Self>) -> Result<()>;
}
