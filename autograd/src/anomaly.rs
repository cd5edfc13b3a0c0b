//! Anomaly detection: finds the operation, the line of the program and the layer that produced the first NaN.

use std::{cell::Cell, collections::VecDeque, sync::Arc};

use numcore::{
    Error, ErrorKind, Result, Runtime, Tensor,
    ops::{PointwiseOps, ReduceOps},
};

use crate::{
    Var,
    address::ByAddress,
    mode::Restore,
    node::{Edge, Node},
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
}

/// Runs `f` and stops it with an error at the operation that produces the first NaN on this thread.
///
/// In the forward pass, that is the first operation on variables whose inputs contain no NaN and whose output does. In
/// the backward pass, it is the first gradient that contains a NaN. The error names the operation, the line of the
/// program that called it, and the nearest parameters before it, which identify the layer.
///
/// Infinities are not reported, because masks consist of them. The check of each result waits for the device, so a step
/// takes several times as long: use it to find a NaN, not for training.
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
pub(crate) fn check_outputs<R: Runtime>(op: &'static str, ins: &[&Var<R>], outs: &[Tensor<R>]) -> Result<()> {
    let Some(k) = first_nan(outs.iter())? else { return Ok(()) };
    let values = ins.iter().map(|v| v.value()).collect::<Result<Vec<_>>>()?;
    if first_nan(values.iter())?.is_some() {
        return Ok(());
    }
    let edges = ins.iter().filter_map(|v| v.edge.as_ref());
    let why = format!("NaN begins here, in output {k}{}", after(nearest(edges)));
    Err(ErrorKind::Anomaly { op, why }.into())
}

/// Returns an error if `gradient`, the gradient of input `i` of `node`, contains a NaN.
pub(crate) fn check_gradient<R: Runtime>(gradient: &Var<R>, i: usize, node: &Arc<Node<R>>) -> Result<()> {
    if first_nan([gradient.value()?].iter())?.is_none() {
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
