//! The summary of a run: the last, least and greatest value of every number.

use std::collections::BTreeMap;

use crate::{
    json::{number, object},
    sink::Record,
};

#[derive(Debug, Default)]
pub(super) struct Summary {
    step: u64,
    epoch: u64,
    /// Seconds since 1970 of the first and of the last record.
    time: Option<(f64, f64)>,
    scalars: BTreeMap<String, Seen>,
}

/// A number over a run. NaN is neither least nor greatest, unless there is nothing else.
#[derive(Debug)]
struct Seen {
    last: f64,
    min: f64,
    max: f64,
}

impl Summary {
    pub(super) fn add(&mut self, record: &Record) {
        let now = record.seconds();
        (self.step, self.epoch) = (record.step, record.epoch);
        self.time = Some((self.time.map_or(now, |(first, _)| first), now));
        for (name, x) in record.scalars() {
            match self.scalars.get_mut(name) {
                Some(seen) => *seen = Seen { last: x, min: seen.min.min(x), max: seen.max.max(x) },
                None => {
                    self.scalars.insert(name.into(), Seen { last: x, min: x, max: x });
                }
            }
        }
    }

    pub(super) fn to_json(&self) -> String {
        let (first, last) = self.time.unwrap_or((0.0, 0.0));
        let seen = |s: &Seen| object([("last", number(s.last)), ("min", number(s.min)), ("max", number(s.max))]);
        let scalars = object(self.scalars.iter().map(|(name, s)| (name, seen(s))));
        let fields = [
            ("step", self.step.to_string()),
            ("epoch", self.epoch.to_string()),
            ("seconds", number(last - first)),
            ("scalars", scalars),
        ];
        object(fields) + "\n"
    }
}
