//! Displays of a run: sinks, metrics, timelines and reports.

#[path = "../../../data/tests/common/mod.rs"]
mod folder;
mod metric_values;
mod metrics;
mod recorder;
mod report;
mod sinks;
