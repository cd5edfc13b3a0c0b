//! Building blocks of engines: checks of calls, sums in rank order, the flight recorder, failures and their wire forms.
//!
//! An engine that moves bytes between processes sends each call's [`Fingerprint`](crate::Fingerprint) as
//! [bytes](crate::Fingerprint::to_bytes) (or its [digest](crate::Fingerprint::digest)) ahead of the data. It notes the
//! call in a [`FlightRecorder`], combines arriving data with a [`Combiner`], and gives every rank an equal [`Failure`].
//! Bytes are accessed by `Tensor::host_bytes` and `TensorMut::host_bytes_mut`, or copied.

pub use super::{
    combine::{Combiner, cuts},
    deadlines::CallKinds,
    failure::{Failure, FailureReason, LEFT, panic_message},
    matching::{SplitPlace, mismatch, split_place},
    portable::Portable,
    ranks::{all_or_first_error, guarded, with_causes},
    recorder::FlightRecorder,
    transfer_plan::{CallShape, PhaseEnd, TransferChunk, TransferMemory, TransferPhase, TransferPlan},
    volume::Volume,
    wire::{WireReader, Writer},
};
