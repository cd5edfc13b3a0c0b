//! Anomaly detection: finds the operation, the line of the program and the layer that produced the first NaN. Also
//! inspection, which passes every result of a step to a function.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::VecDeque,
    panic::Location,
    sync::Arc,
};

use numcore::{
    Error, ErrorKind, Result, Runtime, Tensor,
    ops::{PointwiseOps, ReduceOps},
};

use crate::{
    Leaf, Var,
    address::ByAddress,
    mode::Restore,
    node::{Edge, Node, TapeValue},
    sweep::id,
};

/// The tensors in which this thread looks for NaN.
#[derive(Clone, Copy, Default, PartialEq)]
enum LookFor {
    #[default]
    Nothing,
    /// The outputs of operations on variables.
    Values,
    /// The gradients that gradient rules return. Intermediate results of a rule are not checked separately.
    Gradients,
}

thread_local! {
    static LOOK_FOR: Cell<LookFor> = const { Cell::new(LookFor::Nothing) };
    /// The function that receives results in place of the search for NaN: an [`Inspector`].
    static INSPECTOR: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

/// A function that receives the results of a step.
type Inspector<R> = Box<dyn FnMut(&InspectedCall<'_, R>) -> Result<()>>;

/// An op call on variables, or a gradient rule that gives a gradient, with its operands.
#[non_exhaustive]
pub struct InspectedCall<'a, R: Runtime> {
    /// The name of the op. In backward, it is the op whose gradient rule gives the gradient.
    pub op: &'static str,
    /// The input of the op that the gradient is of; `None` in forward.
    pub gradient_of: Option<usize>,
    /// The line of the program that called the op.
    pub at: &'static Location<'static>,
    /// The leaves among the inputs of the op.
    pub leaves: Vec<Arc<Leaf<R>>>,
    /// The inputs of the op. In backward, the gradients of its outputs, as far as there are any.
    pub inputs: Vec<Tensor<R>>,
    /// The outputs of the op; in backward, the gradient.
    pub outputs: &'a [Tensor<R>],
}

/// Runs `f` and stops it with an error at the operation that produces the first NaN on this thread.
///
/// In the forward pass, that is the first operation on variables whose inputs contain no NaN and whose output does. In
/// the backward pass, it is the first gradient that contains a NaN. The error names the operation, the line of the
/// program that called it, and the nearest parameters before it, which identify the layer.
///
/// Infinities are not reported, because masks consist of them. The check of each result waits for the device, and a
/// step takes several times as long. Use it to find a NaN, not for training.
///
/// # Errors
/// `ErrorKind::Anomaly` at the first NaN; otherwise the error of `f`.
///
/// ```
/// # use autograd::{Var, detect_anomaly};
/// # use numcore::{NullRuntime, Tensor, DType, ops::PointwiseOps};
/// # let rt = NullRuntime::new();
/// let x = Var::leaf("x", Tensor::zeros(&rt, [3], DType::F32)?)?;
/// let loss = detect_anomaly(|| x.log()?.mul(2.0))?;
/// # Ok::<(), numcore::Error>(())
/// ```
#[doc(alias = "set_detect_anomaly")]
pub fn detect_anomaly<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    let _restore = Restore::set(&LOOK_FOR, LookFor::Values);
    f()
}

/// Runs `f`, and passes each op call on variables of this thread to `inspect`, with the values of its operands. In
/// backward passes it receives the gradients that rules give, in place of the op calls of the rules.
///
/// Each gradient is computed once more, as a value of its own. The results of `f` are the same to the bit.
/// An error of `inspect` ends the pass at that call. Inside, [`detect_anomaly`] looks for nothing.
///
/// ```
/// # use autograd::{Var, backward, inspect_calls};
/// # use numcore::{NullRuntime, Tensor, DType, ops::PointwiseOps};
/// # let rt = NullRuntime::new();
/// let x = Var::leaf("x", Tensor::zeros(&rt, [], DType::F32)?)?;
/// let (to, from) = std::sync::mpsc::channel();
/// inspect_calls::<NullRuntime, _>(
///     move |call| Ok(to.send((call.op, call.gradient_of)).unwrap_or(())),
///     || backward(&x.exp()?.mul(2.0)?),
/// )?;
/// assert!(from.iter().eq([("exp", None), ("mul", None), ("mul", Some(0)), ("exp", Some(0))]));
/// # Ok::<(), numcore::Error>(())
/// ```
pub fn inspect_calls<R: Runtime, T>(
    inspect: impl FnMut(&InspectedCall<'_, R>) -> Result<()> + 'static,
    f: impl FnOnce() -> T,
) -> T {
    struct Outer(Option<Box<dyn Any>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            INSPECTOR.set(self.0.take());
        }
    }
    let inspector: Inspector<R> = Box::new(inspect);
    let _outer = Outer(INSPECTOR.replace(Some(Box::new(inspector))));
    let _restore = Restore::set(&LOOK_FOR, LookFor::Values);
    f()
}

/// Passes a call to the inspector; `false` if there is none. Op calls of the inspector itself are not inspected.
fn inspect<'a, R: Runtime>(call: impl FnOnce() -> Result<InspectedCall<'a, R>>) -> Result<bool> {
    let Some(mut inspector) = INSPECTOR.take() else { return Ok(false) };
    let done = looking_for(LookFor::Nothing, || match inspector.downcast_mut::<Inspector<R>>() {
        Some(inspector) => inspector(&call()?),
        // Variables of another runtime.
        None => Ok(()),
    });
    INSPECTOR.set(Some(inspector));
    done.map(|()| true)
}

/// Runs a backward pass. Inside `detect_anomaly`, gradients are checked rather than outputs.
pub(crate) fn in_backward<T>(f: impl FnOnce() -> T) -> T {
    looking_for(LookFor::Gradients, f)
}

fn looking_for<T>(what: LookFor, f: impl FnOnce() -> T) -> T {
    let before = LOOK_FOR.get();
    let _restore = Restore::set(&LOOK_FOR, if before == LookFor::Nothing { before } else { what });
    f()
}

/// Tells whether this thread checks the outputs of operations for NaN.
pub(crate) fn looks_at_values() -> bool {
    LOOK_FOR.get() == LookFor::Values
}

/// Tells whether this thread checks gradients for NaN.
pub(crate) fn looks_at_gradients() -> bool {
    LOOK_FOR.get() == LookFor::Gradients
}

/// Returns an error if an output of `op` contains a NaN and none of its inputs does.
#[track_caller]
pub(crate) fn check_outputs<R: Runtime>(op: &'static str, ins: &[&Var<R>], outs: &[Tensor<R>]) -> Result<()> {
    let at = Location::caller();
    let call = || {
        let leaf = |v: &&Var<R>| match &v.value {
            TapeValue::Leaf(view) => Some(view.leaf().clone()),
            _ => None,
        };
        let inputs = ins.iter().map(|v| v.value()).collect::<Result<_>>()?;
        let leaves = ins.iter().filter_map(leaf).collect();
        Ok(InspectedCall { op, gradient_of: None, at, leaves, inputs, outputs: outs })
    };
    if inspect(call)? {
        return Ok(());
    }
    let Some(k) = first_nan(outs.iter())? else { return Ok(()) };
    let values = ins.iter().map(|v| v.value()).collect::<Result<Vec<_>>>()?;
    if first_nan(values.iter())?.is_some() {
        return Ok(());
    }
    let edges = ins.iter().filter_map(|v| v.edge.as_ref());
    let why = format!("NaN begins here, in output {k}{}", after(nearest(edges)));
    Err(ErrorKind::Anomaly { op, why }.into())
}

/// Returns an error if `gradient`, the gradient of input `i` of `node`, contains a NaN. `upstream` has the gradients of
/// the node's outputs.
pub(crate) fn check_gradient<R: Runtime>(
    gradient: &Var<R>,
    i: usize,
    node: &Arc<Node<R>>,
    upstream: &[Option<Var<R>>],
) -> Result<()> {
    let outputs = [gradient.value()?];
    let call = || {
        let leaf = |edge: &Edge<R>| match edge {
            Edge::Leaf(view) => Some(view.leaf().clone()),
            Edge::Node(..) => None,
        };
        let leaves = node.edges.iter().flatten().filter_map(leaf).collect();
        let inputs = upstream.iter().flatten().map(|v| v.value()).collect::<Result<_>>()?;
        let (op, gradient_of) = (node.call.name(), Some(i));
        Ok(InspectedCall { op, gradient_of, at: node.at, leaves, inputs, outputs: &outputs })
    };
    if inspect(call)? || first_nan(outputs.iter())?.is_none() {
        return Ok(());
    }
    let parameters = after(nearest(node.edges.iter().flatten()));
    let why = format!("NaN begins here in backward, in the gradient of input {i}{parameters}");
    Err(Error::from(ErrorKind::Anomaly { op: node.call.name(), why }).at(node.at))
}

fn first_nan<'a, R: Runtime>(mut values: impl Iterator<Item = &'a Tensor<R>>) -> Result<Option<usize>> {
    let has = |x: &Tensor<R>| Ok(x.dtype().is_float() && x.isnan()?.any_all()?.item()? != 0.0);
    let mut error = None;
    let at = values.position(|x| match has(x) {
        Ok(has) => has,
        Err(e) => {
            error = Some(e);
            true
        }
    });
    error.map_or(Ok(at), Err)
}

/// The names of the leaves that are the fewest operations before these edges.
fn nearest<'a, R: Runtime>(edges: impl Iterator<Item = &'a Edge<R>>) -> Vec<String> {
    let (mut seen, mut level): (ByAddress<()>, VecDeque<Edge<R>>) = (ByAddress::default(), edges.cloned().collect());
    while !level.is_empty() {
        let names: Vec<String> = level.iter().filter_map(name).collect();
        if !names.is_empty() {
            return names;
        }
        for _ in 0..level.len() {
            if let Some(Edge::Node(node, _)) = level.pop_front()
                && seen.insert(id(&node), ()).is_none()
            {
                level.extend(node.edges.iter().flatten().cloned());
            }
        }
    }
    Vec::new()
}

fn name<R: Runtime>(edge: &Edge<R>) -> Option<String> {
    match edge {
        Edge::Leaf(view) => Some(format!("`{}`", view.leaf().name())),
        Edge::Node(..) => None,
    }
}

fn after(names: Vec<String>) -> String {
    if names.is_empty() { String::new() } else { format!("; the nearest parameters before it: {}", names.join(", ")) }
}
