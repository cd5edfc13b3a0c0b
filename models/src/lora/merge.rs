//! Adapters into the weights, and out again.

use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
};

use super::{AdaptedLayer, Lora, adapter::row_norms};

impl<R: Runtime> Lora<R> {
    /// Adds the updates to the model's weights and takes the adapters out of it: the model computes the same, without what adapters cost.
    ///
    /// # Errors
    /// If they are merged already, or a weight is shared with tensors that someone holds.
    pub fn merge(&mut self) -> Result<()> {
        self.expect_merged(false)?;
        self.layers.iter_mut().try_for_each(AdaptedLayer::merge)?;
        self.merged = true;
        Ok(())
    }

    /// Takes the updates out of the weights again, up to rounding, and puts the adapters back.
    ///
    /// # Errors
    /// If they are not merged.
    pub fn unmerge(&mut self) -> Result<()> {
        self.expect_merged(true)?;
        self.layers.iter_mut().try_for_each(AdaptedLayer::unmerge)?;
        self.merged = false;
        Ok(())
    }

    fn expect_merged(&self, due: bool) -> Result<()> {
        if self.merged == due {
            return Ok(());
        }
        Err(Error::argument(
            "lora",
            if due { "the adapters are not merged" } else { "the adapters are merged already" },
        ))
    }
}

impl<R: Runtime> AdaptedLayer<R> {
    fn merge(&mut self) -> Result<()> {
        let (update, own) = (self.adapter.update()?, self.weight.dtype());
        let sum = self.weight.value()?.to_dtype(update.dtype())?.add(&update)?;
        let merged = match &self.adapter.magnitude {
            None => sum,
            Some(magnitude) => {
                let norms = row_norms(&sum)?;
                let gains = magnitude.value()?.div(&norms)?;
                self.norms = Some(norms);
                sum.mul(&gains.unsqueeze(1)?)?
            }
        };
        self.weight.set(merged.to_dtype(own)?)?;
        self.slot.replace(None);
        Ok(())
    }

    fn unmerge(&mut self) -> Result<()> {
        let (update, own) = (self.adapter.update()?, self.weight.dtype());
        let merged = self.weight.value()?.to_dtype(update.dtype())?;
        let sum = match (&self.adapter.magnitude, self.norms.take()) {
            (Some(magnitude), Some(norms)) => without_gains(&merged, &magnitude.value()?, &norms)?,
            _ => merged,
        };
        self.weight.set(sum.sub(&update)?.to_dtype(own)?)?;
        self.slot.replace(Some(self.adapter.clone()));
        Ok(())
    }
}

fn without_gains<R: Runtime>(merged: &Tensor<R>, magnitude: &Tensor<R>, norms: &Tensor<R>) -> Result<Tensor<R>> {
    merged.mul(&norms.div(magnitude)?.unsqueeze(1)?)
}
