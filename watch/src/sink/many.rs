//! [`Many`]: several sinks as one.

use numcore::Result;

use super::{Record, Sink};

/// Gives every record to several sinks, in the order in which they were added.
#[derive(Default)]
pub struct Many(Vec<Box<dyn Sink>>);

impl Many {
    /// Makes a sink without inner sinks: records go nowhere.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a sink.
    pub fn with(mut self, sink: impl Sink + 'static) -> Self {
        self.0.push(Box::new(sink));
        self
    }

    /// Calls all sinks, also after one that failed; returns the first error.
    fn each(&mut self, mut call: impl FnMut(&mut dyn Sink) -> Result<()>) -> Result<()> {
        self.0.iter_mut().map(|sink| call(sink)).fold(Ok(()), Result::and)
    }
}

impl Sink for Many {
    /// Gives the record to all sinks.
    ///
    /// # Errors
    /// The first error of a sink; the others have the record nevertheless.
    fn write(&mut self, record: &Record) -> Result<()> {
        self.each(|sink| sink.write(record))
    }

    fn flush(&mut self) -> Result<()> {
        self.each(|sink| sink.flush())
    }
}

impl std::fmt::Debug for Many {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Many({} sinks)", self.0.len())
    }
}
