//! Overlap of leaf gradients with the transfer of another gradient.
//!
//! A function whose gradient is a collective sends it, and the backward pass cannot continue upstream before it
//! arrives. Meanwhile it can compute the weight gradients of the nodes that read the function's output. Their op calls
//! are postponed until the gradient is sent. Megatron overlaps the all-reduce of the input gradient with the GEMM of
//! the weight gradient so. Calls for one leaf keep their order, so no bit of a sum changes.
//!
//! A value that is sent once and read by many layers would postpone the calls of all these layers to the end. Calls are
//! therefore postponed for at most `PATIENCE` nodes.

use std::sync::Arc;

use numcore::{Result, Runtime, ops::Backprop};

use crate::{
    BackwardHook, Function, Leaf, Var,
    node::{Edge, Node, NodeCall},
    step::NodeStep,
    sweep::{Sweep, target},
};

/// The number of nodes without a postponed call that are visited before postponed calls run. It exceeds the nodes
/// between the projections that read one value, and is below the nodes of a layer. A number of nodes is the same on
/// every rank.
const PATIENCE: usize = 16;

impl<R: Runtime> Sweep<R> {
    /// Decides, before a node is visited, if its calls for leaves are postponed. Runs calls that were postponed for
    /// long enough.
    pub(crate) fn begin_node(&mut self, node: &Node<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        self.postpones = self.leads_to_sender(node);
        self.waited = if self.postpones { 0 } else { self.waited + 1 };
        if self.waited > PATIENCE && !self.postponed.is_empty() { self.run_postponed(hook) } else { Ok(()) }
    }

    /// Tells whether a node reads an output of a function that sends its gradient. It is false, so that nothing is
    /// postponed, while gradients are recorded or deferred.
    fn leads_to_sender(&self, node: &Node<R>) -> bool {
        let sends = |edge: &Edge<R>| match edge {
            Edge::Node(node, _) => matches!(&node.call, NodeCall::Function(function) if function.sends_gradient()),
            Edge::Leaf(_) => false,
        };
        !self.options.create_graph && self.only.is_none() && node.edges.iter().flatten().any(sends)
    }

    /// Runs the postponed op calls in their order.
    pub(crate) fn run_postponed(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let postpones = std::mem::take(&mut self.postpones);
        let postponed = std::mem::take(&mut self.postponed);
        postponed.into_iter().try_for_each(|call| self.deliver_kept(call, hook))?;
        self.postpones = postpones;
        Ok(())
    }

    /// Runs the postponed calls if one of them is for `leaf`, before another gradient is added to it.
    pub(crate) fn flush_for(&mut self, leaf: &Arc<Leaf<R>>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let mut edges = self.postponed.iter().flat_map(|call| call.to.iter().flatten());
        let waits = edges.any(|edge| target(edge) == leaf.id());
        if waits { self.run_postponed(hook) } else { Ok(()) }
    }
}

impl<R: Runtime> NodeStep<'_, R> {
    /// Runs the backward of a function. While a gradient that it sends is in transit, postponed op calls run.
    pub(crate) fn function(&mut self, function: &Arc<dyn Function<R>>) -> Result<()> {
        let sends = function.sends_gradient() && !self.sweep.options.create_graph;
        let upstream = self.upstream.first_mut().filter(|_| sends).and_then(Option::take);
        // The gradient has no other holder, so it can be sent from its own memory.
        let sent = upstream.map(|upstream| function.send_gradient(upstream.into_value()?)).transpose()?;
        self.sweep.run_postponed(self.hook)?;
        match sent {
            Some(arriving) => (self as &mut dyn Backprop<Var<R>>).give_value(0, &Var::new(arriving()?)),
            None => function.clone().backward(self),
        }
    }
}
