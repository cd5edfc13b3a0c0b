//! The affine layer, `x · Wᵀ + b`.

use autograd::Var;
use numcore::{Result, Runtime, ops::MatmulOps};

use super::{optional, without_bias};
use crate::{Forward, Init, Initializer, Module, Param};

/// The affine layer `x · Wᵀ + b` of `x: [.., I]`, giving `[.., O]`.
#[derive(Debug, Module)]
pub struct Linear<R: Runtime> {
    /// The weight matrix, `[O, I]`.
    pub weight: Param<R>,
    /// The bias vector, `[O]`, if the layer has one.
    pub bias: Option<Param<R>>,
}

without_bias!(Linear);

impl<R: Runtime> Linear<R> {
    /// A layer with weight and bias uniform in `±1/√inputs`.
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = init.weight([outputs, inputs], Initializer::by_fan(inputs))?;
        let bias = Some(init.bias([outputs], Initializer::by_fan(inputs))?);
        Ok(Linear { weight, bias })
    }

    /// `x · Wᵀ + b + residual`, added in the epilogue of the GEMM where the runtime can. `residual: [.., O]`.
    pub fn forward_onto(&self, x: &Var<R>, residual: &Var<R>) -> Result<Var<R>> {
        x.linear_onto(&self.weight.var(), optional(&self.bias).as_ref(), residual)
    }
}

impl<R: Runtime> Forward<R> for Linear<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.linear(&self.weight.var(), optional(&self.bias).as_ref())
    }
}
