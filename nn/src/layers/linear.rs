//! The affine layer, `x · Wᵀ + b`.

use autograd::Var;
use numcore::{
    Result, Runtime,
    ops::{MatmulOps, PointwiseOps},
};

use super::{AdapterSlot, optional, without_bias};
use crate::{Forward, Init, Initializer, Module, Param};

/// The affine layer `x · Wᵀ + b` of `x: [.., I]`, giving `[.., O]`.
#[derive(Debug, Module)]
pub struct Linear<R: Runtime> {
    /// The weight matrix, `[O, I]`.
    pub weight: Param<R>,
    /// The bias vector, `[O]`, if the layer has one.
    pub bias: Option<Param<R>>,
    /// What computes the output instead, if anything.
    #[module(flatten)]
    pub adapter: AdapterSlot<R>,
}

without_bias!(Linear);

impl<R: Runtime> Linear<R> {
    /// A layer with weight and bias uniform in `±1/√inputs`.
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = init.weight([outputs, inputs], Initializer::by_fan(inputs))?;
        let bias = Some(init.bias([outputs], Initializer::by_fan(inputs))?);
        Ok(Linear { weight, bias, adapter: AdapterSlot::default() })
    }

    /// This layer with its bias only if `keep`.
    pub fn with_bias_if(self, keep: bool) -> Self {
        if keep { self } else { self.without_bias() }
    }

    /// `x · Wᵀ + b + residual`, added in the epilogue of the GEMM where the runtime can. `residual: [.., O]`.
    #[track_caller]
    pub fn forward_onto(&self, x: &Var<R>, residual: &Var<R>) -> Result<Var<R>> {
        match self.adapter.get() {
            None => x.linear_onto(&self.weight.var(), optional(&self.bias).as_ref(), residual),
            Some(adapter) => adapter.forward(self, x)?.add(residual),
        }
    }

    /// `x · Wᵀ + b`, whatever the adapter.
    #[track_caller]
    pub fn plain(&self, x: &Var<R>) -> Result<Var<R>> {
        x.linear(&self.weight.var(), optional(&self.bias).as_ref())
    }
}

impl<R: Runtime> Forward<R> for Linear<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        match self.adapter.get() {
            None => self.plain(x),
            Some(adapter) => adapter.forward(self, x),
        }
    }
}
