//! The stages of ZeRO by the names they have in the paper.

use super::{ZeroOptions, ZeroStage};

/// Shards optimizer state: `.zero(ZeroStage1)`. See [`ZeroStage::Optimizer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroStage1;

/// Shards optimizer state and gradients: `.zero(ZeroStage2)`. See [`ZeroStage::Gradients`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroStage2;

/// Shards optimizer state, gradients and parameters: `.zero(ZeroStage3)`. See [`ZeroStage::Parameters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias("FSDP"))]
pub struct ZeroStage3;

impl From<ZeroStage> for ZeroOptions {
    fn from(stage: ZeroStage) -> Self {
        ZeroOptions { stage, ..Default::default() }
    }
}

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
