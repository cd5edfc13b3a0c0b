//! What is asked of NCCL: some twenty functions. There is one implementation over the library, and one on the host, for tests.

use std::sync::atomic::AtomicUsize;

use comm::ReduceOp;
use numcore::DType;

/// An error code of NCCL (`ncclResult_t`), 0 without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub(crate) const SUCCESS: Status = Status(0);
    /// The library works on it; nothing else may be asked of the communicator meanwhile.
    pub(crate) const IN_PROGRESS: Status = Status(7);
}

/// A communicator of the library (`ncclComm_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RawComm(pub usize);

/// What the ranks of a new communicator find each other by (`ncclUniqueId`).
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub [u8; 128]);

/// Elements of a type the library knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elements {
    pub count: usize,
    pub dtype: DType,
}

/// Work that a rank queues on a stream. Addresses are the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    AllReduce {
        at: u64,
        of: Elements,
        op: ReduceOp,
    },
    Reduce {
        at: u64,
        of: Elements,
        op: ReduceOp,
        root: usize,
    },
    /// `of`: elements of one rank's part, which is written to `to`.
    ReduceScatter {
        from: u64,
        to: u64,
        of: Elements,
        op: ReduceOp,
    },
    /// `bytes` of one rank's part; `to` holds those of all.
    AllGather {
        from: u64,
        to: u64,
        bytes: usize,
    },
    Broadcast {
        at: u64,
        bytes: usize,
        root: usize,
    },
    Send {
        from: u64,
        bytes: usize,
        to: usize,
    },
    Recv {
        to: u64,
        bytes: usize,
        from: usize,
    },
}

/// The library. All communicators are non-blocking: a call that is in progress is asked about with [`state`](NcclApi::state), and nothing
/// else is asked of that communicator before it has succeeded.
///
/// # Safety
/// Methods may be called with communicators that this library made and that were neither destroyed nor aborted, with the context of the
/// rank's device current.
pub(crate) trait NcclApi: Send + Sync {
    /// The version as NCCL counts: 22304 is 2.23.4.
    fn version(&self) -> i32;
    /// Whether memory of the host may be sent and received.
    fn takes_host_memory(&self) -> bool;
    fn unique_id(&self) -> Result<UniqueId, Status>;
    /// Rank `rank` of `ranks` joins a new communicator. The ranks are there when its state is a success.
    fn init(&self, ranks: usize, id: &UniqueId, rank: usize) -> Result<RawComm, Status>;
    /// All ranks of `parent` make the call. Once `parent` has succeeded, what is returned holds the new communicator, or 0 for a rank without a
    /// color.
    fn split(&self, parent: RawComm, color: Option<i32>, key: i32) -> Result<&'static AtomicUsize, Status>;
    /// How the last call on a communicator went, or that an error came later.
    fn state(&self, comm: RawComm) -> Status;
    /// What was queued is done first.
    fn finalize(&self, comm: RawComm) -> Status;
    fn destroy(&self, comm: RawComm);
    /// Ends what is queued, wherever it is, and destroys the communicator.
    fn abort(&self, comm: RawComm);
    /// Operations until [`group_end`](NcclApi::group_end) are started together.
    fn group_start(&self) -> Status;
    fn group_end(&self) -> Status;
    /// Queues an operation.
    ///
    /// # Safety
    /// Addresses are of memory of this size that `stream` may use, and that is not reused before the stream has passed.
    unsafe fn enqueue(&self, comm: RawComm, operation: &Operation, stream: usize) -> Status;
    /// What a status means, and what the library adds to the last error.
    fn words(&self, status: Status, comm: Option<RawComm>) -> String;
}
