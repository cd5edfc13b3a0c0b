//! Adapters: what stands between a linear layer's weight and its output, without the model knowing.

use std::{fmt, sync::Arc};

use autograd::Var;
use numcore::{Result, Runtime};
use parking_lot::RwLock;

use super::Linear;
use crate::{Module, Visitor};

/// Computes the output of a linear layer in place of `x · Wᵀ + b`: a low-rank update, or a weight that is kept in another form.
///
/// Parameters of an adapter are named as the layer's own.
pub trait Adapter<R: Runtime>: Module<R> {
    /// The output of `layer` for `x: [.., I]`, `[.., O]`. [`Linear::plain`] is the output without an adapter. Where the layer is cut over ranks,
    /// `x` is what [`Linear::enter`] gave, or this rank's part of the inputs, and the output is cut if the layer's is.
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>>;

    /// Whether this computes the output of a layer that a plan has cut over ranks. Unless an adapter says so, such a layer refuses it.
    fn can_be_cut(&self) -> bool {
        false
    }

    /// This adapter as a value of its own type, for those who put it there.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// The place for a linear layer's [`Adapter`], empty at first. A clone is the same place.
///
/// [`walk`](crate::walk) shows it as [`ModuleEntry::Adapter`](crate::ModuleEntry::Adapter), so that adapters can be put into any model by the
/// names of its layers.
pub struct AdapterSlot<R: Runtime>(Arc<RwLock<Option<Arc<dyn Adapter<R>>>>>);

impl<R: Runtime> AdapterSlot<R> {
    /// The adapter, if there is one.
    pub fn get(&self) -> Option<Arc<dyn Adapter<R>>> {
        self.0.read().clone()
    }

    /// Tells whether this is not the only clone: a layer that was dropped has its place no more.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Puts an adapter in, or takes it out; gives the one that was there. Optimizers and trainers that exist already do not see it.
    pub fn replace(&self, adapter: Option<Arc<dyn Adapter<R>>>) -> Option<Arc<dyn Adapter<R>>> {
        std::mem::replace(&mut *self.0.write(), adapter)
    }
}

impl<R: Runtime> Module<R> for AdapterSlot<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.adapter(self);
        if let Some(adapter) = self.get() {
            adapter.visit(name, visitor);
        }
    }
}

impl<R: Runtime> Default for AdapterSlot<R> {
    fn default() -> Self {
        AdapterSlot(Arc::default())
    }
}

impl<R: Runtime> Clone for AdapterSlot<R> {
    fn clone(&self) -> Self {
        AdapterSlot(self.0.clone())
    }
}

impl<R: Runtime> fmt::Debug for AdapterSlot<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.read().is_some() { "AdapterSlot(filled)" } else { "AdapterSlot(empty)" })
    }
}
