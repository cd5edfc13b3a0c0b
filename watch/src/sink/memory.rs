//! [`MemorySink`]: a sink that keeps everything, for tests and for reports.

use std::sync::{Arc, Mutex, PoisonError};

use numcore::Result;

use super::{Record, Sink};

/// Keeps every record. Clones share the records, so one of them can be given away and another read.
#[derive(Clone, Debug, Default)]
pub struct MemorySink(Arc<Mutex<Vec<Record>>>);

impl MemorySink {
    /// Makes a sink without records.
    pub fn new() -> Self {
        Self::default()
    }

    /// All records so far.
    pub fn records(&self) -> Vec<Record> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The pairs `(step, value)` of the numbers recorded under a name, in the order of recording.
    pub fn scalars(&self, name: &str) -> Vec<(u64, f64)> {
        let of_step = |record: &Record| record.scalars().find(|(n, _)| *n == name).map(|(_, x)| (record.step, x));
        self.records().iter().filter_map(of_step).collect()
    }
}

impl Sink for MemorySink {
    fn write(&mut self, record: &Record) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.clone());
        Ok(())
    }
}
