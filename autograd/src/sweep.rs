//! The engine of a backward pass: one walk over the graph, from the highest node number to the lowest.
//!
//! Its three maps are for look-up alone: gradients that await their node, the state of each leaf, and the nodes that
//! lead to an input. The last one exists only when weight gradients are deferred. A leaf's gradient is final when every
//! edge to it is settled: its op call has run, or its node finished without giving one.
//!
//! Op calls for leaves of the nodes that read the output of a gradient-sending function are postponed (see
//! `overlap.rs`).

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use numcore::{
    Error, ErrorKind, Result, Runtime, Tensor, TensorMut,
    ops::{Apply, Op, Rule, by_example},
};
use smallvec::SmallVec;

use crate::{
    BackwardHook, Leaf, LeafGrad, LeafView, Var,
    address::ByAddress,
    anomaly::in_backward,
    autocast::no_autocast,
    node::{Edge, Node, NodeCall, Saved, TapeValue},
    recipe::Remade,
    step::NodeStep,
    var::with_values,
};

/// The gradients of a node's outputs, where known.
pub(crate) type PendingGrads<R> = SmallVec<[Option<Var<R>>; 1]>;

/// A deferred or postponed op call, with the destinations of its results.
pub(crate) struct KeptCall<R: Runtime> {
    pub(crate) to: SmallVec<[Option<Edge<R>>; 1]>,
    pub(crate) op: Op,
    pub(crate) ins: SmallVec<[Var<R>; 4]>,
}

/// The state of a leaf during a backward pass.
pub(crate) struct LeafState<R: Runtime> {
    leaf: Arc<Leaf<R>>,
    open: usize,
    pub(crate) grad: Option<TensorMut<R>>,
    pub(crate) lent: bool,
    pub(crate) graph: Option<Var<R>>,
}

/// The options of a backward pass.
#[derive(Clone, Copy, Default)]
pub(crate) struct SweepOptions {
    pub(crate) retain_graph: bool,
    pub(crate) create_graph: bool,
    /// The number of examples whose gradients of leaves are kept apart.
    pub(crate) examples: Option<usize>,
}

/// The state of a backward pass. Deferred op calls continue from it.
pub(crate) struct Sweep<R: Runtime> {
    pub(crate) options: SweepOptions,
    /// The nodes in ascending order of their numbers: the last one is next. (A heap would do ten comparisons of nodes
    /// for each one popped.)
    nodes: Vec<Arc<Node<R>>>,
    pub(crate) grads: ByAddress<PendingGrads<R>>,
    pub(crate) leaves: ByAddress<LeafState<R>>,
    /// The nodes and leaves that lead to the requested inputs. Op calls for others are deferred.
    pub(crate) only: Option<ByAddress<()>>,
    /// The intermediates whose own gradients were requested, as (node, output).
    wanted: HashMap<(usize, u32), Option<Var<R>>>,
    pub(crate) kept: Vec<KeptCall<R>>,
    /// The op calls for leaves that are postponed until a gradient is in transit.
    pub(crate) postponed: Vec<KeptCall<R>>,
    /// True if the calls for leaves of the node being visited are postponed.
    pub(crate) postpones: bool,
    /// The number of nodes visited since the last one with postponed calls.
    pub(crate) waited: usize,
    /// The nodes that run with the deferred calls.
    later: Vec<Arc<Node<R>>>,
    /// The values that were computed again.
    pub(crate) remade: Remade<R>,
}

pub(crate) fn id<R: Runtime>(node: &Arc<Node<R>>) -> usize {
    Arc::as_ptr(node) as usize
}

/// The address of the node or leaf to which an edge leads.
pub(crate) fn target<R: Runtime>(edge: &Edge<R>) -> usize {
    match edge {
        Edge::Node(n, _) => id(n),
        Edge::Leaf(v) => v.leaf().id(),
    }
}

impl<R: Runtime> Sweep<R> {
    /// Prepares a backward pass from roots with their gradients: finds the graph and counts the edges to
    /// every leaf.
    pub(crate) fn new(roots: &[(Var<R>, Var<R>)], options: SweepOptions) -> Self {
        let mut sweep = Sweep {
            options,
            nodes: Vec::new(),
            grads: ByAddress::default(),
            leaves: ByAddress::default(),
            only: None,
            wanted: HashMap::new(),
            kept: Vec::new(),
            postponed: Vec::new(),
            postpones: false,
            waited: 0,
            later: Vec::new(),
            remade: Remade::new(options.retain_graph),
        };
        let mut stack: Vec<Arc<Node<R>>> = Vec::new();
        for (root, _) in roots {
            match &root.edge {
                Some(Edge::Node(n, _)) => stack.push(n.clone()),
                Some(Edge::Leaf(v)) => sweep.open_edge(v.leaf()),
                None => {}
            }
        }
        let mut seen: ByAddress<()> = ByAddress::default();
        while let Some(node) = stack.pop() {
            if seen.insert(id(&node), ()).is_some() {
                continue;
            }
            for edge in node.edges.iter().flatten() {
                match edge {
                    Edge::Node(n, _) => stack.push(n.clone()),
                    Edge::Leaf(v) => sweep.open_edge(v.leaf()),
                }
            }
            sweep.nodes.push(node);
        }
        sweep.sort();
        sweep
    }

    fn sort(&mut self) {
        // The nodes were found from the roots on, so they are mostly in descending order.
        self.nodes.sort_by_key(|n| Reverse(n.number));
        self.nodes.reverse();
    }

    fn open_edge(&mut self, leaf: &Arc<Leaf<R>>) {
        let fresh = || LeafState { leaf: leaf.clone(), open: 0, grad: None, lent: false, graph: None };
        self.leaves.entry(leaf.id()).or_insert_with(fresh).open += 1;
    }

    /// Restricts the backward pass to the nodes that lead to `inputs`; all other op calls are deferred.
    pub(crate) fn restrict(&mut self, inputs: &[&Var<R>]) {
        let mut only: ByAddress<()> = ByAddress::default();
        only.extend(inputs.iter().filter_map(|v| v.edge.as_ref()).map(|e| (target(e), ())));
        // Numbers ascend, so the inputs of a node are decided before the node is.
        for node in &self.nodes {
            if node.edges.iter().flatten().any(|e| only.contains_key(&target(e))) {
                only.insert(id(node), ());
            }
        }
        self.only = Some(only);
    }

    /// Requests the gradient of a leaf or an intermediate.
    pub(crate) fn want(&mut self, var: &Var<R>) -> Result<()> {
        match &var.edge {
            Some(Edge::Node(n, k)) => {
                self.wanted.insert((id(n), *k), None);
            }
            Some(Edge::Leaf(view)) if !view.is_whole() => {
                let why = format!("a view of `{}` is no value of its own; ask for the leaf", view.leaf().name());
                return Err(ErrorKind::NoGradient { op: "grad", why }.into());
            }
            _ => {}
        }
        Ok(())
    }

    /// The recorded gradient of `var` after a backward pass that creates a graph.
    pub(crate) fn result(&mut self, var: &Var<R>) -> Option<Var<R>> {
        match var.edge.as_ref()? {
            Edge::Node(n, k) => self.wanted.get(&(id(n), *k))?.clone(),
            Edge::Leaf(v) => self.leaves.get(&v.leaf().id())?.graph.clone(),
        }
    }

    /// Gives the roots their gradients and processes every node.
    pub(crate) fn start(&mut self, roots: Vec<(Var<R>, Var<R>)>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        in_backward(|| no_autocast(|| self.started(roots, hook)))
    }

    fn started(&mut self, roots: Vec<(Var<R>, Var<R>)>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        for (root, grad) in roots {
            let Some(to) = root.edge else { continue };
            self.deliver(&to, Op::identity(), &[&grad], hook)?;
        }
        self.run(hook)
    }

    /// Runs the deferred op calls and nodes.
    pub(crate) fn resume(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        self.only = None;
        self.nodes.append(&mut self.later);
        self.sort();
        in_backward(|| no_autocast(|| self.resumed(hook)))
    }

    fn resumed(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let kept = std::mem::take(&mut self.kept);
        kept.into_iter().try_for_each(|call| self.deliver_kept(call, hook))?;
        self.run(hook)
    }

    pub(crate) fn deliver_kept(&mut self, call: KeptCall<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let ins: SmallVec<[&Var<R>; 4]> = call.ins.iter().collect();
        match &call.to[..] {
            [Some(to)] => self.deliver(to, call.op, &ins, hook),
            to => self.deliver_all(to, call.op, &ins, hook),
        }
    }

    fn run(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        while let Some(node) = self.nodes.pop() {
            if self.only.as_ref().is_some_and(|o| !o.contains_key(&id(&node))) {
                self.later.push(node);
                continue;
            }
            self.begin_node(&node, hook)?;
            self.visit(&node, hook)?;
        }
        self.postpones = false;
        self.run_postponed(hook)
    }

    fn visit(&mut self, node: &Arc<Node<R>>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let mut given: SmallVec<[bool; 8]> = smallvec::smallvec![false; node.edges.len()];
        let upstream = match self.grads.remove(&id(node)) {
            None => zeros_upstream(node)?,
            given => given,
        };
        if let Some(upstream) = upstream {
            for (k, grad) in upstream.iter().enumerate() {
                if let Some(slot) = self.wanted.get_mut(&(id(node), k as u32)) {
                    *slot = grad.clone();
                }
            }
            let saved = self.saved(node)?;
            let mut step = NodeStep { sweep: self, hook, node, saved, upstream, given: &mut given };
            match &node.call {
                NodeCall::Op(op) => op.gradient(&mut step)?,
                NodeCall::Function(f) => step.function(f)?,
            }
        }
        for (i, edge) in node.edges.iter().enumerate() {
            if let Some(Edge::Leaf(view)) = edge
                && !given[i]
            {
                self.finish_edge(view.leaf(), hook)?;
            }
        }
        Ok(())
    }

    fn saved(&self, node: &Node<R>) -> Result<Saved<R>> {
        let mut saved = node.saved.lock();
        let taken = if self.options.retain_graph { saved.clone() } else { saved.take() };
        taken.ok_or_else(|| ErrorKind::GraphFreed { op: node.call.name() }.into())
    }

    /// Delivers the result of an op call to an edge: into a leaf's slot or a node's gradient. Deferred and postponed
    /// calls are stored instead.
    pub(crate) fn deliver(
        &mut self,
        to: &Edge<R>,
        op: Op,
        ins: &[&Var<R>],
        hook: &mut dyn BackwardHook<R>,
    ) -> Result<()> {
        if self.keep_all(&[Some(to)], &op, ins) {
            return Ok(());
        }
        match to {
            Edge::Leaf(view) => {
                self.flush_for(view.leaf(), hook)?;
                self.add_to_leaf(view, op, ins, hook)?;
                self.finish_edge(view.leaf(), hook)
            }
            Edge::Node(node, k) => self.add_to_node(node, *k as usize, op, ins),
        }
    }

    /// Keeps an op call whose results are all deferred, or all postponed; false if the call is due.
    pub(crate) fn keep_all(&mut self, to: &[Option<&Edge<R>>], op: &Op, ins: &[&Var<R>]) -> bool {
        let mut wanted = to.iter().flatten();
        let list = match &self.only {
            Some(only) if wanted.clone().all(|edge| !only.contains_key(&target(edge))) => &mut self.kept,
            _ if self.postpones && wanted.all(|edge| matches!(edge, Edge::Leaf(_))) => &mut self.postponed,
            _ => return false,
        };
        let to = to.iter().map(|edge| edge.cloned()).collect();
        list.push(KeptCall { to, op: op.clone(), ins: ins.iter().map(|v| (*v).clone()).collect() });
        true
    }

    fn add_to_node(&mut self, node: &Arc<Node<R>>, k: usize, op: Op, ins: &[&Var<R>]) -> Result<()> {
        let pending = self.pending(node);
        pending[k] = Some(match pending[k].take() {
            None => run(op, ins)?,
            Some(sum) => add(sum, op, ins)?,
        });
        Ok(())
    }

    /// The gradients of a node's outputs, where known.
    pub(crate) fn pending(&mut self, node: &Arc<Node<R>>) -> &mut PendingGrads<R> {
        let none = || (0..node.outputs).map(|_| None).collect();
        self.grads.entry(id(node)).or_insert_with(none)
    }

    pub(crate) fn leaf_state(&mut self, leaf: &Arc<Leaf<R>>) -> Result<&mut LeafState<R>> {
        self.leaves.get_mut(&leaf.id()).ok_or_else(|| unknown(leaf))
    }

    fn add_to_leaf(
        &mut self,
        view: &Arc<LeafView<R>>,
        op: Op,
        ins: &[&Var<R>],
        hook: &mut dyn BackwardHook<R>,
    ) -> Result<()> {
        let leaf = view.leaf();
        if let Some(examples) = self.options.examples {
            let part = by_example(&op, ins, examples).map_err(|error| error.within(leaf.name()))?;
            return self.add_part(view, part);
        }
        if self.options.create_graph {
            return self.add_part(view, run(op, ins)?);
        }
        let mut slot = self.slot(leaf, hook)?;
        with_values(ins, |values| match view.is_whole() {
            true => slot.accumulate(&op, values),
            false => slot.accumulate_view(view.views(), &op, values),
        })?;
        self.leaf_state(leaf)?.grad = Some(slot);
        Ok(())
    }

    /// Counts one edge to the leaf as finished. After the last one its gradient is final, and the hook is notified.
    pub(crate) fn finish_edge(&mut self, leaf: &Arc<Leaf<R>>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let is_apart = self.options.examples.is_some();
        let state = self.leaf_state(leaf)?;
        state.open -= 1;
        if state.open > 0 {
            return Ok(());
        }
        if is_apart && let Some(all) = state.graph.take() {
            return hook.on_leaf_grad_ready(&state.leaf, LeafGrad::Own(all.value()?));
        }
        let Some(grad) = state.grad.take() else { return Ok(()) };
        let grad = if state.lent { LeafGrad::Slot(grad) } else { LeafGrad::Own(grad.freeze()?) };
        hook.on_leaf_grad_ready(&state.leaf, grad)
    }
}

pub(crate) fn run<R: Runtime>(op: Op, ins: &[&Var<R>]) -> Result<Var<R>> {
    if op.is_identity() {
        return Ok(ins[0].clone());
    }
    Var::apply1(op, ins)
}

/// The zero gradients for a function with `Function::always`, whose outputs received none.
fn zeros_upstream<R: Runtime>(node: &Node<R>) -> Result<Option<PendingGrads<R>>> {
    let NodeCall::Function(function) = &node.call else { return Ok(None) };
    let Some(rt) = function.always() else { return Ok(None) };
    let zeros = |k| {
        let spec = node.output_spec(k);
        spec.dtype.is_float().then(|| Tensor::zeros(rt, spec.shape, spec.dtype).map(Var::new)).transpose()
    };
    (0..node.outputs as usize).map(zeros).collect::<Result<_>>().map(Some)
}

/// Accumulates the output of an op into a gradient. It does so in place if the memory has no other holder and nothing
/// is recorded.
fn add<R: Runtime>(sum: Var<R>, op: Op, ins: &[&Var<R>]) -> Result<Var<R>> {
    use numcore::ops::PointwiseOps;
    let tracked = sum.edge.is_some() || ins.iter().any(|v| v.edge.is_some());
    let own = match sum.value {
        TapeValue::Own(t) if !tracked => t,
        value => return Var { value, edge: sum.edge }.add(&run(op, ins)?),
    };
    match own.try_mut() {
        Err(shared) => Var::new(shared).add(&run(op, ins)?),
        Ok(mut memory) => {
            with_values(ins, |values| memory.accumulate(&op, values))?;
            Ok(Var::new(memory.freeze()?))
        }
    }
}

pub(crate) fn unknown<R: Runtime>(leaf: &Leaf<R>) -> Error {
    Error::state(leaf.name().to_string(), "is no leaf of the graph this sweep began with")
}
