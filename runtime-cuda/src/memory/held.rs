//! The blocks that a recording keeps. It writes to them at every launch, so nothing else may use them while it lives.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Memory, segments::DeviceBlock};

/// A block that was dropped and that a recording keeps.
pub(super) struct Dropped {
    pub block: DeviceBlock,
    /// The pool to which the block returns.
    pub memory: Arc<Memory>,
    /// Another recording that uses the block, and keeps it after this one.
    pub held: Option<Arc<HeldBlocks>>,
}

/// The blocks of a recording; `None` once the recording is dropped.
pub(crate) struct HeldBlocks(Mutex<Option<Vec<Dropped>>>);

impl Default for HeldBlocks {
    fn default() -> Self {
        HeldBlocks(Mutex::new(Some(Vec::new())))
    }
}

impl HeldBlocks {
    pub(super) fn is_alive(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Keeps a block; returns false once the recording is dropped.
    pub(super) fn keep(&self, dropped: Dropped) -> bool {
        self.0.lock().as_mut().map(|blocks| blocks.push(dropped)).is_some()
    }

    /// Returns the kept blocks of a recording that is dropped.
    pub(super) fn release(&self) -> Vec<Dropped> {
        self.0.lock().take().unwrap_or_default()
    }
}
