//! Properties of layers apart from values: shapes, modes, statistics, masks, states, and the errors of wrong sizes.

mod attention;
mod block_scaled;
mod embedding;
mod linear;
mod modes;
mod recurrent;
mod sizes;

use crate::common::{V, close, cpu};
use autograd::Var;
use nn::Init;
use numcore::{DType, Result, Tensor};
use runtime_cpu::Cpu;

fn init() -> Init<Cpu> {
    Init::new(&cpu(), 11)
}

fn uniform(shape: &[usize], seed: u64) -> V {
    Var::new(Tensor::uniform(&cpu(), shape, DType::F32, -1.0, 1.0, seed).unwrap())
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

fn same(a: &V, b: &V) {
    close("both", &a.value().unwrap(), &b.value().unwrap(), 1e-6);
}
