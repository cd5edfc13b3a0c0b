//! Reports of a run, as files for people: curves as SVG, and one page of HTML with everything.
//!
//! The files need nothing else: no network, no script, no font. All text in them is escaped.
//!
//! ```
//! use watch::{report::Report, sink::Record};
//! let records: Vec<Record> = (1..=3).map(|step| Record::new(step, 0).scalar("loss", 1.0 / step as f64)).collect();
//! let page = Report::new("first run").configuration([("learning rate", "3e-4")]).records(&records).to_html();
//! assert!(page.starts_with("<!doctype html>"));
//! ```

pub(crate) mod axis;
pub(crate) mod chart;
pub(crate) mod curves;
mod memory;
mod page;
mod samples;
mod sinks;

pub use chart::{Chart, ChartLine};
pub use curves::charts_of;
pub use page::Report;
pub use sinks::{HtmlReport, SvgCurves};
