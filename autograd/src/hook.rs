//! Callbacks of a backward pass, called between kernels.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Tensor, TensorMut,
    ops::{Input, compute},
    pointwise::standard::COPY,
};

use crate::Leaf;

/// The final gradient of a leaf in one backward pass.
pub enum LeafGrad<R: Runtime> {
    /// The memory that [`BackwardHook::grad_slot`] returned, with the gradient written or accumulated into it.
    Slot(TensorMut<R>),
    /// Memory that the backward pass allocated, because the hook returned no slot.
    Own(Tensor<R>),
}

impl<R: Runtime> LeafGrad<R> {
    /// The gradient, for reading. A gradient in a slot is copied, because the slot's memory returns to the hook. It
    /// includes the slot's previous contents where micro-batches accumulate.
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

/// The callbacks of a backward pass. An error of a callback ends the pass.
pub trait BackwardHook<R: Runtime> {
    /// Prepares for a leaf whose value the backward pass is about to read, for example by a prefetch. The default does
    /// nothing.
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        let _ = leaf;
        Ok(())
    }

    /// The memory in which the leaf's gradient is accumulated, for example its slot in a bucket. For `None`, the
    /// default, the backward pass allocates it.
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        let _ = leaf;
        Ok(None)
    }

    /// Receives the final gradient of a leaf, right after the leaf's last consumer in this pass. The hook keeps it,
    /// sends it, or drops it.
    #[doc(alias("mark_grad_ready"))]
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()>;
}
