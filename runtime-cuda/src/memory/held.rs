//! What a recording keeps: blocks that it writes to whenever it is launched, so that no one else may have them while it lives.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Memory, segments::DeviceBlock};

/// A block that was dropped and that a recording keeps.
pub(super) struct Dropped {
    pub block: DeviceBlock,
    /// The pool it returns to.
    pub memory: Arc<Memory>,
    /// Another recording that uses it, and keeps it after this one.
    pub held: Option<Arc<HeldBlocks>>,
}

/// The blocks of a recording; none any more once it is gone.
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

    /// Keeps a block; false once the recording is gone.
    pub(super) fn keep(&self, dropped: Dropped) -> bool {
        self.0.lock().as_mut().map(|blocks| blocks.push(dropped)).is_some()
    }

    /// The recording is gone: what it kept.
    pub(super) fn release(&self) -> Vec<Dropped> {
        self.0.lock().take().unwrap_or_default()
    }
}
