//! Pipeline parallelism: a model in stages, which ranks run by a checked schedule.
//!
//! Schedules are data of the crate [`pipeline_schedule`], whose names are re-exported. [`ScheduleKind::generate`] makes
//! one, [`Schedule::lower`] and [`Schedule::check`] turn it into a [`Checked`], and a [`Pipeline`] of [`Stage`]s runs
//! it.

mod run;

pub use pipeline_schedule::{
    Action, Checked, Compute, Costs, Direction, End, Limits, Lowering, Message, Pass, PassInput, PipeShape, RankReport,
    Schedule, ScheduleKind, SendMode, Simulation, Span, StageCosts, StagePlacement, Timeline, TimelineEvent,
    UnitAction, UnitOp,
};
pub use run::{
    LossFn, MicroBatches, Pipeline, PipelineGroups, PipelineModel, PipelineOptions, PipelineOutput, Stage, StageHooks,
    Tie, balanced, split,
};
