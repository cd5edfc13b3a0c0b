//! Groups of rows that are decoded at once, of which the last used are kept.

use std::sync::{Arc, Mutex, PoisonError};

use numcore::Result;

/// The number of decoded groups kept.
const KEPT: usize = 4;

/// Groups of rows: their ends, and those that were decoded last.
pub(super) struct Groups<G> {
    /// The end of each group: the index after its last row.
    ends: Vec<usize>,
    /// The kept groups with their numbers, the last used one last.
    kept: Mutex<Vec<(usize, Arc<G>)>>,
}

impl<G> Groups<G> {
    /// Groups of these numbers of rows; `None` if one makes no sense.
    pub(super) fn new(rows: impl IntoIterator<Item = i64>) -> Option<Self> {
        let add = |end: &mut usize, rows: i64| {
            let sum = usize::try_from(rows).ok().and_then(|rows| end.checked_add(rows));
            *end = sum.unwrap_or_default();
            Some(sum)
        };
        let ends = rows.into_iter().scan(0, add).collect::<Option<_>>()?;
        Some(Groups { ends, kept: Mutex::new(Vec::new()) })
    }

    /// The number of rows of all groups.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The row before the first one of a group.
    pub(super) fn start(&self, group: usize) -> usize {
        if group == 0 { 0 } else { self.ends[group - 1] }
    }

    /// The group of a row, and its place in the group.
    pub(super) fn place(&self, row: usize) -> (usize, usize) {
        let group = self.ends.partition_point(|&end| end <= row);
        (group, row - self.start(group))
    }

    /// A group, decoded unless it is kept.
    pub(super) fn get(&self, group: usize, decode: impl FnOnce() -> Result<G>) -> Result<Arc<G>> {
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = lock();
        if let Some(at) = kept.iter().position(|(n, _)| *n == group) {
            let entry = kept.remove(at);
            let found = Arc::clone(&entry.1);
            kept.push(entry);
            return Ok(found);
        }
        // Decoded without the lock: other threads go on with the groups they have.
        drop(kept);
        let (decoded, mut kept) = (Arc::new(decode()?), lock());
        kept.push((group, Arc::clone(&decoded)));
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
        Ok(decoded)
    }
}
