//! Adapters: a replacement for the output of a linear layer, transparent to the model.

use std::{fmt, sync::Arc};

use autograd::Var;
use numcore::{Result, Runtime};
use parking_lot::RwLock;

use super::Linear;
use crate::{Module, Visitor};

/// Computes the output of a linear layer in place of `x · Wᵀ + b`: with a low-rank update, or from a weight in another
/// form.
///
/// Parameters of an adapter are named as the layer's own.
pub trait Adapter<R: Runtime>: Module<R> {
    /// The output of `layer`, `[.., O]`, for `x: [.., I]`. [`Linear::plain`] is the output without an adapter. Where
    /// the layer is cut over ranks, `x` is the result of [`SharedInput::enter`](crate::parallel::SharedInput::enter),
    /// or this rank's part of the inputs. The output is cut if the layer's is.
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>>;

    /// Tells whether the adapter supports a layer that a plan has cut over ranks. Such a layer rejects an adapter that
    /// does not; the default is false.
    fn can_be_cut(&self) -> bool {
        false
    }

    /// This adapter as `Any`, so that the code that inserted it can get its own type back.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A slot for a linear layer's [`Adapter`], empty at first. A clone shares the slot.
///
/// [`walk`](crate::walk) shows it as [`ModuleEntry::Adapter`](crate::ModuleEntry::Adapter), so adapters can be inserted
/// into any model by the names of its layers.
pub struct AdapterSlot<R: Runtime>(Arc<RwLock<Option<Arc<dyn Adapter<R>>>>>);

impl<R: Runtime> AdapterSlot<R> {
    /// The adapter, if there is one.
    pub fn get(&self) -> Option<Arc<dyn Adapter<R>>> {
        self.0.read().clone()
    }

    /// Tells whether another clone exists. If there is none, the layer that had this slot was dropped.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Inserts an adapter, or removes it, and returns the previous one. Optimizers and trainers that exist already do
    /// not see the change.
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
