//! Optimizers. An elementwise optimizer is a formula: a [pointwise program](numcore::pointwise) that runs over all
//! parameters of a group in one launch, in place, on every runtime. A new one takes one file like `lion.rs`, with
//! hyper-parameters, states, formula and scalars.
//!
//! The optimizer takes ownership of its parameters' memory: their values move into one buffer per group and dtype
//! ([`FlatParams`]), and each leaf becomes a view. Gradients are written to buffers of the same layout
//! ([`FlatGradients`], a hook of the backward pass); state is in further buffers. Half-precision parameters have an
//! `f32` master copy, which the same launch updates and rounds.
//!
//! Learning rates and all other scalars are passed at launch, so changing them compiles nothing. Clipping and loss
//! scaling are one factor on the device, which the same launch applies.
//!
//! **Invariant**: an update that cannot begin changes nothing, and a parameter without a gradient is unchanged.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

#[macro_use]
mod config;

mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod adamw;
mod adamw_8bit;
mod adan;
mod bf16_state;
mod captured;
mod clip;
mod combined;
mod cut_params;
mod decay;
mod elementwise;
mod ema;
mod evaluation_weights;
mod flat_optimizer;
mod further_params;
mod gradients;
mod hyper;
mod into_optimizer;
mod lamb;
mod lbfgs;
mod line_search;
mod lion;
mod memory;
mod muon;
mod mup;
mod nadam;
pub mod norms;
mod one_of;
mod optimizer;
mod own;
mod owners;
mod param_groups;
mod param_part;
mod params;
mod phase;
mod place;
mod prodigy;
mod radam;
mod rmsprop;
mod rule;
mod runs;
mod scaler;
mod schedule;
mod schedule_free;
mod sgd;
#[cfg(feature = "linalg")]
mod shampoo;
mod shard;
#[cfg(feature = "linalg")]
mod sides;
#[cfg(feature = "linalg")]
mod soap;
mod state;
mod stochastic_rounding;
mod whole_update;

pub use adadelta::{Adadelta, AdadeltaConfig};
pub use adafactor::{Adafactor, AdafactorConfig};
pub use adagrad::{Adagrad, AdagradConfig};
pub use adam::{Adam, AdamConfig};
pub use adamax::{Adamax, AdamaxConfig};
pub use adamw::{AdamW, AdamWConfig};
pub use adamw_8bit::{AdamW8bit, AdamW8bitConfig, dynamic_map};
pub use adan::{Adan, AdanConfig};
pub use bf16_state::Bf16State;
pub use clip::{GradientSet, NormOrder, all_finite, clip_grad_norm, clip_grad_value, grad_norm};
pub use combined::Combined;
pub use config::{Config, HyperBound, HyperNumbers, HyperParam, HyperValue};
pub use cut_params::CutParam;
pub use decay::split_decay;
pub use elementwise::{Elementwise, Programs, Scalars, UpdateForm, programs, scalars};
pub use ema::Ema;
pub use evaluation_weights::EvaluationWeights;
pub use flat_optimizer::FlatOptimizer;
pub use gradients::FlatGradients;
pub use hyper::HyperParams;
pub use into_optimizer::{IntoOptimizer, OptimizerFn, OptimizerSource};
pub use lamb::{Lamb, LambConfig};
pub use lbfgs::{Lbfgs, LbfgsConfig, LbfgsNumbers};
pub use line_search::LineSearch;
pub use lion::{Lion, LionConfig};
pub use memory::UpdateMemory;
pub use muon::{AdjustLr, Muon, MuonConfig};
pub use mup::{MaximalUpdate, WidthRule, coordinate_sizes, scale_parameters};
pub use nadam::{NAdam, NAdamConfig};
pub use one_of::OneOf;
pub use optimizer::{Optimizer, OptimizerCore, PiecesOf};
pub use own::OwnGradients;
pub use param_groups::ParamGroups;
pub use params::FlatParams;
pub use phase::UpdatePhase;
pub use place::{StatePlace, StateRow};
pub use prodigy::{Prodigy, ProdigyConfig};
pub use radam::{RAdam, RAdamConfig};
pub use rmsprop::{RmsProp, RmsPropConfig};
pub use rule::{StateSpec, StepContext, Totals, UpdateRule};
pub use scaler::LossScaler;
pub use schedule::{
    ConstantLr, Cooldown, Cosine, CosineRestarts, CyclicTriangular, ExponentialLr, InverseSqrt, LinearLr, LrSchedule,
    MultiStepLr, OneCycle, PolynomialLr, SequentialLr, StepLr, Warmup, WarmupCosine, Wsd, require_rates,
};
pub use schedule_free::{ScheduleFreeAdamW, ScheduleFreeAdamWConfig, ScheduleFreeSgd, ScheduleFreeSgdConfig};
pub use sgd::{Sgd, SgdConfig};
#[cfg(feature = "linalg")]
pub use shampoo::{Shampoo, ShampooConfig};
pub use shard::{Fragment, ShardOptimizer, Shards};
#[cfg(feature = "linalg")]
pub use soap::{Soap, SoapConfig};
pub use state::{AVERAGE, MASTER};
