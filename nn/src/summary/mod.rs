//! Model summaries: a table of parameters, and what a forward pass does by module.

mod forward;
mod table;
mod tree;

pub use forward::{ModuleRow, ModuleSummary, ParameterCount, modules_of_calls};
pub(crate) use table::table;
