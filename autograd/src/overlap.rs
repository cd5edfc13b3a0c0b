//! Gradients of leaves that are computed while another gradient is under way.
//!
//! A function whose gradient is a collective sends it, and the pass has nothing to go on with before it arrives: but for the weight gradients of
//! the nodes that gave it its gradient. Their op calls are postponed until it is sent (Megatron's overlap of the input gradient's all-reduce
//! with the weight gradient's GEMM). Calls for one leaf keep their order, so no bit of a sum changes.
//!
//! A value that is sent once and read by many layers would have all of them wait until the end: calls wait for a few nodes alone.

use std::sync::Arc;

use numcore::{Result, Runtime, ops::Backprop};
use smallvec::SmallVec;

use crate::{
    BackwardHook, Function, Leaf, Var,
    node::{Edge, Node, NodeCall},
    step::NodeStep,
    sweep::{KeptCall, Sweep, target},
};

/// How many nodes after the last one that postponed a call are visited before what is postponed runs: more than lie between the projections
/// that read one value, and fewer than a layer has. A number of nodes is the same on every rank.
const PATIENCE: usize = 16;

impl<R: Runtime> Sweep<R> {
    /// Before a node is visited: whether its calls for leaves are postponed. Runs those that have waited long enough.
    pub(crate) fn begin_node(&mut self, node: &Node<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        self.postpones = self.leads_to_sender(node);
        self.waited = if self.postpones { 0 } else { self.waited + 1 };
        if self.waited > PATIENCE && !self.postponed.is_empty() { self.run_postponed(hook) } else { Ok(()) }
    }

    /// Whether a node reads a leaf, and an output of a function that sends its gradient. Where gradients are recorded, or deferred, nothing
    /// is postponed.
    fn leads_to_sender(&self, node: &Node<R>) -> bool {
        let sends = |edge: &Edge<R>| match edge {
            Edge::Node(node, _) => matches!(&node.call, NodeCall::Function(function) if function.sends_gradient()),
            Edge::Leaf(_) => false,
        };
        !self.options.create_graph && self.only.is_none() && node.edges.iter().flatten().any(sends)
    }

    /// Runs the op calls that were postponed.
    pub(crate) fn run_postponed(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let postpones = std::mem::take(&mut self.postpones);
        for KeptCall { to, op, ins } in std::mem::take(&mut self.postponed) {
            self.deliver(&to, op, &ins.iter().collect::<SmallVec<[&Var<R>; 4]>>(), hook)?;
        }
        self.postpones = postpones;
        Ok(())
    }

    /// Runs what was postponed before another gradient is added to that of a leaf that waits.
    pub(crate) fn flush_for(&mut self, leaf: &Arc<Leaf<R>>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let waits = self.postponed.iter().any(|call| target(&call.to) == leaf.id());
        if waits { self.run_postponed(hook) } else { Ok(()) }
    }
}

impl<R: Runtime> NodeStep<'_, R> {
    /// The backward pass of a function: one that sends its gradient goes on its way while postponed op calls run.
    pub(crate) fn function(&mut self, function: &Arc<dyn Function<R>>) -> Result<()> {
        let sends = function.sends_gradient() && !self.sweep.options.create_graph;
        let upstream = self.upstream.first_mut().filter(|_| sends).and_then(Option::take);
        // Without another holder, so that it can be sent from where it is.
        let sent = upstream.map(|upstream| function.send_gradient(upstream.into_value()?)).transpose()?;
        self.sweep.run_postponed(self.hook)?;
        match sent {
            Some(arriving) => (self as &mut dyn Backprop<Var<R>>).give_value(0, &Var::new(arriving()?)),
            None => function.clone().backward(self),
        }
    }
}
