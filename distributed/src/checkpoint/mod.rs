//! Sharded checkpoints: every rank writes its part; any number of ranks reads them back.
//!
//! A checkpoint is a folder `step-N` with one file of tensors from each rank and, written last, `manifest.json`. The
//! manifest maps logical tensor names and global shapes to regions of the files, each with a checksum, and has a
//! checksum of its own. Files that it does not name are no part of the checkpoint. A region is consecutive elements of
//! a tensor or, if the tensor is cut over ranks, of a piece of it.
//!
//! A finished folder becomes visible by a rename. The file `latest` names the new checkpoint just before, together with
//! its predecessor. The predecessor counts until the new one is in its place: the rename completes the save. Whatever
//! fails before or after it, the checkpoint that was completed last exists and is the one that loads.
//!
//! **Invariant**: an error that one rank finds is reported by all. Nothing is changed before all data to be read, and
//! the state that takes it, was checked. If a rank still fails after that, the communicator ends: ranks have different
//! states then.

mod folder;
mod held;
pub(crate) mod hyper;
mod lock;
mod manifest;
pub mod names;
mod overlap;
mod parameters;
mod reader;
mod snapshot;
mod snapshot_writer;
mod source;
mod writer;

use std::{collections::BTreeMap, ops::Range};

use numcore::{DType, Result, Runtime, Shape, Tensor, placement::TensorPlacement};
use optim::StateRow;

pub use folder::Folder;
pub use held::{HeldPiece, RegionId};
pub use lock::FolderLock;
pub use manifest::{Manifest, Region};
pub use reader::CheckpointReader;
pub use snapshot::Snapshot;
pub use snapshot_writer::SnapshotWriter;

/// A part of a checkpoint that this rank saves: consecutive elements of a named tensor, or of this rank's shard of it.
pub struct CheckpointPart<R: Runtime> {
    /// The tensor's logical name, such as `parameter/…`. It is independent of the world size, except for names that
    /// begin with `rank/`.
    pub name: String,
    /// The shard of the tensor that this rank has: the whole tensor unless it is cut over ranks.
    pub placement: TensorPlacement,
    /// The offset of the first saved element in the shard, flattened in row-major order.
    pub start: usize,
    /// The values of the elements `start..start + n` of the flattened shard: a buffer `[n]`, on the device or the host.
    pub row: StateRow<R>,
}

impl<R: Runtime> CheckpointPart<R> {
    /// A part that is a whole tensor.
    pub fn whole(name: String, value: &Tensor<R>) -> Result<Self> {
        Self::piece(name, TensorPlacement::whole(*value.shape()), value)
    }

    /// A part that is all of a piece of a tensor.
    pub fn piece(name: String, placement: TensorPlacement, value: &Tensor<R>) -> Result<Self> {
        use numcore::ops::ViewOps;
        let row = value.contiguous()?.reshape([value.shape().numel()])?.into();
        Ok(CheckpointPart { name, placement, start: 0, row })
    }
}

/// Takes the parts that `rank` saves. All of `ranks` ranks have these parts, in the same order, and each goes to the
/// rank with the fewest bytes so far.
pub(crate) fn share_out<R: Runtime>(
    parts: Vec<CheckpointPart<R>>,
    rank: usize,
    ranks: usize,
) -> Vec<CheckpointPart<R>> {
    let mut bytes = vec![0; ranks];
    let is_own = |part: &CheckpointPart<R>| {
        let to = (0..ranks).min_by_key(|&rank| bytes[rank]).unwrap_or(0);
        bytes[to] += part.row.numel() * part.row.dtype().size();
        to == rank
    };
    parts.into_iter().filter(is_own).collect()
}

/// State that checkpoints save and restore: a strategy, or a whole training step.
pub trait Checkpointed<R: Runtime> {
    /// The parts that this rank saves. Together, the ranks save every element once.
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>>;
    /// The parts of parameters alone, for observers that follow weights from step to step. Together, the ranks have
    /// every element once. Their cut may differ from that of [`parts`](Checkpointed::parts), and is the same at every
    /// call.
    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        Ok(self.parts()?.into_iter().filter(|part| names::is_parameter(&part.name)).collect())
    }
    /// Replaces the values of this rank's [`parameter_parts`](Checkpointed::parameter_parts) temporarily: the optimizer
    /// does not learn of it. Ranks that keep whole parameters get each other's values. Returns false, on all ranks and
    /// with nothing changed, if the strategy cannot do it.
    fn swap_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        let _ = rows;
        Ok(false)
    }
    /// The numbers to save beside tensors, by logical name; the manifest merges those of all ranks. A name that begins
    /// with `rank/`, of a tensor too, belongs to one rank and may be missing if another number of ranks loads. Such a
    /// tensor then reads as zeros, unless it is named `rank/N/local/…`, which must exist.
    fn numbers(&self) -> BTreeMap<String, u64>;
    /// Announces the numbers of a checkpoint before [`wanted`](Checkpointed::wanted) is called: some state depends on
    /// the ranks that saved it.
    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        let _ = numbers;
    }
    /// The elements that this rank needs from a checkpoint.
    fn wanted(&self) -> Result<Vec<Wanted>>;
    /// Checks, before tensors are read, that [`restore`](Checkpointed::restore) can succeed. An error if memory to be
    /// written has another holder, or a number is out of range. Nothing is changed.
    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()>;
    /// Restores the whole state; `read` returns the elements of an item of [`wanted`](Checkpointed::wanted) as a row.
    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()>;
}

/// Implements the methods of [`Checkpointed`](crate::checkpoint::Checkpointed) for a runtime `R` by delegation, to a
/// field or the contents of a box: for wrappers of steps.
#[macro_export]
macro_rules! checkpointed_by {
    ($this:ident => $inner:expr, $inner_mut:expr) => {
        fn parts(&$this) -> numcore::Result<Vec<$crate::checkpoint::CheckpointPart<R>>> {
            $inner.parts()
        }

        fn parameter_parts(&$this) -> numcore::Result<Vec<$crate::checkpoint::CheckpointPart<R>>> {
            $inner.parameter_parts()
        }

        fn swap_parameter_parts(&mut $this, rows: &[numcore::Tensor<R>]) -> numcore::Result<bool> {
            $inner_mut.swap_parameter_parts(rows)
        }

        fn numbers(&$this) -> std::collections::BTreeMap<String, u64> {
            $inner.numbers()
        }

        fn expect(&mut $this, numbers: &std::collections::BTreeMap<String, u64>) {
            $inner_mut.expect(numbers);
        }

        fn wanted(&$this) -> numcore::Result<Vec<$crate::checkpoint::Wanted>> {
            $inner.wanted()
        }

        fn check_restore(&mut $this, numbers: &std::collections::BTreeMap<String, u64>) -> numcore::Result<()> {
            $inner_mut.check_restore(numbers)
        }

        fn restore(
            &mut $this,
            read: &mut dyn FnMut(&$crate::checkpoint::Wanted) -> numcore::Result<numcore::Tensor<R>>,
            numbers: &std::collections::BTreeMap<String, u64>,
        ) -> numcore::Result<()> {
            $inner_mut.restore(read, numbers)
        }
    };
}

impl<R: Runtime, C: Checkpointed<R> + ?Sized> Checkpointed<R> for Box<C> {
    checkpointed_by!(self => (**self), (**self));
}

/// Elements of a named tensor that this rank reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The tensor's logical name.
    pub name: String,
    /// The shard of the tensor that this rank has: the whole tensor unless it is cut over ranks.
    pub placement: TensorPlacement,
    /// The element type of the saved tensor.
    pub dtype: DType,
    /// The range of elements to read from the shard, flattened in row-major order.
    pub elements: Range<usize>,
}

impl Wanted {
    /// A read request for all elements of this rank's shard of the tensor `name`, in row-major order of the shard.
    pub fn piece(name: String, placement: TensorPlacement, dtype: DType) -> Self {
        let elements = 0..placement.local().numel();
        Wanted { name, placement, dtype, elements }
    }

    /// A read request for all elements of the tensor `name`, in row-major order. The elements arrive as a 1-D tensor of
    /// `shape.numel()`.
    ///
    /// `shape` and `dtype` must equal those of the saved tensor. A load fails if they differ, and converts nothing.
    pub fn whole(name: String, shape: Shape, dtype: DType) -> Self {
        Self::piece(name, TensorPlacement::whole(shape), dtype)
    }
}
