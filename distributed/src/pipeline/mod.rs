//! Pipeline parallelism: schedules as data, checked before they may run.
//!
//! A [`Schedule`] is one list of [`Action`]s per rank. It goes through
//!
//! 1. [`ScheduleKind::generate`]: who computes what in which order (or [`Schedule::from_csv`]: somebody else's order);
//! 2. [`lower`]: adds messages between ranks, parameter gathers and gradient reductions;
//! 3. [`check`]: plays all ranks jointly with synchronous sends; only it makes a [`Checked`];
//! 4. [`simulate`]: times, idle time, live activations; [`Timeline`] draws them.
//!
//! None of these touches a tensor: times are whole ticks, results are exact. What does is beyond `Checked`: a [`Pipeline`] of
//! [`Stage`]s runs it.

mod action;
mod check;
mod costs;
mod csv;
mod deadlock;
mod generate;
mod lower;
mod placement;
mod replay;
mod run;
mod schedule;
mod simulate;
mod text;
mod timeline;

pub use action::{Action, Compute, Direction, End, Message, Pass, UnitAction, UnitOp};
pub use check::{Checked, Limits, check};
pub use costs::{Costs, StageCosts};
pub use generate::ScheduleKind;
pub use lower::{Lowering, lower};
pub use placement::StagePlacement;
pub use replay::{SendMode, Span};
pub use run::{
    GptStage, Layers, LossFn, MicroBatches, Pipeline, PipelineGroups, PipelineModel, PipelineOptions, PipelineOutput,
    PipelineTrainer, Stage, StageHooks, PipelineTrainStep, Tie, ZeroPipelineTrainer, balanced, split,
};
pub use schedule::Schedule;
pub use simulate::{RankReport, Simulation, simulate};
pub use timeline::{Timeline, TimelineEvent};
