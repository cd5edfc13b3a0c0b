mod derive;
mod print;
mod simplify;
mod types;
mod values;

use super::{Binary, Expr, Inst, Number, Program, ProgramBuilder, Unary};
use crate::{DType, Scalar};

/// A function by which a test writes an expression of one input.
type Write = for<'b> fn(Expr<'b>) -> Expr<'b>;

/// The outputs for one element whose inputs all have type `dtype`.
fn run(program: &Program, dtype: DType, inputs: &[f64], scalars: &[Scalar]) -> Vec<f64> {
    let typed = program.resolve(&vec![dtype; inputs.len()], &[]).unwrap();
    let inputs: Vec<Number> = inputs.iter().map(|&x| Number::Float(x).cast(dtype)).collect();
    program.eval(&typed, &inputs, scalars, 0).into_iter().map(Number::to_f64).collect()
}

fn run1(program: &Program, inputs: &[f64]) -> f64 {
    run(program, DType::F64, inputs, &[])[0]
}

/// The derivative with respect to input `wrt`, for an upstream gradient of 1.
fn slope(program: &Program, wrt: usize, inputs: &[f64]) -> f64 {
    let Some(d) = program.derivative(wrt) else { return 0.0 };
    let ins: Vec<f64> = d.inputs.iter().map(|&k| inputs.get(k as usize).copied().unwrap_or(1.0)).collect();
    run1(&d.program, &ins)
}

/// The derivative by central differences.
fn difference(program: &Program, wrt: usize, inputs: &[f64]) -> f64 {
    let at = |h: f64| {
        let mut moved = inputs.to_vec();
        moved[wrt] += h;
        run1(program, &moved)
    };
    let h = 1e-5 * inputs[wrt].abs().max(0.1);
    // Two step sizes cancel the error's h² term.
    let wide = (at(2.0 * h) - at(-2.0 * h)) / (4.0 * h);
    let near = (at(h) - at(-h)) / (2.0 * h);
    (4.0 * near - wide) / 3.0
}

fn assert_close(got: f64, want: f64, tolerance: f64, what: &str) {
    assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "{what}: {got} is not {want}");
}

fn unary_program(op: Unary) -> Program {
    one(move |b, x, _| b.expr(b.push(Inst::Unary(op, x[0].id()))))
}

fn binary_program(op: Binary) -> Program {
    let b = ProgramBuilder::default();
    let y = b.push(Inst::Binary(op, b.input(0).id(), b.input(1).id()));
    b.finish(op.name(), 2, 0, &[b.expr(y)])
}

fn one(f: impl for<'b> FnOnce(&'b ProgramBuilder, &[Expr<'b>], &[Expr<'b>]) -> Expr<'b>) -> Program {
    Program::build("test", 1, 0, |b, x, s| vec![f(b, x, s)])
}
