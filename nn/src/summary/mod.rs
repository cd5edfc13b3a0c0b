//! Model summaries: a table of parameters, and what a forward pass does by module.

mod forward;
mod table;
mod tree;

pub(crate) use forward::module_outputs;
pub use forward::{ModuleOutputs, ModuleRow, ModuleSummary, ParameterCount, modules_of_calls};
pub(crate) use table::table;
