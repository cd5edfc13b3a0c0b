//! Execution of kernels: a [`LoopPlan`] divides a launch into tiles, and a [`Launch`] runs the kernel's steps over each
//! tile.

mod exec;
mod plan;
mod scratch;
mod stage;
mod step;
mod stream;
mod ways;

pub(in crate::pointwise) use exec::Common;
pub(crate) use exec::Launch;
pub(crate) use plan::{LoopPlan, Moving, Place};
pub(in crate::pointwise) use step::{
    Map1, Map2, Map3, StepFn, Sum, copy, fold, long1, map1, map2, map3, narrow, patched, random, trig,
};
pub(in crate::pointwise) use ways::FastestWay;
