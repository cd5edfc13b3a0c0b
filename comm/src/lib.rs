//! Communicators: the exchange of tensors between ranks.
//!
//! An engine implements [`Communicator`]. Its one way to exchange data is [`start`](Communicator::start), which takes a
//! [`Call`], that is, a collective as data with the memory it works on. Users call [`Collectives`], one method per
//! collective, for every engine alike. Memory goes in by value and comes back from [`Work::wait`], so nothing in flight
//! can be touched.
//!
//! **Invariant**: a collective ends on every rank, with a result or with an error, before its deadline has passed.
//! After an error the communicator stays unusable, and every later call returns that error.
#![forbid(unsafe_code)]

mod agreement;
mod byte_exchange;
mod call;
mod collectives;
mod combine;
mod communicator;
mod counting;
mod deadlines;
mod difference;
pub mod engine;
mod failure;
mod faults;
mod fingerprint;
mod group;
mod guarantees;
mod in_order;
mod matching;
mod memory;
mod named;
mod noop;
mod partial;
mod place;
mod portable;
mod ranks;
mod recorder;
mod rendezvous;
mod slow;
mod sync;
mod threads;
mod traced;
mod transfer_plan;
mod volume;
mod wire;
mod work;

pub use agreement::{abort_on_err, abort_with, all_gather_bool, all_ok, all_ok_after, gather_bytes};
pub use byte_exchange::ByteExchange;
pub use call::{Call, Collective, Fingerprint, Places, ReduceOp};
pub use collectives::Collectives;
pub use communicator::{Comm, Communicator};
pub use counting::{CountingCommunicator, Traffic};
pub use deadlines::{Deadlines, Patient};
pub use failure::panic_message;
pub use faults::{Fault, FaultyCommunicator, FaultyRendezvous};
pub use group::Group;
pub use guarantees::{ErrorTiming, Guarantees, SumOrder};
pub use in_order::InOrderCommunicator;
pub use memory::memory;
pub use named::{Label, Named};
pub use noop::NoOpCommunicator;
pub use partial::Partial;
pub use place::Place;
pub use ranks::Ranks;
pub use rendezvous::{Membership, Quorum, Rendezvous};
pub use slow::{Link, SlowCommunicator};
pub use threads::{ThreadCommunicator, ThreadRendezvous, ThreadSeat};
pub use traced::TracedCommunicator;
pub use work::{Pending, Work};
