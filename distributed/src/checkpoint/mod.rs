//! Sharded checkpoints: every rank writes its part; any number of ranks reads them back.
//!
//! A checkpoint is a folder `step-N` with a file of tensors from each rank and, written last, `manifest.json`: which tensor's elements
//! lie where, under logical names and with global extents, each with a checksum, and one of its own. Files that it does not name are no
//! part of the checkpoint. Elements are consecutive ones of a tensor, or, of one that is cut over ranks, of a piece of it.
//!
//! A folder becomes visible by being renamed when it is whole. `latest` names it just before, with what was the last until then, which
//! counts as long as the new one is not in its place: that rename is the moment at which a save is done. Whatever happens before and after
//! it, the checkpoint that was completed last is there and is the one that loads.
//!
//! **Invariant**: what one rank finds wrong, all ranks report; nothing is changed before everything that will be read, and what it goes to,
//! was checked. If a rank still fails after that, the communicator ends: ranks have different states then.

mod folder;
mod held;
pub(crate) mod hyper;
mod lock;
mod manifest;
pub(crate) mod names;
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
pub(crate) use held::{HeldPiece, RegionId};
pub use lock::FolderLock;
pub use manifest::{Manifest, Region};
pub use reader::CheckpointReader;
pub use snapshot::Snapshot;
pub use snapshot_writer::SnapshotWriter;

/// Elements of a named tensor that this rank saves.
pub struct CheckpointPart<R: Runtime> {
    /// The tensor's logical name, the same at every world size.
    pub name: String,
    /// The piece of the tensor that this rank has: of one that is cut over ranks; all of it otherwise.
    pub placement: TensorPlacement,
    /// The first element of the piece that this rank saves, in row-major order.
    pub start: usize,
    /// The elements from there on.
    pub row: StateRow<R>,
}

impl<R: Runtime> CheckpointPart<R> {
    /// A whole tensor.
    pub fn whole(name: String, value: &Tensor<R>) -> Result<Self> {
        Self::piece(name, TensorPlacement::whole(*value.shape()), value)
    }

    /// All of a piece of a tensor.
    pub fn piece(name: String, placement: TensorPlacement, value: &Tensor<R>) -> Result<Self> {
        use numcore::ops::ViewOps;
        let row = value.contiguous()?.reshape([value.shape().numel()])?.into();
        Ok(CheckpointPart { name, placement, start: 0, row })
    }
}

/// What a strategy saves and takes back.
pub trait Checkpointed<R: Runtime> {
    /// The parts this rank saves; together the ranks save everything, once.
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>>;
    /// Parts of parameters alone, which together the ranks have once: for what follows weights from step to step. They need not be cut as
    /// [`parts`](Checkpointed::parts) are, and are cut in the same way every time.
    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        Ok(self.parts()?.into_iter().filter(|part| names::is_parameter(&part.name)).collect())
    }
    /// Puts other values in place of this rank's [`parameter_parts`](Checkpointed::parameter_parts), for a while, as the optimizer does not learn
    /// of it. Ranks that keep whole parameters get each other's. False, on all ranks, where the strategy cannot: nothing is changed then.
    fn put_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        let _ = rows;
        Ok(false)
    }
    /// What is not a tensor, by logical name; of all ranks together. Names that begin with `rank/`, of tensors too, are one rank's own:
    /// they need not be there when another number of ranks loads, where such a tensor reads as zeros.
    fn numbers(&self) -> BTreeMap<String, u64>;
    /// Is told the numbers of a checkpoint before it is asked what it [wants](Checkpointed::wanted) of it, where that depends on who saved it.
    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        let _ = numbers;
    }
    /// What would be lost if another number of ranks took this over as it is now; none where nothing would. Ranks that leave and join
    /// [commit](crate::elastic::ElasticWorld::commit) nothing then.
    fn lost_at_another_size(&self) -> Option<&'static str> {
        None
    }
    /// Which elements this rank needs.
    fn wanted(&self) -> Result<Vec<Wanted>>;
    /// An error if [`restore`](Checkpointed::restore) could not take everything over, as far as this can be known before it is read: because
    /// someone holds memory that is to be written, or a number is out of range. Nothing is changed.
    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()>;
    /// Takes everything over; `read` gives the elements of [`wanted`](Checkpointed::wanted) as rows.
    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()>;
}

/// Implements [`Checkpointed`] by something that is: a field, or what is in a box.
macro_rules! checkpointed_by {
    ($this:ident => $inner:expr, $inner_mut:expr) => {
        fn parts(&$this) -> numcore::Result<Vec<$crate::checkpoint::CheckpointPart<R>>> {
            $inner.parts()
        }

        fn parameter_parts(&$this) -> numcore::Result<Vec<$crate::checkpoint::CheckpointPart<R>>> {
            $inner.parameter_parts()
        }

        fn put_parameter_parts(&mut $this, rows: &[numcore::Tensor<R>]) -> numcore::Result<bool> {
            $inner_mut.put_parameter_parts(rows)
        }

        fn numbers(&$this) -> std::collections::BTreeMap<String, u64> {
            $inner.numbers()
        }

        fn expect(&mut $this, numbers: &std::collections::BTreeMap<String, u64>) {
            $inner_mut.expect(numbers);
        }

        fn lost_at_another_size(&$this) -> Option<&'static str> {
            $inner.lost_at_another_size()
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
pub(crate) use checkpointed_by;

impl<R: Runtime, C: Checkpointed<R> + ?Sized> Checkpointed<R> for Box<C> {
    checkpointed_by!(self => (**self), (**self));
}

/// Elements of a named tensor that this rank reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The tensor's logical name.
    pub name: String,
    /// The piece of the tensor that this rank has: of one that is cut over ranks; all of it otherwise.
    pub placement: TensorPlacement,
    /// The element type of the tensor.
    pub dtype: DType,
    /// Which elements of the piece, in row-major order.
    pub elements: Range<usize>,
}

impl Wanted {
    /// All of a piece of a tensor.
    pub fn piece(name: String, placement: TensorPlacement, dtype: DType) -> Self {
        let elements = 0..placement.local().numel();
        Wanted { name, placement, dtype, elements }
    }

    /// A whole tensor.
    pub fn whole(name: String, shape: Shape, dtype: DType) -> Self {
        Self::piece(name, TensorPlacement::whole(shape), dtype)
    }
}
