//! Channels of images, scaled by what the whole image shows.

use autograd::Var;
use numcore::{
    Result, Runtime, Within,
    fused::ConvOptions,
    ops::{PointwiseOps, ReduceOps},
};

use super::Conv2d;
use crate::{Forward, Init, Module, parallel::ContextSlot};

/// Squeeze and excitation (Hu et al. 2018) of `x: [N, C, H, W]`: each channel is multiplied by a factor from 0 to 1.
/// Two layers compute the factors from the means of all channels. Parameters have torchvision's names.
#[doc(alias = "SEBlock")]
#[derive(Debug, Module)]
pub struct SqueezeExcitation<R: Runtime> {
    /// The layer from the means to fewer channels.
    pub fc1: Conv2d<R>,
    /// The layer from these to a factor for each channel.
    pub fc2: Conv2d<R>,
    context: ContextSlot<R>,
}

impl<R: Runtime> SqueezeExcitation<R> {
    /// A layer that squeezes `channels` channels into `squeezed`.
    #[track_caller]
    pub fn new(init: &Init<R>, channels: usize, squeezed: usize) -> Result<Self> {
        let layer = |from, to| Conv2d::new(init, from, to, [1, 1], ConvOptions::default());
        let (fc1, fc2) = (layer(channels, squeezed)?, layer(squeezed, channels)?);
        Ok(SqueezeExcitation { fc1, fc2, context: ContextSlot::refuses() })
    }
}

impl<R: Runtime> Forward<R> for SqueezeExcitation<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let factors = self.fc2.forward(&self.fc1.forward(&x.mean_keepdim(&[2, 3]).at_caller()?)?.relu()?)?.sigmoid()?;
        x.mul(&factors)
    }
}
