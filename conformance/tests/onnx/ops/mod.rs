//! ONNX's operators from public operations.

pub mod attention;
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

use crate::{call::Call, file::Answer, graph::T};

/// The outputs of a node; an operator is looked up in one file after another.
pub fn run(call: &Call<'_>) -> Answer<Vec<T>> {
    type Find = fn(&Call<'_>) -> Answer<Option<Vec<T>>>;
    const FILES: &[Find] = &[
        elementwise::run,
        reduce::run,
        shape::run,
        indexing::run,
        products::run,
        pools::run,
        norms::run,
        attention::run,
        losses::run,
        resize::run,
        signal::run,
        quantized::run,
        recurrent::run,
        linear_attention::run,
    ];
    for find in FILES {
        if let Some(outs) = find(call)? {
            return Ok(outs);
        }
    }
    Err("the interpreter does not have it".into())
}

/// The one output of an operator.
fn one(x: numcore::Result<T>) -> Answer<Option<Vec<T>>> {
    Ok(Some(vec![x?]))
}
