//! The tensor core, independent of any backend: element types, shapes, layouts, pointwise programs and the [`Runtime`]
//! trait. Every operation has its rules (shape and dtype inference, execution, gradient) in one place.
//!
//! No code of this crate depends on a device. A [`Tensor`] carries its runtime; kernels see only views that this crate
//! built.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod account;
mod capabilities;
mod device_queue;
mod dtype;
mod either;
mod error;
mod flat;
pub mod float8;
pub mod fused;
mod hash;
mod layout;
mod memory_account;
mod memory_report;
mod null;
pub mod ops;
pub mod placement;
pub mod pointwise;
mod pool;
mod positioned;
pub mod rng;
mod runtime;
pub mod safetensors;
mod shape;
mod tensor;
pub mod trace;

pub use account::MemoryAccount;
pub use capabilities::Capabilities;
pub use device_queue::{DeviceQueue, LaunchParticipant, QueueMark};
pub use dtype::{DType, Element, Scalar};
pub use either::{Either, EitherBuffer, EitherEvent};
pub use error::{Error, ErrorKind, Result, Within};
pub use flat::{ALIGN, Flat, FlatLayout};
pub use hash::Fnv1a;
pub use layout::{Layout, LoopAxis, coalesce};
pub use memory_account::{Bytes, MemoryCategory, MemoryStats};
pub use memory_report::{DeviceBytes, MemoryReport, OtherQueues};
pub use null::{KernelWork, NullBuffer, NullEvent, NullRuntime};
pub use pool::Pool;
pub use positioned::read_exact_at;
pub use runtime::*;
pub use shape::{AxisSet, MAX_RANK, Shape};
pub use tensor::{Tensor, TensorMut};

/// The traits of all operations on tensors and on variables of the tape: `use numcore::prelude::*`.
pub mod prelude {
    pub use crate::{
        fused::NnOps,
        ops::{
            Apply, ColumnOps, ConvOps, DiagonalOps, DistanceOps, FftOps, GridSampleOps, IndexOps, IndexingOps,
            InterpolateOps, JoinOps, MatmulOps, PadOps, PointwiseOps, PoolOps, ReduceOps, RepeatOps, ScanOps,
            ScatterOps, SearchOps, SelectOps, SortOps, ViewOps,
        },
    };
}
