//! Scalars recorded from anywhere in a step.

use std::cell::RefCell;

use distributed::comm::{Collectives, Comm, Communicator};
use numcore::{Error, Result, Runtime};

/// Weighted sums of recorded scalars by name, from which means are made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecordedScalars {
    entries: Vec<ScalarEntry>,
    /// The weight of a value recorded now.
    weight: f64,
}

#[derive(Clone, Debug, PartialEq)]
struct ScalarEntry {
    name: String,
    sum: f64,
    weight: f64,
}

impl RecordedScalars {
    const fn new() -> Self {
        RecordedScalars { entries: Vec::new(), weight: 1.0 }
    }

    fn add(&mut self, name: &str, value: f64, weight: f64) {
        if weight != 0.0 {
            self.add_sum(name, value * weight, weight);
        }
    }

    fn add_sum(&mut self, name: &str, sum: f64, weight: f64) {
        match self.entries.iter_mut().find(|entry| entry.name == name) {
            Some(entry) => (entry.sum, entry.weight) = (entry.sum + sum, entry.weight + weight),
            None => self.entries.push(ScalarEntry { name: name.into(), sum, weight }),
        }
    }

    fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.weight == 0.0)
    }

    /// Clears the values. Names stay, so that a steady state allocates nothing.
    pub(crate) fn clear(&mut self) {
        self.entries.iter_mut().for_each(|entry| (entry.sum, entry.weight) = (0.0, 0.0));
    }
}

thread_local! {
    static SCALARS: RefCell<RecordedScalars> = const { RefCell::new(RecordedScalars::new()) };
}

/// Records a number from anywhere in a step, in the thread that trains: in the loss function, deep in a model. Sinks
/// receive the mean over micro-batches and ranks since the last record, weighted by the examples of each micro-batch.
/// Within an evaluation it is the mean over that evaluation, under the evaluation's name.
///
/// ```
/// train::record_scalar("attention/entropy", 1.25);
/// ```
pub fn record_scalar(name: &str, value: f64) {
    SCALARS.with_borrow_mut(|scalars| {
        let weight = scalars.weight;
        scalars.add(name, value, weight);
    });
}

/// Sets the weight of values recorded from now on.
pub(crate) fn set_weight(weight: f64) {
    SCALARS.with_borrow_mut(|scalars| scalars.weight = weight);
}

/// Tells whether a scalar was recorded on this rank since the last record.
pub(crate) fn any_recorded() -> bool {
    SCALARS.with_borrow(|scalars| !scalars.is_empty())
}

/// Clears the recorded scalars.
pub(crate) fn clear() {
    SCALARS.with_borrow_mut(RecordedScalars::clear);
}

/// Runs `f`; returns its result with the scalars that it recorded, which are kept separate from earlier ones.
pub(crate) fn capture<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, RecordedScalars)> {
    let before = SCALARS.replace(RecordedScalars::new());
    let result = f();
    let within = SCALARS.replace(before);
    Ok((result?, within))
}

/// The means over all ranks of scalars recorded since the last call, in the order of ranks and of recording.
pub(crate) fn take_means<R: Runtime>(comm: &Comm<R>) -> Result<Vec<(String, f64)>> {
    SCALARS.with_borrow_mut(|scalars| {
        let means = scalars.means(comm);
        scalars.clear();
        means
    })
}

impl RecordedScalars {
    /// The means over all ranks.
    pub(crate) fn means<R: Runtime>(&self, comm: &Comm<R>) -> Result<Vec<(String, f64)>> {
        let mut all = RecordedScalars::new();
        if comm.size() == 1 {
            all = self.clone();
        } else {
            for bytes in comm.exchange(&self.bytes())? {
                all.add_bytes(&bytes)
                    .ok_or_else(|| Error::internal("record_scalar", "the message of a rank cannot be read"))?;
            }
        }
        let counted = all.entries.into_iter().filter(|entry| entry.weight != 0.0);
        Ok(counted.map(|entry| (entry.name, entry.sum / entry.weight)).collect())
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for ScalarEntry { name, sum, weight } in self.entries.iter().filter(|entry| entry.weight != 0.0) {
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend(sum.to_le_bytes());
            bytes.extend(weight.to_le_bytes());
        }
        bytes
    }

    fn add_bytes(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let len = u64::from_le_bytes(*bytes.split_off(..8)?.as_array()?) as usize;
            let name = std::str::from_utf8(bytes.split_off(..len)?).ok()?;
            let sum = f64::from_le_bytes(*bytes.split_off(..8)?.as_array()?);
            let weight = f64::from_le_bytes(*bytes.split_off(..8)?.as_array()?);
            self.add_sum(name, sum, weight);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_arrives_and_adds() {
        let mut own = RecordedScalars::new();
        own.add("a", 2.0, 3.0);
        own.add("β", f64::NAN, 1.0);
        own.add("a", 5.0, 1.0);
        let mut all = RecordedScalars::new();
        for _ in 0..2 {
            all.add_bytes(&own.bytes()).unwrap();
        }
        assert_eq!((all.entries[0].sum, all.entries[0].weight), (22.0, 8.0));
        assert!(all.entries[1].sum.is_nan() && all.entries[1].name == "β");
        let bytes = own.bytes();
        assert!((1..8).all(|cut| RecordedScalars::new().add_bytes(&bytes[..bytes.len() - cut]).is_none()));
    }

    #[test]
    fn an_error_leaves_what_was_recorded_before() {
        record_scalar("x", 1.0);
        let failed: Result<((), RecordedScalars)> = capture(|| {
            record_scalar("y", 2.0);
            Err(Error::argument("test", "fails"))
        });
        assert!(failed.is_err() && any_recorded());
        clear();
        assert!(!any_recorded());
    }
}
