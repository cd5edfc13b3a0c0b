//! Accumulators of gradients, lent to an op call that writes several gradients at once.

use std::sync::Arc;

use numcore::{
    MemoryCategory, Result, Runtime, Tensor, TensorMut,
    ops::{Apply, Op, ViewOp},
};
use smallvec::SmallVec;

use crate::{
    BackwardHook, Leaf, Var,
    node::{Edge, Node, TapeValue},
    sweep::{Sweep, id, target},
    var::with_values,
};

impl<R: Runtime> Sweep<R> {
    /// Delivers the results of an op call to as many edges. It writes those whose memory exists in place. A call whose
    /// results are all deferred, or all postponed, is stored instead.
    pub(crate) fn deliver_all(
        &mut self,
        to: &[Option<Edge<R>>],
        op: Op,
        ins: &[&Var<R>],
        hook: &mut dyn BackwardHook<R>,
    ) -> Result<()> {
        if self.keep_all(&to.iter().map(Option::as_ref).collect::<SmallVec<[_; 4]>>(), &op, ins) {
            return Ok(());
        }
        let mut memory = self.lend(to, hook)?;
        if memory.iter().all(Option::is_none) {
            let outs = Var::apply(op, ins)?;
            let mut wanted = to.iter().zip(&outs).filter_map(|(edge, out)| Some((edge.as_ref()?, out)));
            return wanted.try_for_each(|(edge, out)| self.deliver(edge, Op::identity(), &[out], hook));
        }
        let lent: SmallVec<[bool; 4]> = memory.iter().map(Option::is_some).collect();
        let slot = |k: usize| Some((memory[k].take()?, views_of(&to[k])));
        let outs = with_values(ins, |values| Tensor::compute_through(&op, values, slot))?;
        for ((edge, out), lent) in to.iter().zip(outs).zip(lent) {
            match edge {
                Some(edge) if lent => self.take_back(edge, out, hook)?,
                Some(edge) => self.deliver(edge, Op::identity(), &[&Var::new(out.freeze()?)], hook)?,
                None => {}
            }
        }
        Ok(())
    }

    /// The memory in which the gradient of each edge is accumulated: a leaf's slot, or a node's gradient with no other
    /// holder. An entry is `None` where no memory exists yet, or an earlier edge has the same target. It is also `None`
    /// where the op call must be recorded, deferred or postponed.
    fn lend(
        &mut self,
        edges: &[Option<Edge<R>>],
        hook: &mut dyn BackwardHook<R>,
    ) -> Result<SmallVec<[Option<TensorMut<R>>; 4]>> {
        if self.options.create_graph || self.options.examples.is_some() || self.only.is_some() {
            return Ok(edges.iter().map(|_| None).collect());
        }
        if !self.postpones && !self.postponed.is_empty() {
            for edge in edges.iter().flatten() {
                if let Edge::Leaf(view) = edge {
                    self.flush_for(view.leaf(), hook)?;
                }
            }
        }
        let again = |i: usize, edge: &Edge<R>| edges[..i].iter().flatten().any(|e| target(e) == target(edge));
        let lend = |(i, edge): (usize, &Option<Edge<R>>)| match edge {
            Some(edge) if again(i, edge) => Ok(None),
            Some(Edge::Leaf(_)) if self.postpones => Ok(None),
            Some(Edge::Leaf(view)) => self.slot(view.leaf(), hook).map(Some),
            Some(Edge::Node(node, k)) => Ok(self.sole(node, *k as usize)),
            None => Ok(None),
        };
        edges.iter().enumerate().map(lend).collect()
    }

    /// Takes back the memory of an edge's gradient after an op call has written it.
    fn take_back(&mut self, edge: &Edge<R>, memory: TensorMut<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        match edge {
            Edge::Leaf(view) => {
                self.leaf_state(view.leaf())?.grad = Some(memory);
                self.finish_edge(view.leaf(), hook)
            }
            Edge::Node(node, k) => {
                let sum = Var::new(memory.freeze()?);
                self.pending(node)[*k as usize] = Some(sum);
                Ok(())
            }
        }
    }

    /// Takes the memory for a leaf's gradient: the hook's slot, or newly allocated memory.
    pub(crate) fn slot(&mut self, leaf: &Arc<Leaf<R>>, hook: &mut dyn BackwardHook<R>) -> Result<TensorMut<R>> {
        let state = self.leaf_state(leaf)?;
        if let Some(slot) = state.grad.take() {
            return Ok(slot);
        }
        let slot = hook.grad_slot(leaf)?;
        state.lent = slot.is_some();
        match slot {
            Some(slot) => {
                leaf.check_spec(slot.spec(), slot.runtime().device(), "its gradient slot")?;
                Ok(slot)
            }
            None => TensorMut::alloc(
                &leaf.runtime().with_category(MemoryCategory::Gradients),
                leaf.spec().shape,
                leaf.spec().dtype,
            ),
        }
    }

    /// Takes the gradient of a node's output, if it exists and has no other holder.
    fn sole(&mut self, node: &Arc<Node<R>>, k: usize) -> Option<TensorMut<R>> {
        let sum = &mut self.grads.get_mut(&id(node))?[k];
        match sum.take()? {
            Var { value: TapeValue::Own(value), edge: None } => match value.try_mut() {
                Ok(memory) => return Some(memory),
                Err(shared) => *sum = Some(Var::new(shared)),
            },
            other => *sum = Some(other),
        }
        None
    }
}

/// The views through which an edge's gradient is written to its memory.
fn views_of<R: Runtime>(edge: &Option<Edge<R>>) -> &[ViewOp] {
    match edge {
        Some(Edge::Leaf(view)) => view.views(),
        _ => &[],
    }
}
