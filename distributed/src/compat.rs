//! Names from other frameworks and papers beside the names they have here, for code that is translated.
//!
//! | name | here |
//! |---|---|
//! | [`ZeroStage1`], [`ZeroStage2`], [`ZeroStage3`] | values of [`ZeroStage`], for `.zero(..)` of a training step |
//! | [`SimpleTrainer`] | [`TrainStep`], here for one device: `TrainStep::builder(&runtime, &model)` |
//! | [`Ddp`] | data parallelism by hand, for loops that no [`TrainStep`] fits |

pub use crate::ddp::by_hand::Ddp;
use crate::{
    train::TrainStep,
    zero::{ZeroOptions, ZeroStage},
};

/// A training step on one device.
pub type SimpleTrainer<R> = TrainStep<R>;

/// Shards optimizer state: `.zero(ZeroStage1)`. See [`ZeroStage::Optimizer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroStage1;

/// Shards optimizer state and gradients: `.zero(ZeroStage2)`. See [`ZeroStage::Gradients`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroStage2;

/// Shards optimizer state, gradients and parameters: `.zero(ZeroStage3)`. See [`ZeroStage::Parameters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias("FSDP"))]
#[doc(alias("HSDP"))]
pub struct ZeroStage3;

impl From<ZeroStage1> for ZeroOptions {
    fn from(_: ZeroStage1) -> Self {
        ZeroStage::Optimizer.into()
    }
}

impl From<ZeroStage2> for ZeroOptions {
    fn from(_: ZeroStage2) -> Self {
        ZeroStage::Gradients.into()
    }
}

impl From<ZeroStage3> for ZeroOptions {
    fn from(_: ZeroStage3) -> Self {
        ZeroStage::Parameters.into()
    }
}
