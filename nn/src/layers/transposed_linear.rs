//! The affine layer whose weight is `[I, O]`.

use autograd::Var;
use numcore::{
    Result, Runtime, Within,
    ops::{MatmulOps, ViewOps},
};

use super::{optional, without_bias};
use crate::{Forward, Init, Initializer, Module, Param};

/// The affine layer `x · W + b` with a weight of `[I, O]`, as in files of TensorFlow and GPT-2.
/// [`Linear`](super::Linear) computes the same from `Wᵀ`.
#[doc(alias = "Conv1D")]
#[derive(Debug, Module)]
pub struct TransposedLinear<R: Runtime> {
    /// The weight matrix, `[I, O]`.
    pub weight: Param<R>,
    /// The bias vector, `[O]`, if the layer has one.
    pub bias: Option<Param<R>>,
}

without_bias!(TransposedLinear);

impl<R: Runtime> TransposedLinear<R> {
    /// A layer with weight and bias uniform in `±1/√inputs`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = init.weight([inputs, outputs], Initializer::by_fan(inputs))?;
        let bias = Some(init.bias([outputs], Initializer::by_fan(inputs))?);
        Ok(TransposedLinear { weight, bias })
    }
}

impl<R: Runtime> Forward<R> for TransposedLinear<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.linear(&self.weight.var().t()?, optional(&self.bias).as_ref()).at_caller()
    }
}
