//! Merging adapters into the weights, and taking them out again.

use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{PointwiseOps, ViewOps},
};

use super::{AdaptedLayer, Lora, adapter::row_norms};

impl<R: Runtime> Lora<R> {
    /// Adds the updates to the model's weights and takes the adapters out. The model computes the same, without the
    /// cost of adapters. After an error some layers may be merged and others not, each still computing the same;
    /// another call merges the rest.
    ///
    /// # Errors
    /// Fails if all are merged already, a weight is stored in four bits, or one shares memory with another tensor.
    #[track_caller]
    pub fn merge(&mut self) -> Result<()> {
        if self.layers.iter().all(|layer| layer.merged) {
            return Err(Error::usage("lora", "the adapters are merged already")).at_caller();
        }
        self.layers.iter_mut().filter(|layer| !layer.merged).try_for_each(AdaptedLayer::merge).at_caller()
    }

    /// Subtracts the updates from the weights, up to rounding, and puts the adapters back.
    ///
    /// # Errors
    /// Fails if none is merged, or a weight shares memory with another tensor.
    #[track_caller]
    pub fn unmerge(&mut self) -> Result<()> {
        if !self.is_merged() {
            return Err(Error::usage("lora", "the adapters are not merged")).at_caller();
        }
        self.layers.iter_mut().filter(|layer| layer.merged).try_for_each(AdaptedLayer::unmerge).at_caller()
    }

    /// Tells whether the update of some layer is in its weight.
    pub(super) fn is_merged(&self) -> bool {
        self.layers.iter().any(|layer| layer.merged)
    }
}

impl<R: Runtime> AdaptedLayer<R> {
    fn merge(&mut self) -> Result<()> {
        if self.adapter.base().is_some() {
            let why =
                "has its weight in four bits, which would round the update away: merge into the unquantised model";
            return Err(Error::state(&*self.names.ours, why));
        }
        let (update, own) = (self.adapter.update()?, self.weight.dtype());
        let sum = self.weight.value()?.to_dtype(update.dtype())?.add(&update)?;
        let (merged, norms) = match &self.adapter.magnitude {
            None => (sum, None),
            Some(magnitude) => {
                let norms = row_norms(&self.weight, &sum)?;
                let gains = magnitude.value()?.div(&norms)?;
                (sum.mul(&gains.unsqueeze(1)?)?, Some(norms))
            }
        };
        self.weight.set(merged.to_dtype(own)?)?;
        self.slot.replace(None);
        (self.norms, self.merged) = (norms, true);
        Ok(())
    }

    fn unmerge(&mut self) -> Result<()> {
        let (update, own) = (self.adapter.update()?, self.weight.dtype());
        let merged = self.weight.value()?.to_dtype(update.dtype())?;
        let sum = match (&self.adapter.magnitude, &self.norms) {
            (Some(magnitude), Some(norms)) => without_gains(&merged, &magnitude.value()?, norms)?,
            _ => merged,
        };
        self.weight.set(sum.sub(&update)?.to_dtype(own)?)?;
        self.slot.replace(Some(self.adapter.clone()));
        (self.norms, self.merged) = (None, false);
        Ok(())
    }
}

fn without_gains<R: Runtime>(merged: &Tensor<R>, magnitude: &Tensor<R>, norms: &Tensor<R>) -> Result<Tensor<R>> {
    merged.mul(&norms.div(magnitude)?.unsqueeze(1)?)
}
