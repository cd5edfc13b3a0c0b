//! Neural networks: the parts that models are made of, and the operations on every model.
//!
//! A model is a struct whose fields are parameters, buffers and other modules. `#[derive(Module)]` makes them known by
//! the names of its fields, which are PyTorch's for every layer here; [`ModuleExt`] then counts, freezes, saves and
//! loads them. A model is written once, generic over `R: Runtime`:
//!
//! ```
//! use autograd::Var;
//! use nn::{Forward, Init, LayerNorm, Linear, Module, ModuleExt, Relu, Runtime};
//! use numcore::{NullRuntime, Result};
//!
//! #[derive(Module)]
//! struct Mlp<R: Runtime> {
//!     norm: LayerNorm<R>,
//!     fc1: Linear<R>,
//!     fc2: Linear<R>,
//! }
//!
//! impl<R: Runtime> Mlp<R> {
//!     fn new(init: &Init<R>, width: usize) -> Result<Self> {
//!         Ok(Mlp {
//!             norm: LayerNorm::new(init, width)?,
//!             fc1: Linear::new(init, width, 4 * width)?,
//!             fc2: Linear::new(init, 4 * width, width)?,
//!         })
//!     }
//! }
//!
//! impl<R: Runtime> Forward<R> for Mlp<R> {
//!     fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
//!         self.fc2.forward(&Relu.forward(&self.fc1.forward(&self.norm.forward(x)?)?)?)
//!     }
//! }
//!
//! let model = Mlp::new(&Init::new(&NullRuntime::new(), 42), 8)?;
//! let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
//! assert_eq!(names, ["norm.weight", "norm.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
//! # Ok::<(), numcore::Error>(())
//! ```
//!
//! **Invariant**: parameters are known by name and order, both the model's own; nothing depends on addresses.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

// The derive macro names this crate by its path, here as everywhere.
extern crate self as nn;

mod counted_rows;
mod functional;
mod init;
mod layers;
pub mod loss;
mod module;
mod module_ext;
pub mod moe;
pub mod parallel;
mod param;
mod replaced;
mod state;
mod summary;
mod walk;

/// The names the facade re-exports in place of this crate's, so that its users need not depend on this crate.
#[doc(hidden)]
pub mod for_facade {
    pub use crate::module::Module;
    pub use nn_derive::FacadeModule as Module;
}

pub use counted_rows::{CountedRows, counted_rows, set_counted_rows};
pub use functional::functional_call;
pub use init::{Fan, Init, Initializer, Nonlinearity};
pub use layers::*;
pub use module::{Forward, Module, Stage, Visitor};
pub use module_ext::{ModuleExt, under};
/// Implements [`Module`](trait@Module) for a struct: each field is a part, named after the field.
///
/// The struct has a type parameter bound by `Runtime`, unless it holds no state but [`Mode`]s. A model for one runtime
/// needs none: `#[module(runtime = Cpu)]` on the struct. Fields of plain types
/// (integers, floats, `bool`, `String`, and `Option`, `Vec`, `Box`, `Arc`, arrays or tuples of these) are left out. On
/// a field:
///
/// - `#[module(skip)]` leaves it out;
/// - `#[module(rename = "name")]` gives it another name;
/// - `#[module(flatten)]` puts its parts among the struct's own: `attention.proj` becomes `proj`.
///
/// On the struct, `#[module(crate = "path")]` gives the path of this crate when it is not `::nn`.
///
/// ```
/// # use nn::{Init, Linear, Module, ModuleExt};
/// # use numcore::NullRuntime;
/// #[derive(Module)]
/// #[module(runtime = NullRuntime)]
/// struct Head { layers: Vec<Linear<NullRuntime>> }
///
/// let head = Head { layers: vec![Linear::new(&Init::new(&NullRuntime::new(), 0), 4, 2)?] };
/// assert_eq!(head.named_parameters()[0].0, "layers.0.weight");
/// # Ok::<(), numcore::Error>(())
/// ```
/// ```compile_fail
/// #[derive(nn::Module)]
/// enum Either { A, B } // an enum's parts would depend on its value
/// ```
/// ```compile_fail
/// #[derive(nn::Module)]
/// struct Concrete { linear: nn::Linear<numcore::NullRuntime> } // neither `R: Runtime` nor `runtime = ..`
/// ```
/// ```compile_fail
/// #[derive(nn::Module)]
/// #[module(runtime = numcore::NullRuntime)]
/// struct Both<R: nn::Runtime> { linear: nn::Linear<R> }
/// ```
pub use nn_derive::Module;
pub use numcore::Runtime;
pub use param::{Buffer, Mode, Param};
pub use state::LoadReport;
pub use summary::{ModuleOutputs, ModuleRow, ModuleSummary, ParameterCount, modules_of_calls};
pub use walk::{ModuleEntry, walk};
