//! A custom pointwise op: one expression is its definition, its gradient, and its kernel on every device.
#![forbid(unsafe_code)]

use std::sync::LazyLock;

use weftgrad::{pointwise::Program, prelude::*};

/// `x · tanh(ln(1 + eˣ) · beta)`, with `beta` a run-time number: changing it makes no new kernel.
static MISHLIKE: LazyLock<Program> =
    LazyLock::new(|| Program::new("mishlike", |[x], [beta]| [x * (x.softplus() * beta).tanh()]));

fn main() -> Result<()> {
    let rt = weftgrad_examples::options::device("Define a pointwise op, and differentiate it twice")?;
    println!("The program:\n{}\n", *MISHLIKE);
    if let Some(derivative) = MISHLIKE.derivative(0) {
        println!("Its gradient, taken symbolically (reads inputs {:?}):\n{}\n", derivative.inputs, derivative.program);
    }

    let x = Var::leaf("x", Tensor::arange(&rt, -2.0, 1.0, 5, DType::F64)?)?;
    let y = x.apply_program(&MISHLIKE, &[], &[0.8.into()])?;
    // A gradient is an expression again: it can be differentiated once more.
    let slope = derivative(&y, &x)?;
    println!("y = {y}\ndy/dx = {slope}\nd²y/dx² = {}", derivative(&slope, &x)?);
    Ok(())
}

/// The derivative of each element of `y` with respect to the element of `x` at its place.
fn derivative<R: Runtime>(y: &Var<R>, x: &Var<R>) -> Result<Var<R>> {
    let gradient = weftgrad::differentiable_grad(&[y], &[x])?.remove(0);
    gradient.ok_or_else(|| weftgrad::Error::argument("derivative", "y does not depend on x"))
}
