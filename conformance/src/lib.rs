//! What every runtime must get right, and how it is found out.
//!
//! - [`golden`]: reference values from PyTorch, of any folder laid out like `goldens/`; also the program `golden`.
//! - [`run`]: the suite a new runtime runs until it passes. Sections compare with PyTorch, with finite differences in `f64`, with
//!   plain loops on the host, and with the decompositions of fused operations.
//!
//! A runtime's tests are a few lines:
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
pub mod golden;
mod suite;

pub use suite::{Report, RunSection, Section, Verdict, determinism, goldens, run, sections};
