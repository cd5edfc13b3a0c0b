//! The layer above the training step: a loop with evaluation, checkpoints and exact resuming, and displays of its
//! progress.
//!
//! [`Trainer`] loops over any training step. It sends [events](Event) to [callbacks](Callback); the usual callbacks are
//! in this crate: [`Evaluate`], [`Checkpoints`], [`EarlyStop`]. All ranks agree on the callbacks' requests once a step
//! ([`Control`]). Measurements go to [sinks](sink).
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod callback;
mod callbacks;
mod control;
mod hash;
mod interrupt;
mod model_in_step;
mod modes;
mod padding;
mod profile;
mod progress;
mod replay;
mod resume;
mod run;
mod scalars;
pub mod search;
mod trainer;

pub use callback::{Callback, CallbackState, Event, RunSnapshot};
pub use callbacks::{
    Checkpoints, DivergenceGuard, EarlyStop, EqualWeights, Evaluate, LrRange, Monitor, NonFinite, QkClip,
    ReduceOnPlateau, StopOnSignal, Throughput, WeightAveraging,
};
pub use control::{Control, StopReason};
pub use model_in_step::ModelInStep;
pub use progress::{Interval, Length, Progress};
pub use replay::{ReplayedCall, ReplayedRank, ReplayedStep, ReplayedValue, StepReplay};
pub use resume::{Resume, parsed};
pub use run::{BestValue, Run};
pub use scalars::record_scalar;
pub use trainer::{RunReport, Shares, Trainer, Weighting};
pub use watch::{Record, Sink, metrics, report, sink};

/// Recordings of steps, and timelines of them.
pub mod recorder {
    pub use watch::recorder::*;

    pub use crate::profile::Profile;
}

/// Names from other frameworks, and the types of doors for loops that are translated.
///
/// | name | use |
/// |---|---|
/// | [`TrainSetup`](compat::TrainSetup), [`TrainConfig`](compat::TrainConfig) | training steps in a loop of one's own, by [`Trainer::setup`] or [`Trainer::head`] |
/// | [`SetupModel`](compat::SetupModel), [`Policy`](compat::Policy), [`PolicyStep`](compat::PolicyStep) | their model, when their ranks exchange, and the step that follows |
/// | [`TrainerBuilder`](compat::TrainerBuilder) | [`Trainer::new`] on every rank of a world of threads, by [`Trainer::builder`] |
/// | [`TrainHandle`](compat::TrainHandle), [`Trained`](compat::Trained), [`TrainedTensor`](compat::TrainedTensor) | such a run, and its weights |
/// | [`DistributedTrainConfig`](compat::DistributedTrainConfig) and the types of its fields | the arguments of `weftgrad::Launcher`, in one struct |
pub mod compat {
    pub use crate::trainer::{
        DistributedBackend, DistributedRole, DistributedTrainConfig, EngineKind, LaunchedProcess, Policy, PolicyStep,
        SetupModel, TrainConfig, TrainHandle, TrainSetup, Trained, TrainedTensor, TrainerBuilder,
    };
}
