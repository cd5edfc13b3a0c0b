//! Where a run's measurements go: [`Sink`], and the sinks there are.
//!
//! A sink takes one [`Record`] per step and knows nothing of the loop that measured it, so every sink works in a loop of one's own:
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
mod jsonl;
mod many;
mod memory;
mod picture;
mod record;
mod tensorboard;
mod terminal;

pub use histogram::Histogram;
pub use jsonl::{Jsonl, read_jsonl};
pub use many::Many;
pub use memory::MemorySink;
pub use picture::Picture;
pub use record::{Record, Value};
pub use tensorboard::TensorBoard;
pub use terminal::Terminal;

use numcore::Result;

/// Takes what a run measures, on the rank that writes (world rank 0): a terminal, a file, TensorBoard.
pub trait Sink: Send {
    /// Takes the measurements of one step. Those of a run come in the order of their steps.
    fn write(&mut self, record: &Record) -> Result<()>;

    /// Puts everything written so far where a reader finds it. Called at checkpoints and at the end of a run.
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
