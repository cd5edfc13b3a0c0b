//! Callbacks of a backward pass, called between kernels.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Tensor, TensorMut,
    ops::{Input, compute},
    pointwise::standard::COPY,
};

use crate::Leaf;

/// A leaf's finished gradient.
pub enum LeafGrad<R: Runtime> {
    /// The memory that [`BackwardHook::grad_slot`] returned, overwritten or accumulated into.
    Slot(TensorMut<R>),
    /// Memory that the backward pass allocated.
    Own(Tensor<R>),
}

impl<R: Runtime> LeafGrad<R> {
    /// The gradient, for reading. A gradient in a slot is copied, because the slot's memory returns to the hook. It includes what the slot
    /// held before, where micro-batches accumulate.
    pub fn value(&self) -> Result<Tensor<R>> {
        let slot = match self {
            LeafGrad::Own(own) => return Ok(own.clone()),
            LeafGrad::Slot(slot) => slot,
        };
        let mut copy = TensorMut::alloc(slot.runtime(), *slot.shape(), slot.dtype())?;
        compute(slot.runtime(), &COPY, &[Input::Memory(slot)], &[], &mut [&mut copy])?;
        copy.freeze()
    }
}

/// The callbacks of a backward pass. An error ends the pass.
pub trait BackwardHook<R: Runtime> {
    /// A leaf's value is about to be read: a chance to prefetch.
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        let _ = leaf;
        Ok(())
    }

    /// The memory in which the leaf's gradient is accumulated (a bucket's slot). With `None`, the backward pass
    /// allocates it.
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        let _ = leaf;
        Ok(None)
    }

    /// The leaf's last consumer has run: its gradient is final. The hook keeps it, sends it, or drops it.
    #[doc(alias("mark_grad_ready"))]
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()>;
}
