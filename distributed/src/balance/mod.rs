//! Uneven machines: ranks of different speeds that arrive at a step's end together.
//!
//! Two ways to give a fast rank more to do, each a state machine without a clock, which is told what was measured:
//!
//! | | what is uneven | a step's examples |
//! |---|---|---|
//! | [`SpeedShares`] | the share of one batch that each rank reads | the same in every step |
//! | [`Cadence`] | how many micro-batches each rank computes between two exchanges | more where exchanges are slow, to hide them |
//!
//! Gradients are sums, and a step divides once by what all of them weigh, after which the norm is clipped: so a step of
//! uneven counts is the step of one rank with all of its micro-batches. [`Balanced`] takes such steps: it measures,
//! agrees with the other ranks on the counts, and tells each which batches of a common order are its own
//! ([`BatchRanges`]), so that each is read once.
//!
//! After El Che in flodl, with time of exchanges measured wherever they run, and gradients in place of weights.

mod cadence;
mod checkpoint;
mod ranges;
mod shares;
mod speed;
mod step;

pub use cadence::{BalancePolicy, Cadence, CadenceOptions, CadenceWindow};
pub use ranges::BatchRanges;
pub use shares::SpeedShares;
pub use speed::{SpeedEstimate, SpeedOptions};
pub use step::Balanced;
