//! Compiles pointwise programs: a program and the types of its operands become a [`Kernel`] once, which is then cached.

mod cache;
mod compiled;
mod form;
mod hot;
mod kernel;
mod lower;
mod recent;
mod registers;
mod table;

pub(crate) use cache::Cache;
pub(crate) use form::Form;
pub(crate) use kernel::Kernel;
pub(in crate::pointwise) use kernel::{ImmediateBits, Slot};
pub(in crate::pointwise) use recent::with_kernel;
