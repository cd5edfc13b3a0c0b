//! Checkpoints of a balanced step: those of its inner step. Measurements are not saved, but made again.

use numcore::Runtime;

use super::Balanced;
use distributed::{checkpoint::Checkpointed, checkpointed_by, train::Step};

impl<R: Runtime, S: Step<R>> Checkpointed<R> for Balanced<S> {
    checkpointed_by!(self => self.inner, self.inner);
}
