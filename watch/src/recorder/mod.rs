//! Timelines of real steps: [`RunTimeline`], from a [recording](numcore::trace) to Chrome's JSON, which Perfetto and
//! `chrome://tracing` show, and to SVG.
//!
//! ```
//! use numcore::trace::{Recording, RecordingOptions, SpanKind, span};
//! use watch::recorder::RunTimeline;
//! # fn main() -> numcore::Result<()> {
//! let recording = Recording::start(RecordingOptions::default())?;
//! drop(span(SpanKind::Phase, "forward"));
//! let timeline = RunTimeline::of(&recording.stop(), 0);
//! assert!(timeline.to_chrome_json().contains("\"name\":\"forward\""));
//! print!("{}", timeline.costliest(SpanKind::Phase, 10));
//! # Ok(())
//! # }
//! ```

mod chrome;
mod costs;
mod svg;
mod timeline;
mod usage;

pub use costs::OperationCost;
pub use timeline::{CounterSeries, RankTimeline, RunTimeline, Track, TrackSpan};
pub use usage::UsageSampler;
