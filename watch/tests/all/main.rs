//! What people look at while a model trains: sinks, metrics and reports.

#[path = "../../../data/tests/common/mod.rs"]
mod folder;
mod metrics;
mod report;
mod sinks;
