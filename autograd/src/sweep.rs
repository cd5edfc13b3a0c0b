//! The engine: one pass over the graph, from the highest node number to the lowest.
//!
//! Three maps, all for look-up alone: gradients that wait for their node, what is known of each leaf, and (when weight gradients
//! are deferred) which nodes lead to an input. A leaf's gradient is final when every edge to it is settled: its op call has run,
//! or its node ended without giving one.

use std::{
    collections::{BinaryHeap, HashMap, HashSet},
    sync::Arc,
};

use numcore::{
    Error, ErrorKind, Result, Runtime, Tensor, TensorMut, Use,
    ops::{Apply, Op, Rule, Spec},
};
use smallvec::SmallVec;

use crate::{
    BackwardHook, Leaf, LeafGrad, LeafView, Var,
    node::{Call, Edge, Node, Saved, Value},
    step::Step,
};

/// Gradients of a node's outputs, as far as they are known.
pub(crate) type Pending<R> = SmallVec<[Option<Var<R>>; 1]>;

/// An op call kept for later, with where its result goes.
pub(crate) struct Kept<R: Runtime> {
    pub(crate) to: Edge<R>,
    pub(crate) op: Op,
    pub(crate) ins: SmallVec<[Var<R>; 4]>,
}

/// What is known of a leaf during a sweep.
pub(crate) struct LeafState<R: Runtime> {
    leaf: Arc<Leaf<R>>,
    open: usize,
    pub(crate) grad: Option<TensorMut<R>>,
    pub(crate) lent: bool,
    graph: Option<Var<R>>,
}

/// How a sweep goes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    pub(crate) retain_graph: bool,
    pub(crate) create_graph: bool,
}

/// A sweep's state; also what a deferred part continues from.
pub(crate) struct Sweep<R: Runtime> {
    pub(crate) options: Options,
    heap: BinaryHeap<ByNumber<R>>,
    grads: HashMap<usize, Pending<R>>,
    pub(crate) leaves: HashMap<usize, LeafState<R>>,
    /// Nodes and leaves that lead to the inputs asked for; other op calls are kept.
    only: Option<HashSet<usize>>,
    /// Nodes whose gradients are asked for themselves.
    wanted: HashMap<(usize, usize), Option<Var<R>>>,
    pub(crate) kept: Vec<Kept<R>>,
    /// Nodes that run with the kept calls.
    later: Vec<Arc<Node<R>>>,
}

fn id<R: Runtime>(node: &Arc<Node<R>>) -> usize {
    Arc::as_ptr(node) as usize
}

impl<R: Runtime> Sweep<R> {
    /// Prepares a sweep from roots with their gradients: finds the graph below and counts the edges to every leaf.
    pub(crate) fn new(roots: &[(Var<R>, Var<R>)], options: Options) -> Self {
        let mut sweep = Sweep {
            options,
            heap: BinaryHeap::new(),
            grads: HashMap::new(),
            leaves: HashMap::new(),
            only: None,
            wanted: HashMap::new(),
            kept: Vec::new(),
            later: Vec::new(),
        };
        let mut stack: Vec<Arc<Node<R>>> = Vec::new();
        for (root, _) in roots {
            match &root.edge {
                Some(Edge::Node(n, _)) => stack.push(n.clone()),
                Some(Edge::Leaf(v)) => sweep.open_edge(v.leaf()),
                None => {}
            }
        }
        let mut seen = HashSet::new();
        while let Some(node) = stack.pop() {
            if !seen.insert(id(&node)) {
                continue;
            }
            for edge in node.edges.iter().flatten() {
                match edge {
                    Edge::Node(n, _) => stack.push(n.clone()),
                    Edge::Leaf(v) => sweep.open_edge(v.leaf()),
                }
            }
            sweep.heap.push(ByNumber(node));
        }
        sweep
    }

    fn open_edge(&mut self, leaf: &Arc<Leaf<R>>) {
        let fresh = || LeafState { leaf: leaf.clone(), open: 0, grad: None, lent: false, graph: None };
        self.leaves.entry(leaf.id()).or_insert_with(fresh).open += 1;
    }

    /// Restricts the sweep to what leads to `inputs`; everything else is kept.
    pub(crate) fn restrict(&mut self, inputs: &[&Var<R>]) {
        let mut only: HashSet<usize> = HashSet::new();
        for input in inputs {
            match &input.edge {
                Some(Edge::Leaf(v)) => only.insert(v.leaf().id()),
                Some(Edge::Node(n, _)) => only.insert(id(n)),
                None => false,
            };
        }
        // Ascending numbers: inputs of a node are decided before the node is.
        let mut nodes: Vec<&ByNumber<R>> = self.heap.iter().collect();
        nodes.sort_by_key(|n| n.0.number);
        for ByNumber(node) in nodes {
            let leads = node.edges.iter().flatten().any(|e| match e {
                Edge::Node(n, _) => only.contains(&id(n)),
                Edge::Leaf(v) => only.contains(&v.leaf().id()),
            });
            if leads {
                only.insert(id(node));
            }
        }
        self.only = Some(only);
    }

    /// Asks for the gradient of a leaf or an intermediate.
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

    /// The recorded gradient of `var` after a sweep that creates a graph.
    pub(crate) fn result(&mut self, var: &Var<R>) -> Option<Var<R>> {
        match var.edge.as_ref()? {
            Edge::Node(n, k) => self.wanted.get(&(id(n), *k))?.clone(),
            Edge::Leaf(v) => self.leaves.get(&v.leaf().id())?.graph.clone(),
        }
    }

    /// Gives the roots their gradients and runs every node.
    pub(crate) fn start(&mut self, roots: Vec<(Var<R>, Var<R>)>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        for (root, grad) in roots {
            let Some(to) = root.edge else { continue };
            self.deliver(Kept { to, op: Op::identity(), ins: smallvec::smallvec![grad] }, hook)?;
        }
        self.run(hook)
    }

    /// Runs what was kept.
    pub(crate) fn resume(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        self.only = None;
        self.heap.extend(std::mem::take(&mut self.later).into_iter().map(ByNumber));
        for kept in std::mem::take(&mut self.kept) {
            self.deliver(kept, hook)?;
        }
        self.run(hook)
    }

    fn run(&mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        while let Some(ByNumber(node)) = self.heap.pop() {
            if self.only.as_ref().is_some_and(|o| !o.contains(&id(&node))) {
                self.later.push(node);
                continue;
            }
            self.visit(&node, hook)?;
        }
        Ok(())
    }

    fn visit(&mut self, node: &Arc<Node<R>>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let mut given: SmallVec<[bool; 8]> = smallvec::smallvec![false; node.edges.len()];
        if let Some(upstream) = self.grads.remove(&id(node)) {
            for (k, grad) in upstream.iter().enumerate() {
                if let Some(slot) = self.wanted.get_mut(&(id(node), k)) {
                    *slot = grad.clone();
                }
            }
            let saved = self.saved(node)?;
            let mut step = Step { sweep: self, hook, node, saved, upstream, given: &mut given };
            match &node.call {
                Call::Op(op) => op.gradient(&mut step)?,
                Call::Function(f) => f.clone().backward(&mut step)?,
                Call::Segment(s) => s.backward(&mut step)?,
            }
        }
        for (i, edge) in node.edges.iter().enumerate() {
            if let Some(Edge::Leaf(view)) = edge
                && !given[i]
            {
                self.settle(view.leaf(), hook)?;
            }
        }
        Ok(())
    }

    fn saved(&self, node: &Node<R>) -> Result<Saved<R>> {
        let mut saved = node.saved.lock();
        let taken = if self.options.retain_graph { saved.clone() } else { saved.take() };
        taken.ok_or_else(|| ErrorKind::GraphFreed { op: node.call.name() }.into())
    }

    /// An op call's result goes to an edge: into a leaf's slot, to a node's gradient, or the call is kept.
    pub(crate) fn deliver(&mut self, call: Kept<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let target = match &call.to {
            Edge::Node(n, _) => id(n),
            Edge::Leaf(v) => v.leaf().id(),
        };
        if self.only.as_ref().is_some_and(|o| !o.contains(&target)) {
            self.kept.push(call);
            return Ok(());
        }
        match call.to {
            Edge::Leaf(view) => {
                self.add_to_leaf(&view, call.op, &call.ins, hook)?;
                self.settle(view.leaf(), hook)
            }
            Edge::Node(node, k) => self.add_to_node(&node, k, call.op, &call.ins),
        }
    }

    fn add_to_node(&mut self, node: &Arc<Node<R>>, k: usize, op: Op, ins: &[Var<R>]) -> Result<()> {
        let pending = self.grads.entry(id(node)).or_insert_with(|| smallvec::smallvec![None; node.outputs.len()]);
        pending[k] = Some(match pending[k].take() {
            None => run(op, ins)?,
            Some(sum) => add(sum, op, ins)?,
        });
        Ok(())
    }

    fn add_to_leaf(
        &mut self,
        view: &Arc<LeafView<R>>,
        op: Op,
        ins: &[Var<R>],
        hook: &mut dyn BackwardHook<R>,
    ) -> Result<()> {
        let leaf = view.leaf();
        let state = self.leaves.get_mut(&leaf.id()).ok_or_else(|| unknown(leaf))?;
        if self.options.create_graph {
            let part = through_views(run(op, ins)?, view)?;
            state.graph = Some(match state.graph.take() {
                None => part,
                Some(sum) => numcore::ops::PointwiseOps::add(&sum, &part)?,
            });
            return Ok(());
        }
        if state.grad.is_none() {
            let slot = hook.grad_slot(leaf)?;
            state.lent = slot.is_some();
            state.grad = Some(match slot {
                Some(slot) => checked(slot, leaf)?,
                None => TensorMut::alloc(&leaf.runtime().tagged(Use::Gradients), leaf.spec().shape, leaf.spec().dtype)?,
            });
        }
        let tensors = ins.iter().map(|v| v.value()).collect::<Result<SmallVec<[Tensor<R>; 4]>>>()?;
        let refs: SmallVec<[&Tensor<R>; 4]> = tensors.iter().collect();
        match &mut state.grad {
            Some(slot) if view.is_whole() => slot.accumulate(&op, &refs),
            Some(slot) => slot.accumulate_view(view.views(), &op, &refs),
            None => Ok(()),
        }
    }

    /// One edge to the leaf is done; after the last one its gradient is final, and the hook is told.
    fn settle(&mut self, leaf: &Arc<Leaf<R>>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let state = self.leaves.get_mut(&leaf.id()).ok_or_else(|| unknown(leaf))?;
        state.open -= 1;
        if state.open > 0 {
            return Ok(());
        }
        let Some(grad) = state.grad.take() else { return Ok(()) };
        let grad = if state.lent { LeafGrad::Slot(grad) } else { LeafGrad::Own(grad.freeze()?) };
        hook.on_leaf_grad_ready(&state.leaf, grad)
    }
}

fn run<R: Runtime>(op: Op, ins: &[Var<R>]) -> Result<Var<R>> {
    if op.is_identity() {
        return Ok(ins[0].clone());
    }
    Var::apply1(op, &ins.iter().collect::<SmallVec<[&Var<R>; 4]>>())
}

/// Adds what an op gives to a gradient: into its own memory when no one else holds it and nothing is recorded.
fn add<R: Runtime>(sum: Var<R>, op: Op, ins: &[Var<R>]) -> Result<Var<R>> {
    use numcore::ops::PointwiseOps;
    let tracked = sum.edge.is_some() || ins.iter().any(|v| v.edge.is_some());
    let own = match sum.value {
        Value::Own(t) if !tracked => t,
        value => return Var { value, edge: sum.edge }.add(&run(op, ins)?),
    };
    match own.try_mut() {
        Err(shared) => Var::new(shared).add(&run(op, ins)?),
        Ok(mut memory) => {
            let tensors = ins.iter().map(|v| v.value()).collect::<Result<SmallVec<[Tensor<R>; 4]>>>()?;
            memory.accumulate(&op, &tensors.iter().collect::<SmallVec<[&Tensor<R>; 4]>>())?;
            Ok(Var::new(memory.freeze()?))
        }
    }
}

/// A gradient of a view of a leaf, as a gradient of the leaf: the adjoints of the views, last first.
fn through_views<R: Runtime>(grad: Var<R>, view: &LeafView<R>) -> Result<Var<R>> {
    use numcore::ops::ViewOps;
    let mut shapes = vec![view.leaf().spec().shape];
    for v in view.views() {
        shapes.push(v.shape(shapes[shapes.len() - 1])?);
    }
    let adjoint = |g: Var<R>, (v, from): (&numcore::ops::ViewOp, &numcore::Shape)| Var::apply1(v.adjoint(*from), &[&g]);
    let back = view.views().iter().zip(&shapes).rev().try_fold(grad, adjoint)?;
    back.reshape(view.leaf().spec().shape)
}

fn checked<R: Runtime>(slot: TensorMut<R>, leaf: &Leaf<R>) -> Result<TensorMut<R>> {
    let is = Spec { shape: *slot.shape(), dtype: slot.dtype() };
    if is == leaf.spec() {
        return Ok(slot);
    }
    let why =
        format!("its gradient slot is {} {}, it is {} {}", is.dtype, is.shape, leaf.spec().dtype, leaf.spec().shape);
    Err(Error::state(leaf.name().to_string(), why))
}

pub(crate) fn unknown<R: Runtime>(leaf: &Leaf<R>) -> Error {
    Error::state(leaf.name().to_string(), "is no leaf of the graph this sweep began with")
}

struct ByNumber<R: Runtime>(Arc<Node<R>>);

impl<R: Runtime> PartialEq for ByNumber<R> {
    fn eq(&self, other: &Self) -> bool {
        self.0.number == other.0.number
    }
}

impl<R: Runtime> Eq for ByNumber<R> {}

impl<R: Runtime> PartialOrd for ByNumber<R> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<R: Runtime> Ord for ByNumber<R> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.number.cmp(&other.0.number)
    }
}
