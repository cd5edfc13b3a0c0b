//! Where a run's measurements go: [`Sink`].

use std::time::SystemTime;

use numcore::Result;

/// Takes what a run measures, on the rank that writes (world rank 0 unless told otherwise): a terminal, a file, TensorBoard.
pub trait Sink: Send {
    /// Takes the measurements of one step. Those of a run come in the order of their steps.
    fn write(&mut self, record: &Record) -> Result<()>;

    /// Puts everything written so far where a reader finds it. Called at checkpoints and at the end of a run.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// What was measured at one step.
#[derive(Clone, Debug)]
pub struct Record {
    /// Updates done so far, over the whole run.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// When it was measured.
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
}
