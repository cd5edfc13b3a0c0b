//! The input of sinks: [`Record`] and [`Value`].

use std::time::{SystemTime, UNIX_EPOCH};

use super::{Histogram, Picture};

/// The measurements of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The number of updates so far, over the whole run.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The fraction of the run that is done, from 0 to 1; none if its length is not known.
    pub fraction: Option<f64>,
    /// The time of the measurement.
    pub time: SystemTime,
    /// Names and values, in the order in which they were recorded. A name appears once.
    pub values: Vec<(String, Value)>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A number: a loss, a rate, a norm.
    Scalar(f64),
    /// A piece of text: a sample that a model wrote.
    Text(String),
    /// A distribution of numbers: a parameter, a gradient.
    Histogram(Histogram),
    /// A picture: a sample that a model drew, a confusion matrix.
    Image(Picture),
}

impl Record {
    /// Makes a record of this step and the current time, without measurements.
    pub fn new(step: u64, epoch: u64) -> Self {
        Record { step, epoch, fraction: None, time: SystemTime::now(), values: Vec::new() }
    }

    /// Adds a measurement, in place of an earlier one of this name.
    pub fn with(mut self, name: impl Into<String>, value: Value) -> Self {
        let name = name.into();
        match self.values.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.values.push((name, value)),
        }
        self
    }

    /// Adds a number.
    pub fn scalar(self, name: impl Into<String>, value: f64) -> Self {
        self.with(name, Value::Scalar(value))
    }

    /// The numbers among the values, in their order.
    pub fn scalars(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(|(name, value)| match value {
            Value::Scalar(x) => Some((name.as_str(), *x)),
            _ => None,
        })
    }

    /// Seconds since 1970.
    pub fn seconds(&self) -> f64 {
        match self.time.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_secs_f64(),
            Err(before) => -before.duration().as_secs_f64(),
        }
    }
}
