//! Snapshots: copies of a rank's part in host memory, which a thread can write while training goes on.

use std::collections::BTreeMap;

use numcore::{DType, Result, Runtime, placement::TensorPlacement};

use super::{CheckpointPart, Checkpointed, writer::PartEntry};

/// This rank's part of a checkpoint in host memory, which later training steps do not change.
/// [`Folder::save_snapshot`](super::Folder::save_snapshot) writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Copies this rank's part to host memory; waits for the device. Call it in the thread that trains.
    pub fn of<R: Runtime>(state: &(impl Checkpointed<R> + ?Sized)) -> Result<Self> {
        let mut snapshot = Snapshot::default();
        snapshot.copy(state)?;
        Ok(snapshot)
    }

    /// Copies this rank's part over the last copy, whose memory it reuses; waits for the device. Call it in the thread
    /// that trains. After an error the snapshot mixes both copies, and must not be saved.
    pub fn copy<R: Runtime>(&mut self, state: &(impl Checkpointed<R> + ?Sized)) -> Result<()> {
        let mut spare = std::mem::take(&mut self.parts).into_iter().map(|part| part.bytes);
        for part in state.parts()? {
            let mut bytes = spare.next().unwrap_or_default();
            part.row.to_bytes_in(&mut bytes)?;
            let CheckpointPart { name, placement, start, row } = part;
            self.parts.push(HostPart { name, placement, start, dtype: row.dtype(), bytes });
        }
        self.numbers = state.numbers();
        Ok(())
    }

    /// The number of bytes of tensors in the snapshot.
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
