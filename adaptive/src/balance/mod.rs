//! Load balancing for uneven machines: ranks of different speeds that reach a step's end together.
//!
//! There are two ways to give a fast rank more work. Each is a state machine without a clock, fed with measurements:
//!
//! | | what is uneven | a step's examples |
//! |---|---|---|
//! | [`SpeedShares`] | the share of one batch that each rank reads | the same in every step |
//! | [`MicroBatchBalancer`] | each rank's micro-batches between two exchanges | more if exchanges are slow, to hide them |
//!
//! Gradients are sums, divided once by the weight of all examples, after which the norm is clipped. So a step of uneven
//! counts equals the step of one rank with all of its micro-batches. [`Balanced`] takes such steps. It measures, agrees
//! with the other ranks on the counts, and assigns each batch of a common order to one rank ([`BatchRanges`]).
//!
//! After El Che in flodl, but with exchanges timed wherever they run, and gradients in place of weights.

mod balancer;
mod checkpoint;
mod ranges;
mod shares;
mod speed;
mod step;

pub use balancer::{BalanceOptions, BalancePolicy, BalanceWindow, MicroBatchBalancer};
pub use ranges::BatchRanges;
pub use shares::SpeedShares;
pub use speed::{SpeedEstimate, SpeedOptions};
pub use step::Balanced;
