//! Parameters that take no part in a step's loss.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{ErrorKind, Result, Runtime, Tensor};

use crate::comm::{Collectives, Comm, ReduceOp, memory};

/// The treatment of parameters that take no part in a step's loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Unused {
    /// An error that names them, before the optimizer may run.
    #[default]
    Error,
    /// A rank that did not use a parameter contributes zero to its gradient; a parameter that no rank used has no
    /// gradient. Costs an exchange of one byte for each parameter. Stages of a pipeline then exchange gradients between
    /// passes alone, not beside them.
    Allow,
}

/// Tells whether a rank has no example in a step: its losses weigh nothing and it used no parameter. It then
/// contributes zeros to the gradients of other ranks.
pub(crate) fn idles(has_zero_weight: bool, mut used: impl Iterator<Item = bool>) -> bool {
    has_zero_weight && !used.any(|used| used)
}

/// The parameters that any rank used, one `bool` for each. `own` has those that this rank used, in the same order on
/// all ranks. Blocks.
pub(crate) fn used_anywhere<R: Runtime>(comm: &Comm<R>, own: impl Iterator<Item = bool>) -> Result<Vec<bool>> {
    let own: Vec<u8> = own.map(u8::from).collect();
    let flags = memory(&Tensor::from_slice(comm.runtime(), [own.len()], &own)?)?;
    let flags = comm.all_reduce(flags, ReduceOp::Max)?.wait()?.freeze()?.to_vec::<u8>()?;
    Ok(flags.into_iter().map(|flag| flag > 0).collect())
}

/// An error that names every trained parameter without use.
pub(crate) fn require_all<'a, R: Runtime>(parameters: impl Iterator<Item = (&'a Arc<Leaf<R>>, bool)>) -> Result<()> {
    let missing = parameters.filter(|(leaf, used)| leaf.requires_grad() && !used);
    let names: Vec<String> = missing.map(|(leaf, _)| leaf.name().to_string()).collect();
    if names.is_empty() { Ok(()) } else { Err(ErrorKind::MissingGradient { names }.into()) }
}
