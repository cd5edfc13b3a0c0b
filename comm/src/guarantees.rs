//! What an engine promises.

/// In which order an engine adds the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumOrder {
    /// In the order of ranks, halves in `f32`: sums are the same bits on every engine that promises it.
    RankOrder,
    /// In some order that is the same every time.
    Fixed,
    /// In an order that may differ from one time to the next.
    Any,
}

/// When an error of a call is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorTiming {
    /// At the latest when [`Work::wait`](crate::Work::wait) returns.
    AtWait,
    /// At the latest when [`Work::done`](crate::Work::done) returns, or at a later [`poll`](crate::Communicator::poll): `wait` only orders
    /// the caller's queue.
    AfterWait,
}

/// What an engine promises beyond the [contract](crate::Communicator). Code that decides something by a combined value (skips a step, clips,
/// stops) relies on nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantees {
    /// The order of additions.
    pub order: SumOrder,
    /// Whether a sum may change with the length of the tensor it is a part of, so with how gradients are cut into buckets.
    pub by_layout: bool,
    /// Whether all ranks get the same bits of what is combined. Where it is false, a decision is rank 0's, broadcast.
    pub equal_on_all_ranks: bool,
    /// Whether NaN wins in `Min` and `Max`.
    pub nan_wins: bool,
    /// Whether a transfer waits for nothing but its peer. Where it is false, calls of a rank run one after another in the order they were
    /// started, and those that must run together are started by [`start_all`](crate::Communicator::start_all).
    pub independent_transfers: bool,
    /// Whether bytes are exchanged on the host. Elsewhere [`exchange_bytes`](crate::Communicator::exchange_bytes) is two gathers, which whatever
    /// wraps the engine sees as calls.
    pub exchanges_on_host: bool,
    /// When errors are known.
    pub errors: ErrorTiming,
}

impl Guarantees {
    /// The strongest of each: what an engine promises that combines in rank order on one rank and sends the result to the others.
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
