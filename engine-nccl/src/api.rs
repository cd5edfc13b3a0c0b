//! The functions of NCCL that this crate calls, about twenty, as a trait. One implementation calls the library; another
//! runs on the host, for tests.

use std::sync::atomic::AtomicUsize;

use comm::ReduceOp;
use numcore::DType;

/// An error code of NCCL (`ncclResult_t`), 0 without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub(crate) const SUCCESS: Status = Status(0);
    /// The library is still working on the call; no other call may be made on the communicator meanwhile.
    pub(crate) const IN_PROGRESS: Status = Status(7);
}

/// A communicator of the library (`ncclComm_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RawComm(pub usize);

/// The identifier by which the ranks of a new communicator find each other (`ncclUniqueId`).
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub [u8; 128]);

/// A number of elements of one dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elements {
    pub count: usize,
    pub dtype: DType,
}

/// Work that a rank queues on a stream. Addresses are in device memory.
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
    /// A sum over ranks, scattered: `of` counts the elements of one rank's part, which is written to `to`.
    ReduceScatter {
        from: u64,
        to: u64,
        of: Elements,
        op: ReduceOp,
    },
    /// A gather of `bytes` bytes from each rank; `to` receives the parts of all ranks.
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

/// NCCL's functions. All communicators are non-blocking: while a call is in progress, only [`state`](NcclApi::state)
/// may be called on that communicator.
///
/// # Safety
/// Methods may be called with communicators that this library made and that were neither destroyed nor aborted. The
/// context of the rank's device must be current.
pub(crate) trait NcclApi: Send + Sync {
    /// The version as NCCL encodes it: 22304 is 2.23.4.
    fn version(&self) -> i32;
    /// Tells whether host memory may be sent and received.
    fn takes_host_memory(&self) -> bool;
    fn unique_id(&self) -> Result<UniqueId, Status>;
    /// Joins a new communicator as rank `rank` of `ranks`. All ranks have joined once its state is a success.
    fn init(&self, ranks: usize, id: &UniqueId, rank: usize) -> Result<RawComm, Status>;
    /// Splits `parent`; all of its ranks make the call. Once `parent` has succeeded, the returned slot holds the new
    /// communicator, or 0 for a rank without a color.
    fn split(&self, parent: RawComm, color: Option<i32>, key: i32) -> Result<&'static AtomicUsize, Status>;
    /// The status of the last call on a communicator, or of an error that came later.
    fn state(&self, comm: RawComm) -> Status;
    /// Finishes the queued work before a communicator is destroyed.
    fn finalize(&self, comm: RawComm) -> Status;
    fn destroy(&self, comm: RawComm);
    /// Ends the queued work wherever it is, and destroys the communicator.
    fn abort(&self, comm: RawComm);
    /// Begins a group: operations until [`group_end`](NcclApi::group_end) start together.
    fn group_start(&self) -> Status;
    fn group_end(&self) -> Status;
    /// Queues an operation.
    ///
    /// # Safety
    /// Addresses are of memory of this size that `stream` may use, and that is not reused before the stream has passed.
    unsafe fn enqueue(&self, comm: RawComm, operation: &Operation, stream: usize) -> Status;
    /// The meaning of a status, with the library's text of the last error.
    fn error_text(&self, status: Status, comm: Option<RawComm>) -> String;
}
