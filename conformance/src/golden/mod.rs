//! Reference values from PyTorch: a folder of `GROUP.json` and `GROUP.safetensors`, loaded and compared case by case.
//!
//! A case names an op of PyTorch's and gives inputs, attributes, outputs and gradients. The tables in `ops` map each op
//! to its computation in this framework. They follow PyTorch's semantics and defaults and never depend on the case, so
//! any folder of the same layout can be run.
//!
//! ```no_run
//! # fn main() -> numcore::Result<()> {
//! use conformance::golden::{Options, Outcome, load, run_case};
//! let rt = numcore::NullRuntime::new();
//! for case in load("conformance/goldens", &[])? {
//!     if let Outcome::Failed(lines) = run_case(&rt, &case, Options::default()) {
//!         println!("{}: {}", case.id, lines.join("; "));
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod attrs;
mod call;
mod case;
mod compare;
mod lr;
mod model;
mod ops;
mod optim;
mod placement;
mod run;
mod train;
mod transforms;

pub use attrs::Attrs;
pub use case::{Case, HostValue, load};
pub use compare::{Mismatch, compare, compare_at_scale, compare_values};
pub use placement::Placement;
pub use run::{Options, Outcome, run_case};
