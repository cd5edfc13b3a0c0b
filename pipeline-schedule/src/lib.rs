//! Schedules of pipelines as data, checked before they may run.
//!
//! A [`Schedule`] is one list of [`Action`]s per rank. It goes through
//!
//! 1. [`ScheduleKind::generate`]: makes the passes of each rank, in order ([`Schedule::from_csv`] reads another
//!    program's);
//! 2. [`Schedule::lower`]: adds messages between ranks, parameter gathers and gradient reductions;
//! 3. [`Schedule::check`]: plays all ranks jointly with synchronous sends; only it makes a [`Checked`];
//! 4. [`Schedule::simulate`]: computes times, idle time and live activations; [`Timeline`] draws them.
//!
//! ```
//! use pipeline_schedule::{Limits, Lowering, PipeShape, ScheduleKind};
//! # fn main() -> numcore::Result<()> {
//! let shape = PipeShape { ranks: 4, stages_per_rank: 1, micro_batches: 8 };
//! let checked = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
//! assert_eq!(checked.schedule().stages(), 4);
//! # Ok(())
//! # }
//! ```
//!
//! None of these touches a tensor: times are integer ticks, results are exact. The pipelines of the crate `distributed`
//! run a [`Checked`].
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod action;
mod check;
mod costs;
mod csv;
mod deadlock;
mod generate;
mod lower;
mod placement;
mod replay;
mod schedule;
mod simulate;
mod text;
mod timeline;

pub use action::{Action, Compute, Direction, End, Message, Pass, UnitAction, UnitOp};
pub use check::{Checked, Limits};
pub use costs::{Costs, StageCosts};
pub use generate::{PipeShape, ScheduleKind};
pub use lower::Lowering;
pub use placement::StagePlacement;
pub use replay::{SendMode, Span};
pub use schedule::{PassInput, Schedule};
pub use simulate::{RankReport, Simulation};
pub use timeline::{Timeline, TimelineEvent};
