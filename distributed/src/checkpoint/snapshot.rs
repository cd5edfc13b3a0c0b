//! What a rank saves, copied to the host, so that a thread can write it while training goes on.

use std::collections::BTreeMap;

use numcore::{DType, Result, Runtime, placement::TensorPlacement};

use super::{Checkpointed, writer::PartEntry};

/// This rank's part of a checkpoint in host memory: nothing that training does afterwards changes it.
/// [`Folder::save_snapshot`](super::Folder::save_snapshot) writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub(super) parts: Vec<HostPart>,
    pub(super) numbers: BTreeMap<String, u64>,
}

/// Elements of a named tensor, in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPart {
    name: String,
    placement: TensorPlacement,
    start: usize,
    dtype: DType,
    pub(super) bytes: Vec<u8>,
}

impl Snapshot {
    /// Copies what this rank saves; waits for the device. To be called in the thread that trains.
    pub fn of<R: Runtime>(state: &(impl Checkpointed<R> + ?Sized)) -> Result<Self> {
        let part = |part: super::CheckpointPart<R>| {
            let (dtype, bytes) = (part.row.dtype(), part.row.to_bytes()?);
            Ok(HostPart { name: part.name, placement: part.placement, start: part.start, dtype, bytes })
        };
        let parts = state.parts()?.into_iter().map(part).collect::<Result<_>>()?;
        Ok(Snapshot { parts, numbers: state.numbers() })
    }

    /// How many bytes of tensors it holds.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes.len()).sum()
    }
}

impl HostPart {
    pub(super) fn entry(&self) -> PartEntry<'_> {
        let HostPart { name, placement, start, dtype, bytes } = self;
        PartEntry { name, placement, start: *start, dtype: *dtype, len: bytes.len() / dtype.size() }
    }
}
