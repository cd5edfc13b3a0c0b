//! What every runtime must get right, and how it is found out.
//!
//! - [`golden`]: reference values from PyTorch, of any folder laid out like `goldens/`; also the program `golden`.
//! - [`run`]: the suite a new runtime runs until it passes. Sections compare with PyTorch, with finite differences in `f64`, with
//!   plain loops on the host, and with the decompositions of fused operations.
//!
//! - [`section_tests!`]: the suite as a runtime's tests, one for each section.
//! - [`documented`]: that the table of what runtimes can do is true of one.
//!
//! The whole suite at once:
//!
//! ```no_run
//! # use numcore::NullRuntime as MyRuntime;
//! let report = conformance::run(&MyRuntime::new());
//! assert!(report.passed(), "{report}");
//! ```
//!
//! **Invariant**: nothing here knows a runtime, except the program; a check never loosens for one.
#![forbid(unsafe_code)]

mod caught;
mod documented;
pub mod golden;
mod suite;

pub use documented::documented;
pub use suite::{Report, RunSection, Section, Verdict, determinism, goldens, run, section_names, sections};
