//! What is asked of whatever carries messages between processes.

use numcore::Result;

/// What an operation works on. Messages of one channel never meet those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Packets of the message streams.
    Control,
    /// Memory of calls.
    Data,
}

/// An operation under way, by the number that its transport gave it. It must be tested until it ends; dropping it leaves
/// it to the transport, with the memory it was given.
#[derive(Debug, PartialEq, Eq)]
pub struct Request(pub usize);

/// Whether an operation has ended, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    /// It is under way.
    Pending,
    /// It has ended; how many bytes arrived.
    Done(usize),
    /// The process at the other end has died.
    Dead,
    /// It failed, in the transport's words.
    Failed(String),
}

/// Messages between two processes, with MPI's rules: an operation is started and tested until it has ended; a message goes to the first receive that was started
/// for its sender, channel and tag, and messages with the same of all three stay in order.
///
/// Nothing else is needed of what joins processes: collectives are made of messages here. It is used on the thread that made it, by no other.
pub trait Transport {
    /// What errors call it.
    fn name(&self) -> &'static str;

    /// This process among all that were started.
    fn rank(&self) -> usize;

    /// How many processes were started.
    fn size(&self) -> usize;

    /// Tags are below this; at least 2¹⁵.
    fn tags(&self) -> u32;

    /// Why the death of a process is not reported to the others, if it is not: then a world ends at a deadline, and those that are left can make no other.
    fn reports_deaths(&self) -> Result<(), String>;

    /// Whether [`finish`](Transport::finish) needs all processes to be at their end.
    fn ends_together(&self) -> bool;

    /// Starts to send bytes, fewer than 2³¹.
    ///
    /// # Safety
    /// They stay where they are and unchanged until the request has ended; for good if it never does.
    unsafe fn send(&mut self, on: Channel, from: *const u8, bytes: usize, to: usize, tag: u32) -> Result<Request>;

    /// Starts to receive at most so many bytes, fewer than 2³¹.
    ///
    /// # Safety
    /// Nobody reads or writes them until the request has ended; never again if it does not.
    unsafe fn receive(&mut self, on: Channel, into: *mut u8, bytes: usize, from: usize, tag: u32) -> Result<Request>;

    /// Lets the transport work, and says whether a request has ended. Not to be asked again once it has.
    fn test(&mut self, request: &Request) -> Test;

    /// Withdraws a receive that nothing will match. It is tested until it has ended.
    fn cancel(&mut self, request: &Request);

    /// Whether what is under way moves only while it is [tested](Transport::test): then that is done without a pause.
    fn moves_while_tested(&self) -> bool;

    /// Ends all processes that can be ended from here, this one included, with an exit code that is not 0. Where there is no way to, it does nothing.
    fn abort(&mut self);

    /// Ends it, after the last message. Not called where a process has died that it would wait for.
    fn finish(self: Box<Self>) -> Result<()>;
}
