//! Activation checkpointing (Chen et al. 2016): a segment saves only its inputs, and runs again in the backward pass.

use std::sync::Arc;

use numcore::{
    Error, ErrorKind, Result, Runtime, Tensor, TensorMut,
    ops::{Apply, Backprop, Spec},
};

use crate::{
    Backward, BackwardHook, Leaf, LeafGrad, LeafView, Var,
    anomaly::{in_forward, looks_at_gradients},
    is_grad_enabled,
    mode::{ForwardContext, Versions, note_read, reading, watching, with_grad},
    node::{Edge, NodeCall},
    observe,
    step::NodeStep,
};

/// The function of a segment, which backward recomputes. It depends only on its inputs, the leaves it reads, and random
/// seeds.
type SegmentFn<R> = dyn Fn(&[Var<R>]) -> Result<Vec<Var<R>>> + Send + Sync;

/// The node call of a checkpointed segment: everything its second run needs. Inputs of the node from position `inputs`
/// on are the leaves that the first run read.
pub(crate) struct Segment<R: Runtime> {
    run: Arc<SegmentFn<R>>,
    inputs: usize,
    /// The leaves whose values the first run read, frozen ones included, with their versions. The second run needs the
    /// same values.
    read: Versions<R>,
    context: ForwardContext,
}

/// Runs `segment` on `inputs` without saving its intermediates. The backward pass runs it again, with the same random
/// seeds and autocast.
///
/// The segment may read leaves (parameters) freely. Any other value that requires gradients must be one of `inputs`.
/// The gradients of a segment cannot be differentiated again.
///
/// # Errors
/// An error of `segment`, or if it captured a variable of the graph that is not one of `inputs`. The backward pass
/// fails if the second run's outputs differ in shape or dtype, or a leaf changed in between.
#[track_caller]
pub fn checkpoint<R: Runtime>(
    inputs: &[&Var<R>],
    segment: impl Fn(&[Var<R>]) -> Result<Vec<Var<R>>> + Send + Sync + 'static,
) -> Result<Vec<Var<R>>> {
    let plain: Vec<Var<R>> = inputs.iter().map(|v| v.detach()).collect();
    if !is_grad_enabled() {
        // Inside another segment, whose node must record the parameters that this segment is given as inputs.
        inputs.iter().filter_map(|v| v.edge.as_ref()).try_for_each(note_read)?;
        return segment(&plain);
    }
    let context = ForwardContext::here();
    let ((outs, reads), read) = watching(|| reading(|| segment(&plain)))?;
    let leaves = reads.iter().map(|l| l.var());
    let all: Vec<Var<R>> = inputs.iter().map(|v| (*v).clone()).chain(leaves).collect();
    let tensors = outs.iter().map(|v| v.value()).collect::<Result<_>>()?;
    if all.iter().all(|v| v.edge.is_none()) {
        return Ok(outs);
    }
    let call = NodeCall::Segment(Segment { run: Arc::new(segment), inputs: inputs.len(), read, context });
    let outs = Var::recorded(call, &all.iter().collect::<Vec<_>>(), tensors)?.into_vec();
    if observe::is_on() {
        observe::note(None, inputs, outs.iter().map(|v| v.spec()).collect(), observe::number_of(outs.first()));
    }
    Ok(outs)
}

impl<R: Runtime> Segment<R> {
    pub(crate) fn backward(&self, step: &mut NodeStep<'_, R>) -> Result<()> {
        // A backward pass with `create_graph` calls this with gradients enabled; any other with gradients disabled.
        if is_grad_enabled() {
            let why = "a checkpointed segment cannot be differentiated twice; run it without `checkpoint`".into();
            return Err(ErrorKind::NoGradient { op: "checkpoint", why }.into());
        }
        self.read.iter().try_for_each(|(leaf, saved)| leaf.unchanged_since(*saved))?;
        let inputs = (0..self.inputs).map(|i| fresh(step, i)).collect::<Result<Vec<_>>>()?;
        let outs = self.context.run(|| in_forward(|| with_grad(|| (self.run)(&inputs))))?;
        check_outputs(step, &outs)?;
        let mut backward: Option<Backward<R>> = None;
        for (k, out) in outs.iter().enumerate().filter(|(_, o)| o.requires_grad()) {
            let Some(g) = step.upstream(k)? else { continue };
            backward = Some(match backward {
                None => Backward::from(out, &g)?,
                Some(b) => b.seed(out, &g)?,
            });
        }
        let mut inner = SegmentHook { inputs: &inputs, step };
        backward.map_or(Ok(()), |b| b.run(&mut inner))
    }
}

/// Checks that the outputs of a segment's second run have the shapes and dtypes of the first run's.
fn check_outputs<R: Runtime>(step: &NodeStep<'_, R>, outs: &[Var<R>]) -> Result<()> {
    let first = (0..step.upstream.len()).map(|k| step.output_spec(k)).collect::<Result<Vec<_>>>()?;
    let again: Vec<Spec> = outs.iter().map(|v| v.spec()).collect();
    if first == again {
        return Ok(());
    }
    let list = |specs: &[Spec]| specs.iter().map(|s| format!("{} {}", s.dtype, s.shape)).collect::<Vec<_>>().join(", ");
    let why = format!(
        "gave ({}) in forward and ({}) in backward; it may depend on its inputs, parameters and random seeds alone",
        list(&first),
        list(&again)
    );
    Err(Error::state("the segment of `checkpoint`".to_string(), why))
}

/// Input `i` of the segment as a leaf of the inner graph; as a constant if its gradient is not wanted.
fn fresh<R: Runtime>(step: &mut NodeStep<'_, R>, i: usize) -> Result<Var<R>> {
    let value = step.input(i)?.value()?;
    if step.wants(i) { Var::leaf("checkpoint input", value) } else { Ok(Var::new(value)) }
}

/// The hook of the inner backward pass. Gradients of the segment's inputs go to the outer node's inputs, gradients of
/// parameters into the slots of the outer pass.
struct SegmentHook<'a, 's, R: Runtime> {
    inputs: &'a [Var<R>],
    step: &'a mut NodeStep<'s, R>,
}

impl<R: Runtime> SegmentHook<'_, '_, R> {
    fn input(&self, leaf: &Arc<Leaf<R>>) -> Option<usize> {
        self.inputs.iter().position(|v| v.as_leaf().is_some_and(|l| Arc::ptr_eq(l, leaf)))
    }
}

impl<R: Runtime> BackwardHook<R> for SegmentHook<'_, '_, R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.step.hook.on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        if self.input(leaf).is_some() {
            return Ok(None);
        }
        self.step.lend_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        match (self.input(leaf), grad) {
            (Some(i), LeafGrad::Own(g)) => (self.step as &mut dyn Backprop<Var<R>>).give_value(i, &Var::new(g)),
            (_, LeafGrad::Slot(slot)) => self.step.return_slot(leaf, slot),
            (None, LeafGrad::Own(g)) => self.step.give_leaf(leaf, g),
        }
    }
}

impl<R: Runtime> NodeStep<'_, R> {
    /// Delivers the gradient of a leaf that the segment read, along the edge from the segment's node to the leaf. If no
    /// gradient of the leaf was accumulated before, the memory of this one becomes the accumulator.
    fn give_leaf(&mut self, leaf: &Arc<Leaf<R>>, grad: Tensor<R>) -> Result<()> {
        let is = |e: &Option<Edge<R>>| matches!(e, Some(Edge::Leaf(v)) if Arc::ptr_eq(LeafView::leaf(v), leaf));
        let at = self.node.edges.iter().rposition(is);
        let unread = || {
            let why = "was read by the segment of `checkpoint` in backward, and not in forward".to_string();
            Error::state(leaf.name().to_string(), why)
        };
        let i = at.ok_or_else(unread)?;
        let first = self.sweep.only.is_none() && self.sweep.leaf_state(leaf)?.grad.is_none();
        let grad = match first && !looks_at_gradients() {
            true => match grad.try_mut() {
                Ok(memory) => {
                    self.return_slot(leaf, memory)?;
                    self.given[i] = true;
                    return self.sweep.finish_edge(leaf, self.hook);
                }
                Err(shared) => shared,
            },
            false => grad,
        };
        (self as &mut dyn Backprop<Var<R>>).give_value(i, &Var::new(grad))
    }
}
