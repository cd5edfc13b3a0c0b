//! ONNX's operators from public operations: each file has the rows of some of them.

pub(super) mod attention;
mod elementwise;
mod indexing;
mod linear_attention;
mod losses;
mod norms;
mod pools;
mod products;
mod quantized;
mod recurrent;
mod reduce;
mod resize;
mod shape;
mod signal;

use autograd::Var;
use numcore::{Result, Runtime};

use super::call::{NodeCall, NodeOutputs};

/// An operator: the attributes that it reads, and its computation.
pub(super) struct OperatorRow<R: Runtime> {
    pub(super) attributes: &'static [&'static str],
    pub(super) run: fn(&NodeCall<'_, R>) -> NodeOutputs<R>,
}

/// The operator of this name in a domain.
pub(super) fn find<R: Runtime>(domain: &str, op: &str) -> Option<OperatorRow<R>> {
    type Find<R> = fn(&str) -> Option<OperatorRow<R>>;
    let files: &[Find<R>] = match domain {
        "" | "ai.onnx" => &[
            elementwise::find,
            reduce::find,
            shape::find,
            indexing::find,
            products::find,
            pools::find,
            norms::find,
            attention::find,
            losses::find,
            resize::find,
            signal::find,
            quantized::find,
            recurrent::find,
            linear_attention::find,
        ],
        "ai.onnx.ml" => &[elementwise::find_ml, indexing::find_ml],
        _ => &[],
    };
    files.iter().find_map(|find| find(op))
}

/// A row of the table.
fn row<R: Runtime>(
    attributes: &'static [&'static str],
    run: fn(&NodeCall<'_, R>) -> NodeOutputs<R>,
) -> Option<OperatorRow<R>> {
    Some(OperatorRow { attributes, run })
}

/// The one output of an operator.
fn one<R: Runtime>(x: Result<Var<R>>) -> NodeOutputs<R> {
    Ok(vec![x?])
}
