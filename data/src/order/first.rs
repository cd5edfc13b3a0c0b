//! The beginning of an order: [`FirstPositions`].

use std::{ops::Range, sync::Arc};

use super::Order;

/// The first positions of each epoch of another order, or those of one epoch in every epoch.
pub(crate) struct FirstPositions {
    of: Arc<dyn Order>,
    len: u64,
    /// The epoch that every epoch repeats, if there is one.
    epoch: Option<u64>,
}

impl FirstPositions {
    /// The first `len` positions of each epoch.
    pub(crate) fn new(of: Arc<dyn Order>, len: u64) -> Self {
        FirstPositions { len: len.min(of.len()), of, epoch: None }
    }

    /// The first `len` positions of epoch 0, in every epoch.
    pub(crate) fn of_epoch_0(of: Arc<dyn Order>, len: u64) -> Self {
        FirstPositions { epoch: Some(0), ..FirstPositions::new(of, len) }
    }
}

impl Order for FirstPositions {
    fn len(&self) -> u64 {
        self.len
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        self.of.indices(self.epoch.unwrap_or(epoch), positions)
    }

    fn readings(&self, epoch: u64, positions: Range<u64>) -> Option<Vec<u64>> {
        self.of.readings(self.epoch.unwrap_or(epoch), positions)
    }

    fn describe(&self) -> String {
        let always = if self.epoch.is_some() { " in every epoch the same" } else { "" };
        format!("first {}{always} of {}", self.len, self.of.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Shuffled;

    #[test]
    fn beginnings_are_those_of_the_whole() {
        let whole = Arc::new(Shuffled::new(20, 3));
        let first = FirstPositions::new(whole.clone(), 8);
        let again = FirstPositions::of_epoch_0(whole.clone(), 8);
        assert_eq!((first.len(), FirstPositions::new(whole.clone(), 100).len()), (8, 20));
        assert_eq!(first.indices(2, 3..8), whole.indices(2, 3..8));
        assert_eq!(again.indices(2, 0..8), whole.indices(0, 0..8));
        assert_ne!(first.describe(), again.describe());
    }
}
