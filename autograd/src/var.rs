//! [`Var`]: a tensor and, if it needs gradients, its position in the graph.

use std::{fmt, panic::Location, sync::Arc};

use numcore::{
    DType, Error, ErrorKind, Result, Runtime, Tensor, Within,
    ops::{Apply, Bits, Op, Outs, Spec, SpecList, ViewOp},
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{
    Gradients, Leaf, LeafView, anomaly, autocast,
    mode::is_grad_enabled,
    node::{Edge, Node, NodeCall, Saved, SavedInput, TapeValue, next_number},
    observe,
    recipe::RecipeCall,
    rematerialize::ScopedRecipe,
};

/// A value of a computation. If it needs gradients, it holds the graph that computed it; dropping the last variable
/// frees the graph.
pub struct Var<R: Runtime> {
    pub(crate) value: TapeValue<R>,
    pub(crate) edge: Option<Edge<R>>,
}

impl<R: Runtime> Clone for Var<R> {
    fn clone(&self) -> Self {
        Var { value: self.value.clone(), edge: self.edge.clone() }
    }
}

impl<R: Runtime> Var<R> {
    /// A constant: no gradient flows to it.
    pub fn new(value: Tensor<R>) -> Self {
        Var { value: TapeValue::Own(value), edge: None }
    }

    /// A leaf with the given name, whose gradient is wanted.
    ///
    /// # Errors
    /// An error if the dtype of `value` is not floating-point.
    #[track_caller]
    pub fn leaf(name: &str, value: Tensor<R>) -> Result<Self> {
        if !value.dtype().is_float() {
            let why = format!("`{name}` can have no gradient: only floating types do; use `Var::new`");
            return Err(Error::dtype("leaf", &[value.dtype()], why)).at_caller();
        }
        Ok(Leaf::new(name, value)?.var())
    }

    pub(crate) fn of_leaf(view: Arc<LeafView<R>>) -> Self {
        let edge = view.leaf().requires_grad().then(|| Edge::Leaf(view.clone()));
        Var { value: TapeValue::Leaf(view), edge }
    }

    /// The tensor of this variable. A leaf that is not in memory is fetched by its residency.
    #[track_caller]
    pub fn value(&self) -> Result<Tensor<R>> {
        self.value.get()
    }

    /// The tensor, with no further holder if this variable was the only one.
    pub(crate) fn into_value(self) -> Result<Tensor<R>> {
        match self.value {
            TapeValue::Own(value) => Ok(value),
            value => value.get(),
        }
    }

    /// The value of the only element, as `f64`.
    ///
    /// # Errors
    /// An error if there is not exactly one element.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        self.value()?.item()
    }

    /// The sizes of the axes.
    pub fn dims(&self) -> Vec<usize> {
        self.spec().shape.to_vec()
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.spec().dtype
    }

    /// Tells whether gradients flow through this variable.
    pub fn requires_grad(&self) -> bool {
        self.edge.is_some()
    }

    /// The leaf that this variable is; `None` for intermediates, constants and views of leaves.
    pub fn as_leaf(&self) -> Option<&Arc<Leaf<R>>> {
        self.leaf_view().filter(|view| view.is_whole()).map(|view| view.leaf())
    }

    /// The leaf that this variable is or views, with the views; `None` for intermediates and constants.
    pub fn leaf_view(&self) -> Option<&LeafView<R>> {
        match self.value.plain() {
            TapeValue::Leaf(view) => Some(view),
            _ => None,
        }
    }

    /// The gradients of this value, which must have one element, with respect to every leaf on which it depends.
    #[track_caller]
    pub fn backward(&self) -> Result<Gradients<R>> {
        crate::backward(self)
    }

    /// Records a call that already ran. Its outputs with floating-point dtypes depend on the inputs. With a recipe,
    /// outputs are not saved.
    #[track_caller]
    pub(crate) fn recorded(
        call: NodeCall<R>,
        ins: &[&Var<R>],
        outs: Outs<Tensor<R>>,
        recipe: Option<&ScopedRecipe<R>>,
    ) -> Result<Outs<Var<R>>> {
        // Functions may have more inputs than `Bits` holds, and do not read `wants`.
        let tracked = ins.iter().take(Bits::MAX).enumerate().filter(|(_, v)| v.edge.is_some());
        let wants = tracked.fold(0, |b, (i, _)| b | 1 << i);
        let saves = call.saves(Bits(wants))?;
        let mut specs = SpecList::default();
        ins.iter().for_each(|v| v.value.list(&mut specs));
        outs.iter().for_each(|t| specs.push(t.shape(), t.dtype()));
        let output =
            |k, t: &Tensor<R>| recipe.map_or_else(|| SavedInput::Own(t.clone()), |recipe| recipe.saved(k).of_node());
        let saved = Saved {
            inputs: ins
                .iter()
                .enumerate()
                .map(|(i, v)| saves.inputs.has(i).then(|| saved_input(&v.value).of_node()))
                .collect(),
            outputs: outs.iter().enumerate().map(|(k, t)| saves.outputs.has(k).then(|| output(k, t))).collect(),
        };
        let edges: SmallVec<[Option<Edge<R>>; 2]> = ins.iter().map(|v| v.edge.clone()).collect();
        let (number, at) = (next_number(&edges), Location::caller());
        let node = Arc::new(Node {
            number,
            call,
            edges,
            specs,
            outputs: outs.len() as u32,
            at,
            saved: Mutex::new(Some(saved)),
        });
        let var = |(k, t): (usize, Tensor<R>)| {
            let edge = t.dtype().is_float().then(|| Edge::Node(node.clone(), k as u32));
            let value = match recipe {
                Some(recipe) => recipe.output(k, t),
                None => TapeValue::Own(t),
            };
            Var { value, edge }
        };
        Ok(outs.into_iter().enumerate().map(var).collect())
    }

    /// Marks this output of a function as recomputed in backward if it is an unchanged input that is recomputed.
    pub(crate) fn recompute_as(&mut self, ins: &[&Var<R>]) {
        let TapeValue::Own(out) = &self.value else { return };
        let is_out = |v: &&&Var<R>| match &v.value {
            TapeValue::Rematerialized(r) => r.value.shares_memory_with(out) && r.value.layout() == out.layout(),
            _ => false,
        };
        if let Some(same) = ins.iter().find(is_out) {
            self.value = same.value.clone();
        }
    }

    /// The view `view` of this variable, which is `leaf`; `None` where strides cannot express the view.
    fn leaf_seen(&self, leaf: &Arc<LeafView<R>>, view: &ViewOp) -> Result<Option<Self>> {
        let Some(value) = leaf.then(view)? else { return Ok(None) };
        let edge = self.edge.as_ref().map(|_| Edge::Leaf(value.clone()));
        Ok(Some(Var { value: TapeValue::Leaf(value), edge }))
    }

    fn tracked(op: &Op, ins: &[&Self]) -> Result<Bits> {
        if ins.len() > Bits::MAX && ins.iter().any(|v| v.edge.is_some()) {
            let allowed = format!("at most {} to be tracked", Bits::MAX);
            return Err(Error::range(numcore::ops::Rule::name(op), "number of inputs", ins.len(), allowed));
        }
        let mut wants = 0;
        for (i, v) in ins.iter().enumerate() {
            if v.edge.is_some() && is_grad_enabled() {
                wants |= 1 << i;
            }
        }
        Ok(Bits(wants))
    }
}

/// Adds the parameters among the operands to an error, to identify the layer of the model that failed.
#[cold]
fn explained<R: Runtime>(error: Error, ins: &[&Var<R>]) -> Error {
    use ErrorKind::{Argument, Config, DType, Device, Index, NoGradient, Range, Shape, Unsupported, Usage};
    let of_operands = matches!(
        error.kind(),
        Shape { .. }
            | DType { .. }
            | Argument { .. }
            | Range { .. }
            | Config { .. }
            | Usage { .. }
            | Device { .. }
            | Index { .. }
            | Unsupported { .. }
            | NoGradient { .. }
    );
    let known = |v: &&Var<R>| {
        let TapeValue::Leaf(view) = v.value.plain() else { return None };
        let Spec { shape, dtype } = view.leaf().spec();
        let seen = if view.is_whole() { String::new() } else { format!(", seen as {}", view.shape()) };
        Some(format!("`{}` is {dtype} {shape}{seen}", view.leaf().name()))
    };
    let names = || ins.iter().filter_map(known).collect::<Vec<_>>().join("; ");
    if of_operands { error.with_operands(names) } else { error }
}

pub(crate) fn saved_input<R: Runtime>(value: &TapeValue<R>) -> SavedInput<R> {
    match value {
        TapeValue::Dual(dual) => saved_input(&dual.value),
        TapeValue::Own(t) => SavedInput::Own(t.clone()),
        TapeValue::Leaf(view) => SavedInput::Leaf(view.clone(), view.leaf().version()),
        TapeValue::Rematerialized(value) => value.saved(),
    }
}

/// Applies `f` to the values of `vars`, cloning only the tensors of leaves.
pub(crate) fn with_values<R: Runtime, T>(vars: &[&Var<R>], f: impl FnOnce(&[&Tensor<R>]) -> Result<T>) -> Result<T> {
    let mut rooms: SmallVec<[Option<Tensor<R>>; 4]> = SmallVec::new();
    rooms.resize_with(vars.len(), || None);
    let mut values: SmallVec<[&Tensor<R>; 4]> = SmallVec::new();
    for (v, room) in vars.iter().zip(&mut rooms) {
        values.push(v.value.read(room)?);
    }
    f(&values)
}

impl<R: Runtime> Apply for Var<R> {
    type Runtime = R;

    fn runtime(&self) -> &R {
        match &self.value {
            TapeValue::Dual(dual) => dual.tangent.runtime(),
            TapeValue::Own(t) => t.runtime(),
            TapeValue::Leaf(v) => v.leaf().runtime(),
            TapeValue::Rematerialized(r) => r.value.runtime(),
        }
    }

    fn spec(&self) -> Spec {
        self.value.spec()
    }

    fn constant(value: Tensor<R>) -> Self {
        Var::new(value)
    }

    fn detach(&self) -> Self {
        Var { value: self.value.plain().clone(), edge: None }
    }

    fn apply(op: Op, ins: &[&Self]) -> Result<Outs<Self>> {
        let caller = Location::caller();
        let outs = match autocast::operands(&op, ins)? {
            None => Self::applied(op, ins),
            Some(cast) => Self::applied(op, &cast.iter().collect::<SmallVec<[&Self; 4]>>()),
        };
        outs.map_err(|error| explained(error, ins).at(caller))
    }

    fn explained(error: Error, ins: &[&Self]) -> Error {
        explained(error, ins).at(Location::caller())
    }
}

impl<R: Runtime> Var<R> {
    #[track_caller]
    pub(crate) fn applied(op: Op, ins: &[&Self]) -> Result<Outs<Self>> {
        if ins.iter().any(|v| matches!(v.value, TapeValue::Dual(_))) {
            return Self::applied_along(op, ins);
        }
        if let TapeValue::Leaf(leaf) = &ins[0].value {
            let seen = match &op {
                Op::View(view) => ins[0].leaf_seen(leaf, view)?.map(|seen| smallvec::smallvec![seen]),
                Op::Split(split) => split.views().map(|view| ins[0].leaf_seen(leaf, &view)).collect::<Result<_>>()?,
                _ => None,
            };
            if let Some(seen) = seen {
                return Ok(seen);
            }
        }
        let wants = Self::tracked(&op, ins)?;
        match &op {
            Op::Fused(fused) if wants != Bits::NONE && fused.is_composed(wants) => return fused.decompose(ins),
            _ => {}
        }
        let op = match &op {
            Op::Fused(fused) if wants != Bits::NONE => fused.with_gradients(wants).map_or(op, Op::Fused),
            _ => op,
        };
        let outs = with_values(ins, |values| Tensor::compute(&op, values))?;
        if anomaly::looks_at_values() {
            anomaly::check_outputs(numcore::ops::Rule::name(&op), ins, &outs)?;
        }
        let observed = observe::is_on().then(|| op.clone());
        let note = |outs: &[Var<R>]| {
            if let Some(op) = observed {
                observe::note(op, ins, outs);
            }
        };
        if wants == Bits::NONE || outs.iter().all(|t| !t.dtype().is_float()) {
            let outs: Outs<Self> = outs.into_iter().map(Var::new).collect();
            note(&outs);
            return Ok(outs);
        }
        let recipe = ScopedRecipe::of(|| RecipeCall::Op(op.clone()), ins, &outs);
        let outs = Var::recorded(NodeCall::Op(op), ins, outs, recipe.as_ref())?;
        note(&outs);
        Ok(outs)
    }
}

impl<R: Runtime> fmt::Display for Var<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value() {
            Ok(t) => t.fmt(f),
            Err(e) => write!(f, "<{e}>"),
        }
    }
}

impl<R: Runtime> fmt::Debug for Var<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { shape, dtype } = self.spec();
        write!(f, "Var({dtype} {shape}{})", if self.edge.is_some() { ", needs gradients" } else { "" })
    }
}
