//! A pointwise op of one's own: one expression is its definition, its gradient, and its kernel on every device.
#![forbid(unsafe_code)]

use std::sync::LazyLock;

use weftgrad::{pointwise::Program, prelude::*};

/// `x · tanh(ln(1 + eˣ) · beta)`, with `beta` a run-time number: changing it makes no new kernel.
static MISHLIKE: LazyLock<Program> =
    LazyLock::new(|| Program::new("mishlike", |[x], [beta]| [x * (x.softplus() * beta).tanh()]));

fn main() -> Result<()> {
    let rt = weftgrad_examples::device()?;
    println!("The program:\n{}\n", *MISHLIKE);
    if let Some(derivative) = MISHLIKE.derivative(0) {
        println!("Its gradient, taken symbolically (reads inputs {:?}):\n{}\n", derivative.inputs, derivative.program);
    }

    let x = Var::leaf("x", Tensor::arange(&rt, -2.0, 1.0, 5, DType::F64)?)?;
    let y = x.apply_program(&MISHLIKE, &[], &[0.8.into()])?;
    let gradients = y.sum(&[], false)?.backward()?;
    println!("y = {y}");
    if let Some(g) = gradients.of(&x) {
        println!("dy/dx = {g}");
    }

    // The gradient is an expression again: it can be differentiated once more.
    let slope = weftgrad::grad(&[&y], &[&x], true);
    if let Ok(slope) = slope
        && let [Some(slope)] = slope.as_slice()
    {
        println!(
            "d²y/dx² = {}",
            weftgrad::grad(&[slope], &[&x], false)?[0].as_ref().map_or(String::new(), |c| c.to_string())
        );
    }
    Ok(())
}
