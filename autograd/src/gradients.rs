//! Gradients by leaf: the hook behind [`backward`](crate::backward).

use std::{collections::HashMap, sync::Arc};

use numcore::{ErrorKind, Result, Runtime, Tensor, Within, ops::PointwiseOps};

use crate::{BackwardHook, Leaf, LeafGrad, Var};

/// The gradients of the leaves that took part in a loss. Another backward pass into the same `Gradients` accumulates.
pub struct Gradients<R: Runtime> {
    by_leaf: HashMap<usize, usize>,
    entries: Vec<(Arc<Leaf<R>>, Tensor<R>)>,
}

impl<R: Runtime> Default for Gradients<R> {
    fn default() -> Self {
        Gradients { by_leaf: HashMap::new(), entries: Vec::new() }
    }
}

impl<R: Runtime> Gradients<R> {
    /// An empty collection of gradients, to be passed to a backward pass as its hook.
    pub fn new() -> Self {
        Self::default()
    }

    /// The gradient of a leaf; `None` if the leaf took no part in the loss.
    pub fn get(&self, leaf: &Arc<Leaf<R>>) -> Option<&Tensor<R>> {
        self.by_leaf.get(&leaf.id()).map(|&i| &self.entries[i].1)
    }

    /// The gradient of a leaf variable; `None` if `var` is no leaf or took no part in the loss.
    pub fn of(&self, var: &Var<R>) -> Option<&Tensor<R>> {
        self.get(var.as_leaf()?)
    }

    /// Replaces the gradient of a leaf, for clipping or for gradients computed elsewhere.
    ///
    /// # Errors
    /// An error if `grad` differs from the leaf in shape, dtype or device.
    #[track_caller]
    pub fn set(&mut self, leaf: &Arc<Leaf<R>>, grad: Tensor<R>) -> Result<()> {
        leaf.check(&grad, "its gradient").at_caller()?;
        self.put(leaf, grad);
        Ok(())
    }

    fn put(&mut self, leaf: &Arc<Leaf<R>>, grad: Tensor<R>) {
        match self.by_leaf.get(&leaf.id()) {
            Some(&i) => self.entries[i].1 = grad,
            None => {
                self.by_leaf.insert(leaf.id(), self.entries.len());
                self.entries.push((leaf.clone(), grad));
            }
        }
    }

    /// The gradients of all leaves that have one, in the order in which they became final.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<Leaf<R>>, &Tensor<R>)> {
        self.entries.iter().map(|(l, g)| (l, g))
    }

    /// The number of leaves that have a gradient.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Tells whether no leaf has a gradient.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Checks that every leaf of `leaves` that requires a gradient has one.
    ///
    /// # Errors
    /// `ErrorKind::MissingGradient` with the names of the leaves without a gradient.
    #[track_caller]
    pub fn require(&self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        let missing = leaves.iter().filter(|l| l.requires_grad() && self.get(l).is_none());
        let names: Vec<String> = missing.map(|l| l.name().to_string()).collect();
        if names.is_empty() { Ok(()) } else { Err(ErrorKind::MissingGradient { names }.into()).at_caller() }
    }
}

impl<R: Runtime> BackwardHook<R> for Gradients<R> {
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        let grad = match grad {
            LeafGrad::Own(grad) => grad,
            LeafGrad::Slot(slot) => slot.freeze()?,
        };
        let sum = match self.get(leaf) {
            Some(before) => before.add(&grad)?,
            None => grad,
        };
        self.put(leaf, sum);
        Ok(())
    }
}
