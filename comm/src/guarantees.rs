//! The promises of an engine.

/// The order in which an engine adds the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumOrder {
    /// The order of ranks, halves in `f32`: sums have equal bits on every engine that promises it.
    RankOrder,
    /// Some order, equal every time.
    Fixed,
    /// An order that may differ from one time to the next.
    Any,
}

/// The point at which an error of a call is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorTiming {
    /// At the latest the return of [`Work::wait`](crate::Work::wait).
    AtWait,
    /// At the latest the return of [`Work::done`](crate::Work::done), or a later [`poll`](crate::Communicator::poll):
    /// `wait` only orders the caller's queue.
    AfterWait,
}

/// The promises of an engine beyond the [contract](crate::Communicator). Code that decides by a combined value (skips a
/// step, clips, stops) relies on nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantees {
    /// The order of additions.
    pub order: SumOrder,
    /// True if a sum may change with the length of the tensor it is a part of, and thus with gradient buckets.
    pub by_layout: bool,
    /// True if all ranks get equal bits of combined values. If false, a decision is rank 0's, broadcast.
    pub equal_on_all_ranks: bool,
    /// True if NaN wins in `Min` and `Max`.
    pub nan_wins: bool,
    /// True if a transfer waits for nothing but its peer. If false, calls of a rank run one after another in the order
    /// they were started. Calls that must run together are then started by
    /// [`start_all`](crate::Communicator::start_all).
    pub independent_transfers: bool,
    /// True if bytes are exchanged on the host. If false, [`exchange_bytes`](crate::Communicator::exchange_bytes) is
    /// two gathers, which wrappers of the engine see as calls.
    pub exchanges_on_host: bool,
    /// The point at which errors are known.
    pub errors: ErrorTiming,
}

impl Guarantees {
    /// The strongest promises, of an engine that combines in rank order on one rank and sends the result to the others.
    pub const STRICT: Guarantees = Guarantees {
        order: SumOrder::RankOrder,
        by_layout: false,
        equal_on_all_ranks: true,
        nan_wins: true,
        independent_transfers: true,
        exchanges_on_host: false,
        errors: ErrorTiming::AtWait,
    };
}
