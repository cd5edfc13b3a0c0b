//! Groups of rows that are decoded at once, of which the last used are kept.

use std::sync::{Arc, Mutex, PoisonError};

use numcore::{Error, Result};

/// The number of decoded groups kept.
const KEPT: usize = 4;

/// The groups of rows of several files, one file after another: their ends, and those that were decoded last.
pub(super) struct Groups<G> {
    /// The end of each group: the index after its last row.
    ends: Vec<usize>,
    /// The first group of each file.
    files: Vec<usize>,
    /// The kept groups with their numbers, the last used one last.
    kept: Mutex<Vec<(usize, Arc<G>)>>,
}

impl<G> Groups<G> {
    /// The groups of files, given by the numbers of rows of each.
    ///
    /// # Errors
    /// Fails, with the names of the files, if a number makes no sense.
    pub(super) fn of<'a>(files: impl IntoIterator<Item = (&'a str, Vec<i64>)>) -> Result<Self> {
        let (mut names, mut rows, mut first) = (Vec::new(), Vec::new(), Vec::new());
        for (name, groups) in files {
            names.push(name);
            first.push(rows.len());
            rows.extend(groups);
        }
        let mut end = 0usize;
        let add = |rows: i64| {
            end = end.checked_add(usize::try_from(rows).ok()?)?;
            Some(end)
        };
        let ends = rows.into_iter().map(add).collect::<Option<_>>();
        let ends = ends.ok_or_else(|| Error::format(names.join(", "), "the numbers of rows make no sense"))?;
        Ok(Groups { ends, files: first, kept: Mutex::new(Vec::new()) })
    }

    /// The number of rows of all groups.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The row before the first one of a group.
    fn start(&self, group: usize) -> usize {
        if group == 0 { 0 } else { self.ends[group - 1] }
    }

    /// The file of a row, its group there, and its numbers in the group and in the file.
    pub(super) fn place(&self, row: usize) -> [usize; 4] {
        let group = self.ends.partition_point(|&end| end <= row);
        let file = self.files.partition_point(|&first| first <= group) - 1;
        [file, group - self.files[file], row - self.start(group), row - self.start(self.files[file])]
    }

    /// A group of a file, decoded unless it is kept.
    pub(super) fn get(&self, file: usize, group: usize, decode: impl FnOnce() -> Result<G>) -> Result<Arc<G>> {
        let group = self.files[file] + group;
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
