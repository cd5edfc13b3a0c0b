//! Destinations of a run's measurements: [`Sink`], and its implementations.
//!
//! A sink takes one [`Record`] at a time and is independent of the loop that measured it, so every sink works in a
//! custom loop:
//!
//! ```
//! use watch::sink::{MemorySink, Many, Record, Sink};
//! # fn main() -> numcore::Result<()> {
//! let seen = MemorySink::new();
//! let mut sinks = Many::new().with(seen.clone());
//! for step in 1..=3 {
//!     sinks.write(&Record::new(step, 0).scalar("loss", 1.0 / step as f64))?;
//! }
//! sinks.flush()?;
//! assert_eq!(seen.scalars("loss"), [(1, 1.0), (2, 0.5), (3, 1.0 / 3.0)]);
//! # Ok(())
//! # }
//! ```

mod histogram;
pub(crate) mod jsonl;
mod many;
mod memory;
mod mlflow;
mod picture;
mod record;
mod tensorboard;
mod terminal;
mod wandb;

pub use histogram::Histogram;
pub use jsonl::{Jsonl, read_jsonl};
pub use many::Many;
pub use memory::MemorySink;
pub use mlflow::Mlflow;
pub use picture::Picture;
pub use record::{Record, Value};
pub use tensorboard::TensorBoard;
pub use terminal::Terminal;
pub use wandb::Wandb;

use numcore::{Error, Result};

/// A destination of a run's measurements, on the rank that writes (world rank 0): a terminal, a file, TensorBoard.
pub trait Sink: Send {
    /// Takes measurements of one step. Records of a run come in the order of their steps, except that a run that went
    /// back repeats steps.
    fn write(&mut self, record: &Record) -> Result<()>;

    /// Makes all records so far visible to readers. Called at checkpoints and at the end of a run.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl<S: Sink + ?Sized> Sink for Box<S> {
    fn write(&mut self, record: &Record) -> Result<()> {
        (**self).write(record)
    }

    fn flush(&mut self) -> Result<()> {
        (**self).flush()
    }
}

/// A random number, for names that no other run has.
fn random() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::io("the system's random numbers", std::io::Error::other(error)))
}
