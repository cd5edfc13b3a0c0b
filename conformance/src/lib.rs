//! The conformance suite: the requirements on every runtime, and their tests.
//!
//! - [`golden`]: reference values from PyTorch, from any folder with the structure of `goldens/`; also the program
//!   `golden`.
//! - [`run`]: the suite that a new runtime runs until it passes. Sections compare with PyTorch, with finite differences
//!   in `f64`, with plain loops on the host, and with the decompositions of fused operations.
//!
//! - [`section_tests!`]: the suite as a runtime's tests, one for each section.
//! - [`documented`]: a check that the documentation's table of element types matches a runtime's capabilities.
//!
//! The whole suite at once:
//!
//! ```no_run
//! # use numcore::NullRuntime as MyRuntime;
//! let report = conformance::run(&MyRuntime::new());
//! assert!(report.passed(), "{report}");
//! ```
//!
//! **Invariant**: nothing in this crate depends on a runtime, except the program; no check is loosened for one.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod caught;
mod documented;
pub mod golden;
mod suite;

pub use documented::documented;
pub use suite::{Report, RunSection, Section, Verdict, determinism, goldens, run, section_names, sections};
