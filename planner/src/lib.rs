//! Questions before a run on many ranks. What does a plan cost, and which is the best? [`ModelCosts`] are measured on
//! one's own model, without its memory and without its arithmetic. [`verify`]: is the model on many ranks that of one
//! rank, and if not, why?
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod calibrate;
mod costs;
mod estimate;
mod goodput;
mod lone;
mod machine;
mod plan;
mod rehearse;
mod report;
mod search;
mod simulate;
pub mod verify;

pub use calibrate::calibrate;
pub use costs::{BackwardWork, ExchangeCosts, ModelCosts, OptimizerCosts, ParameterCosts, PartCosts, PlannedModel};
pub use estimate::{BillRow, Estimate, MemoryEstimate, Purpose, bill};
pub use goodput::{Goodput, Reliability};
pub use machine::{FITTED_SHARES, LinkSpeed, Machine};
pub use plan::{Recompute, TrainingPlan};
pub use rehearse::Rehearsal;
pub use search::{FoundPlan, FoundPlans, PlanSearch};
pub use simulate::SimulatedStep;
