//! A product of two inputs with a weight for each pair of channels.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::{optional, without_bias};
use crate::{Init, Initializer, Module, Param};

/// The bilinear layer `yₒ = xᵀ Wₒ z + bₒ` of `x: [.., I]` and `z: [.., J]`, giving `[.., O]`.
#[derive(Debug, Module)]
pub struct Bilinear<R: Runtime> {
    /// The weights, `[O, I, J]`.
    pub weight: Param<R>,
    /// The bias of each output, `[O]`, if the layer has one.
    pub bias: Option<Param<R>>,
}

without_bias!(Bilinear);

impl<R: Runtime> Bilinear<R> {
    /// A layer with weight and bias uniform in `±1/√I`, for `inputs` of `[I, J]`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: [usize; 2], outputs: usize) -> Result<Self> {
        let how = Initializer::by_fan(inputs[0]);
        let (weight, bias) = (init.weight([outputs, inputs[0], inputs[1]], how)?, init.bias([outputs], how)?);
        Ok(Bilinear { weight, bias: Some(bias) })
    }

    /// Computes the output for `x: [.., I]` and `z: [.., J]` with the same leading axes.
    #[track_caller]
    pub fn forward(&self, x: &Var<R>, z: &Var<R>) -> Result<Var<R>> {
        let (xs, zs, w) = (x.spec().shape, z.spec().shape, self.weight.shape());
        let (Some((lead, [i])), Some((other, [j]))) = (xs.dims().split_last_chunk(), zs.dims().split_last_chunk())
        else {
            return Err(Error::shape("bilinear", &[xs, zs], "needs inputs [.., I] and [.., J]")).at_caller();
        };
        if [*i, *j] != w[1..] || lead != other {
            let why = format!("needs [.., {}] and [.., {}] with the same leading axes", w[1], w[2]);
            return Err(Error::shape("bilinear", &[xs, zs], why)).at_caller();
        }
        // One product with all of `x`, `[.., O · J]`; `z` is summed over in one pass.
        let weight = self.weight.var().transpose(1, 2)?.reshape([w[0] * w[2], w[1]])?;
        let each = x.linear(&weight, None).at_caller()?.reshape([lead, &[w[0], w[2]]].concat())?;
        let y = each.mul(&z.unsqueeze(-2)?)?.sum(&[-1])?;
        optional(&self.bias).map_or(Ok(y.clone()), |bias| y.add(&bias))
    }
}
