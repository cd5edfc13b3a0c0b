//! Nodes of the tape: an op call, its inputs, and the values it saves for backward.

use std::{cell::Cell, panic::Location, sync::Arc};

use numcore::{
    Result, Runtime, Tensor,
    ops::{Bits, Op, Rule, Saves, Spec, SpecList},
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{
    BackwardHook, Function, LeafView,
    recipe::{Recipe, Remade},
    rematerialize::Rematerialized,
};

/// The origin of a variable in the graph.
pub(crate) enum Edge<R: Runtime> {
    /// Output `k` of a node.
    Node(Arc<Node<R>>, u32),
    /// A leaf, or views of one.
    Leaf(Arc<LeafView<R>>),
}

impl<R: Runtime> Clone for Edge<R> {
    fn clone(&self) -> Self {
        match self {
            Edge::Node(n, k) => Edge::Node(n.clone(), *k),
            Edge::Leaf(v) => Edge::Leaf(v.clone()),
        }
    }
}

/// The value of a variable, or a reference to a leaf. A leaf's value is read when it is needed, not kept.
pub(crate) enum TapeValue<R: Runtime> {
    Own(Tensor<R>),
    Leaf(Arc<LeafView<R>>),
    /// A value that backward computes again; nodes in its scope save only its recipe.
    Rematerialized(Arc<Rematerialized<R>>),
    /// A value of another form, with its tangent; no node saves it.
    Dual(Arc<Dual<R>>),
}

/// A value and its derivative along a direction.
pub(crate) struct Dual<R: Runtime> {
    pub(crate) value: TapeValue<R>,
    pub(crate) tangent: crate::Var<R>,
}

impl<R: Runtime> Clone for TapeValue<R> {
    fn clone(&self) -> Self {
        match self {
            TapeValue::Dual(d) => TapeValue::Dual(d.clone()),
            TapeValue::Own(t) => TapeValue::Own(t.clone()),
            TapeValue::Leaf(v) => TapeValue::Leaf(v.clone()),
            TapeValue::Rematerialized(r) => TapeValue::Rematerialized(r.clone()),
        }
    }
}

impl<R: Runtime> TapeValue<R> {
    /// This value without its tangent.
    pub(crate) fn plain(&self) -> &Self {
        if let TapeValue::Dual(dual) = self { &dual.value } else { self }
    }

    pub(crate) fn get(&self) -> Result<Tensor<R>> {
        match self {
            TapeValue::Dual(d) => d.value.get(),
            TapeValue::Own(t) => Ok(t.clone()),
            TapeValue::Leaf(v) => v.value(),
            TapeValue::Rematerialized(r) => Ok(r.value.clone()),
        }
    }

    /// Reads the value without a clone; the tensor of a leaf is stored in `room`.
    pub(crate) fn read<'a>(&'a self, room: &'a mut Option<Tensor<R>>) -> Result<&'a Tensor<R>> {
        match self {
            TapeValue::Dual(d) => d.value.read(room),
            TapeValue::Own(t) => Ok(t),
            TapeValue::Leaf(v) => Ok(room.insert(v.value()?)),
            TapeValue::Rematerialized(r) => Ok(&r.value),
        }
    }

    /// Appends the spec of this value to a list.
    pub(crate) fn list(&self, specs: &mut SpecList) {
        match self {
            TapeValue::Dual(d) => d.value.list(specs),
            TapeValue::Own(t) => specs.push(t.shape(), t.dtype()),
            TapeValue::Leaf(v) => specs.push(v.shape(), v.leaf().spec().dtype),
            TapeValue::Rematerialized(r) => specs.push(r.value.shape(), r.value.dtype()),
        }
    }

    pub(crate) fn spec(&self) -> Spec {
        use numcore::ops::Apply;
        match self {
            TapeValue::Dual(d) => d.value.spec(),
            TapeValue::Own(t) => t.spec(),
            TapeValue::Leaf(v) => v.spec(),
            TapeValue::Rematerialized(r) => r.value.spec(),
        }
    }
}

/// The operation that a node computed.
pub(crate) enum NodeCall<R: Runtime> {
    Op(Op),
    Function(Arc<dyn Function<R>>),
}

impl<R: Runtime> NodeCall<R> {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            NodeCall::Op(op) => op.name(),
            NodeCall::Function(f) => f.name(),
        }
    }

    pub(crate) fn saves(&self, wants: Bits) -> Result<Saves> {
        match self {
            NodeCall::Op(op) => op.saves(wants),
            NodeCall::Function(f) => Ok(f.saves()),
        }
    }
}

pub(crate) struct Node<R: Runtime> {
    pub(crate) number: u64,
    pub(crate) call: NodeCall<R>,
    pub(crate) edges: SmallVec<[Option<Edge<R>>; 2]>,
    /// The specs of inputs, one for each edge, then of outputs.
    pub(crate) specs: SpecList,
    pub(crate) outputs: u32,
    /// The line of the program that made the call.
    pub(crate) at: &'static Location<'static>,
    pub(crate) saved: Mutex<Option<Saved<R>>>,
}

impl<R: Runtime> Node<R> {
    pub(crate) fn input_spec(&self, i: usize) -> Spec {
        self.specs.get(i)
    }

    pub(crate) fn output_spec(&self, k: usize) -> Spec {
        self.specs.get(self.edges.len() + k)
    }
}

/// A saved input or output: the value itself, or the source from which backward obtains it.
pub(crate) enum SavedInput<R: Runtime> {
    Own(Tensor<R>),
    /// A leaf, and its version when it was saved.
    Leaf(Arc<LeafView<R>>, u64),
    /// Output `k` of a recipe.
    Recipe(Arc<Recipe<R>>, u32),
}

impl<R: Runtime> Clone for SavedInput<R> {
    fn clone(&self) -> Self {
        match self {
            SavedInput::Own(t) => SavedInput::Own(t.clone()),
            SavedInput::Leaf(v, version) => SavedInput::Leaf(v.clone(), *version),
            SavedInput::Recipe(r, k) => SavedInput::Recipe(r.clone(), *k),
        }
    }
}

impl<R: Runtime> SavedInput<R> {
    /// This value as one that a node saves.
    pub(crate) fn of_node(self) -> Self {
        if let SavedInput::Recipe(recipe, _) = &self {
            recipe.mark_saved();
        }
        self
    }

    /// The saved value. Before a leaf is read, its version is checked and the hook is notified.
    pub(crate) fn fetch(&self, remade: &mut Remade<R>, hook: &mut dyn BackwardHook<R>) -> Result<TapeValue<R>> {
        Ok(match self {
            SavedInput::Own(t) => TapeValue::Own(t.clone()),
            SavedInput::Recipe(recipe, k) => TapeValue::Own(recipe.output(*k, remade, hook)?),
            SavedInput::Leaf(view, saved) => {
                let leaf = view.leaf();
                leaf.unchanged_since(*saved)?;
                hook.on_leaf_needed(leaf)?;
                TapeValue::Leaf(view.clone())
            }
        })
    }
}

/// The values that a node saves for backward: only those that its gradient rule reads.
pub(crate) struct Saved<R: Runtime> {
    pub(crate) inputs: SmallVec<[Option<SavedInput<R>>; 2]>,
    pub(crate) outputs: SmallVec<[Option<SavedInput<R>>; 1]>,
}

impl<R: Runtime> Clone for Saved<R> {
    fn clone(&self) -> Self {
        Saved { inputs: self.inputs.clone(), outputs: self.outputs.clone() }
    }
}

/// Drops a chain of nodes in a loop: recursion over 100 000 nodes would overflow the stack.
impl<R: Runtime> Drop for Node<R> {
    fn drop(&mut self) {
        let mut stack: SmallVec<[Edge<R>; 4]> = self.edges.drain(..).flatten().collect();
        while let Some(edge) = stack.pop() {
            if let Edge::Node(node, _) = edge
                && let Some(mut node) = Arc::into_inner(node)
            {
                stack.extend(node.edges.drain(..).flatten());
            }
        }
    }
}

thread_local! { static CLOCK: Cell<u64> = const { Cell::new(0) }; }

/// A number above this thread's last one and above the numbers of all inputs. Numbers grow along every edge, also in a
/// graph that several threads built.
pub(crate) fn next_number<R: Runtime>(edges: &[Option<Edge<R>>]) -> u64 {
    let of = |e: &Edge<R>| if let Edge::Node(n, _) = e { n.number } else { 0 };
    let below = edges.iter().flatten().map(of).max().unwrap_or(0);
    let number = below.max(CLOCK.get()) + 1;
    CLOCK.set(number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;
    use numcore::NullRuntime;

    #[test]
    fn a_node_stays_small() {
        let (node, op, var) = (size_of::<Node<NullRuntime>>(), size_of::<Op>(), size_of::<crate::Var<NullRuntime>>());
        println!("bytes: node {node}, of which op {op}; variable {var}");
        assert!(
            node <= 480 && var <= 32,
            "every op of a forward pass keeps a node of {node} bytes, a variable has {var}"
        );
    }
}
