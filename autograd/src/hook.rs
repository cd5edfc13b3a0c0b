//! What a backward sweep tells its caller, between kernels.

use std::sync::Arc;

use numcore::{Result, Runtime, Tensor, TensorMut};

use crate::Leaf;

/// A leaf's finished gradient.
pub enum LeafGrad<R: Runtime> {
    /// The memory that [`BackwardHook::grad_slot`] gave, filled (or added to).
    Slot(TensorMut<R>),
    /// Memory of its own.
    Own(Tensor<R>),
}

/// The callbacks of a backward sweep. An error ends the sweep.
pub trait BackwardHook<R: Runtime> {
    /// A leaf's value is about to be read: a chance to prefetch.
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        let _ = leaf;
        Ok(())
    }

    /// Memory the leaf's gradient is to be accumulated in (a bucket's slot); `None`: the sweep allocates.
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        let _ = leaf;
        Ok(None)
    }

    /// The leaf's last consumer has run: its gradient is final. The hook keeps it, sends it, or drops it.
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()>;
}
