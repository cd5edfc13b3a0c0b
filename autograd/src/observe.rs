//! Observation of a forward pass: the op calls on variables, and the bytes that the tape saves for them.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    sync::Arc,
};

use numcore::{
    Runtime, Tensor,
    ops::{Op, Spec},
    pointwise::{Inst, Program},
};

use crate::{
    Var,
    address::ByAddress,
    mode::take_draws,
    node::{Edge, Node, SavedInput, TapeValue},
};

thread_local! {
    static ON: Cell<Observed> = const { Cell::new(Observed::Nothing) };
    static SEEN: RefCell<Vec<SeenOp>> = const { RefCell::new(Vec::new()) };
    static PASSES: Cell<Passes> = const { Cell::new(Passes { begun: 0, now: None }) };
}

/// The forward passes of a thread.
#[derive(Clone, Copy)]
struct Passes {
    /// The number of passes that have begun in this observation.
    begun: u64,
    now: Option<u64>,
}

/// The observation of a thread.
#[derive(Clone, Copy, PartialEq)]
enum Observed {
    Nothing,
    Calls,
    /// Calls, and the values of their outputs.
    Outputs,
}

/// A call, and its values if they are observed: its inputs as a `Vec<Var<R>>`, its outputs as a `Vec<Tensor<R>>`.
type SeenOp = (ObservedOp, Option<Box<dyn Any>>);

/// The inputs and outputs of a call.
type ObservedValues<R> = (Vec<Var<R>>, Vec<Tensor<R>>);

/// An op call on variables in a forward pass.
#[derive(Clone, Debug)]
pub struct ObservedOp {
    /// The op.
    pub op: Op,
    /// The shapes and dtypes of the inputs.
    pub inputs: Vec<Spec>,
    /// The shapes and dtypes of the outputs.
    pub outputs: Vec<Spec>,
    /// The leaves among the inputs, by [`Leaf::id`](crate::Leaf::id).
    pub leaves: Vec<usize>,
    /// The names of the leaves.
    pub parameters: Vec<Arc<str>>,
    /// The number of the call's node; `None` if the tape did not record it.
    pub node: Option<u64>,
    /// The number of the [pass](observed_pass) among those of the observation, from 0; `None` outside of passes.
    pub pass: Option<u64>,
    /// True if the call uses random values: its program has some, or its thread drew a seed
    /// ([`next_seed`](crate::next_seed)) after the call before.
    pub draws: bool,
}

/// An op call with its values.
pub struct ObservedCall<R: Runtime> {
    /// The call.
    pub op: ObservedOp,
    /// The inputs, without their history; a view of a leaf is still one ([`Var::leaf_view`]).
    pub inputs: Vec<Var<R>>,
    /// The outputs.
    pub outputs: Vec<Tensor<R>>,
}

/// Runs `f`, and returns with its result the op calls that it applied to variables on this thread, in order. Unrecorded
/// calls are included; views of leaves are not.
pub fn observe_ops<T>(f: impl FnOnce() -> T) -> (T, Vec<ObservedOp>) {
    let (result, seen) = observed(Observed::Calls, f);
    (result, seen.into_iter().map(|(call, _)| call).collect())
}

/// Runs `f` as [`observe_ops`] does, and returns the values of each op call too. All of them stay in memory, so an
/// input with the memory and the layout of an output is that output.
/// Calls on variables of another runtime are left out.
pub fn observe_outputs<R: Runtime, T>(f: impl FnOnce() -> T) -> (T, Vec<ObservedCall<R>>) {
    let (result, seen) = observed(Observed::Outputs, f);
    let of = |(op, values): SeenOp| {
        let (inputs, outputs) = *values?.downcast::<ObservedValues<R>>().ok()?;
        Some(ObservedCall { op, inputs, outputs })
    };
    (result, seen.into_iter().filter_map(of).collect())
}

fn observed<T>(what: Observed, f: impl FnOnce() -> T) -> (T, Vec<SeenOp>) {
    struct Outer(Observed, Vec<SeenOp>, Passes);
    impl Drop for Outer {
        fn drop(&mut self) {
            ON.set(self.0);
            SEEN.set(std::mem::take(&mut self.1));
            PASSES.set(self.2);
        }
    }
    let outer = Outer(ON.replace(what), SEEN.take(), PASSES.replace(Passes { begun: 0, now: None }));
    take_draws();
    let result = f();
    let seen = SEEN.take();
    drop(outer);
    (result, seen)
}

/// Runs `f` as a forward pass of one micro-batch, or of a stage with one: observed op calls have the pass's number.
pub fn observed_pass<T>(f: impl FnOnce() -> T) -> T {
    if !is_on() {
        return f();
    }
    struct Outer(Option<u64>);
    impl Drop for Outer {
        fn drop(&mut self) {
            PASSES.set(Passes { now: self.0, ..PASSES.get() });
        }
    }
    let Passes { begun, now } = PASSES.get();
    PASSES.set(Passes { begun: begun + 1, now: Some(begun) });
    let _outer = Outer(now);
    f()
}

/// Tells whether op calls of this thread are observed.
#[inline]
pub(crate) fn is_on() -> bool {
    ON.get() != Observed::Nothing
}

impl ObservedOp {
    /// A call of `op` with these inputs.
    pub(crate) fn of<R: Runtime>(op: Op, ins: &[&Var<R>], outputs: Vec<Spec>, node: Option<u64>) -> Self {
        use numcore::ops::Apply;
        let leaf = |v: &&Var<R>| match &v.value {
            TapeValue::Leaf(view) => Some(view.leaf().clone()),
            _ => None,
        };
        let leaves: Vec<_> = ins.iter().filter_map(leaf).collect();
        ObservedOp {
            inputs: ins.iter().map(|v| v.spec()).collect(),
            outputs,
            leaves: leaves.iter().map(|leaf| leaf.id()).collect(),
            parameters: leaves.iter().map(|leaf| leaf.name()).collect(),
            draws: matches!(&op, Op::Pointwise(call) if is_random(&call.program)),
            pass: PASSES.get().now,
            op,
            node,
        }
    }

    /// Floating-point operations of the call, a multiplication and an addition counting two; 0 but for products,
    /// attention and convolutions. [`Op::flops`] has the formulas.
    pub fn flops(&self) -> u64 {
        self.op.flops(&self.inputs, &self.outputs)
    }
}

fn is_random(program: &Program) -> bool {
    program.insts().iter().any(|inst| matches!(inst, Inst::Random { .. }))
}

/// Records a call.
#[cold]
pub(crate) fn note<R: Runtime>(op: Op, ins: &[&Var<R>], outs: &[Var<R>]) {
    use numcore::ops::Apply;
    let mut call = ObservedOp::of(op, ins, outs.iter().map(|v| v.spec()).collect(), number_of(outs.first()));
    call.draws |= take_draws();
    let values = (ON.get() == Observed::Outputs).then(|| {
        let inputs: Vec<Var<R>> = ins.iter().map(|v| v.detach()).collect();
        let outputs: Vec<Tensor<R>> = outs.iter().filter_map(|v| v.value().ok()).collect();
        Box::new((inputs, outputs)) as Box<dyn Any>
    });
    SEEN.with_borrow_mut(|seen| seen.push((call, values)));
}

/// The number of the node that computed a variable.
pub(crate) fn number_of<R: Runtime>(var: Option<&Var<R>>) -> Option<u64> {
    match &var?.edge {
        Some(Edge::Node(node, _)) => Some(node.number),
        _ => None,
    }
}

/// The bytes that the tape keeps for the gradient of `root`, as pairs (node number, bytes) in ascending order of nodes.
/// Memory that several nodes keep counts for the first of them. Values of leaves do not count, because they are kept
/// anyway.
pub fn saved_bytes<R: Runtime>(root: &Var<R>) -> Vec<(u64, usize)> {
    let mut counted: ByAddress<()> = ByAddress::default();
    let mut bytes_of = |tensors: Vec<Tensor<R>>| -> usize {
        let new = tensors.into_iter().filter(|t| counted.insert(t.memory_id(), ()).is_none());
        new.map(|t| t.memory_bytes()).sum()
    };
    let mut met: ByAddress<()> = ByAddress::default();
    nodes(root).iter().map(|node| (node.number, bytes_of(saved(node, &mut met)))).collect()
}

/// The nodes on which a value depends, in ascending order of their numbers.
fn nodes<R: Runtime>(root: &Var<R>) -> Vec<Arc<Node<R>>> {
    let (mut found, mut met): (Vec<Arc<Node<R>>>, ByAddress<()>) = (Vec::new(), ByAddress::default());
    let mut stack: Vec<Edge<R>> = root.edge.iter().cloned().collect();
    while let Some(edge) = stack.pop() {
        let Edge::Node(node, _) = edge else { continue };
        if met.insert(Arc::as_ptr(&node) as usize, ()).is_none() {
            stack.extend(node.edges.iter().flatten().cloned());
            found.push(node);
        }
    }
    found.sort_by_key(|node| node.number);
    found
}

/// The tensors that a node keeps, and those that its recipes need. `met` has the recipes that were visited.
fn saved<R: Runtime>(node: &Node<R>, met: &mut ByAddress<()>) -> Vec<Tensor<R>> {
    let (guard, mut tensors) = (node.saved.lock(), Vec::new());
    let Some(saved) = &*guard else { return tensors };
    let mut stack: Vec<SavedInput<R>> = saved.inputs.iter().chain(&saved.outputs).flatten().cloned().collect();
    while let Some(kept) = stack.pop() {
        match kept {
            SavedInput::Own(tensor) => tensors.push(tensor),
            SavedInput::Recipe(recipe, _) if met.insert(Arc::as_ptr(&recipe) as usize, ()).is_none() => {
                let (inputs, outputs) = recipe.holds();
                stack.extend(inputs);
                tensors.extend(outputs);
            }
            SavedInput::Leaf(..) | SavedInput::Recipe(..) => {}
        }
    }
    tensors
}
