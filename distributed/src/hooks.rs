//! Observation of gradients during a step.

use std::{collections::HashSet, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use numcore::{Result, Runtime, Tensor, TensorMut, ops::Op};
use parking_lot::Mutex;

/// A function that is called with a parameter's leaf and its gradient. The lock makes steps `Sync` and is never taken:
/// calls go through `get_mut`.
pub(crate) type GradientObserver<R> = Mutex<Box<dyn FnMut(&Arc<Leaf<R>>, &LeafGrad<R>) -> Result<()> + Send>>;

/// A hook that shows each gradient to the observer, then passes it on. If the loss does not count, and may be infinite,
/// it passes zeros in place of gradients, or nothing.
pub(crate) struct CountedHook<'a, R: Runtime> {
    pub(crate) hook: &'a mut dyn BackwardHook<R>,
    pub(crate) observer: Option<&'a mut GradientObserver<R>>,
    pub(crate) counts: bool,
    /// True if the hook waits for each gradient.
    pub(crate) waits: bool,
    /// The ids of leaves whose gradients include other ranks' examples: they count in any case.
    pub(crate) shared: &'a HashSet<usize>,
}

impl<R: Runtime> CountedHook<'_, R> {
    fn counts(&self, leaf: &Arc<Leaf<R>>) -> bool {
        self.counts || self.shared.contains(&leaf.id())
    }

    /// Zeros in place of a gradient that does not count.
    fn zeros(&mut self, leaf: &Arc<Leaf<R>>) -> Result<LeafGrad<R>> {
        let zeros = Tensor::zeros(leaf.runtime(), leaf.spec().shape, leaf.spec().dtype)?;
        Ok(match self.hook.grad_slot(leaf)? {
            None => LeafGrad::Own(zeros),
            Some(mut slot) => {
                slot.accumulate(&Op::identity(), &[&zeros])?;
                LeafGrad::Slot(slot)
            }
        })
    }
}

impl<R: Runtime> BackwardHook<R> for CountedHook<'_, R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.hook.on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        if self.counts(leaf) { self.hook.grad_slot(leaf) } else { Ok(None) }
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        let grad = match (self.counts(leaf), self.waits) {
            (true, _) => grad,
            (false, true) => self.zeros(leaf)?,
            (false, false) => return Ok(()),
        };
        observe(self.observer.as_deref_mut(), leaf, &grad)?;
        self.hook.on_leaf_grad_ready(leaf, grad)
    }
}

/// Shows a gradient to the observer, which must drop it before the gradient is passed on: its memory is written again.
pub(crate) fn observe<R: Runtime>(
    observer: Option<&mut GradientObserver<R>>,
    leaf: &Arc<Leaf<R>>,
    grad: &LeafGrad<R>,
) -> Result<()> {
    observer.map_or(Ok(()), |look| look.get_mut()(leaf, grad))
}
