//! Loading of parameters alone, for a model that is trained otherwise than the saved one, or not at all.

use autograd::Leaf;
use nn::{Module, ModuleExt};
use numcore::{
    DType, Error, Result, Runtime, Shape,
    ops::{PointwiseOps, ViewOps},
    placement::TensorPlacement,
};

use super::{CheckpointReader, Wanted, names};

impl CheckpointReader {
    /// Loads parameters and buffers into a model, each from the saved name that `rename` returns for the model's own;
    /// `None` leaves it unchanged. Ignores optimizer state, so any strategy and number of ranks may have saved it;
    /// element types are converted. Each rank reads for itself. Call it before making a trainer.
    ///
    /// # Errors
    /// One error lists all tensors that are missing or of another shape; nothing is changed then.
    pub fn load_parameters<R: Runtime>(
        &mut self,
        model: &(impl Module<R> + ?Sized),
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        self.load(model, &|name| Some(names::parameter(&rename(name)?)), &|name| Some(names::buffer(&rename(name)?)))
    }

    /// Loads other tensors into the parameters of a model, averages of parameters for example. `tensor` returns the
    /// full logical name of the tensor for each of the model's names. Buffers are those of the checkpoint; otherwise as
    /// [`load_parameters`](CheckpointReader::load_parameters).
    ///
    /// # Errors
    /// One error lists all tensors that are missing or of another shape; nothing is changed then.
    pub fn load_tensors<R: Runtime>(
        &mut self,
        model: &(impl Module<R> + ?Sized),
        tensor: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        self.load(model, &tensor, &|name| Some(names::buffer(name)))
    }

    fn load<R: Runtime>(
        &mut self,
        model: &(impl Module<R> + ?Sized),
        parameter: &dyn Fn(&str) -> Option<String>,
        buffer: &dyn Fn(&str) -> Option<String>,
    ) -> Result<()> {
        let (parameters, buffers) = (model.named_parameters(), model.named_buffers());
        let mut wrong = Vec::new();
        let mut planned = |name: &str, saved: &dyn Fn(&str) -> Option<String>, shape: Shape| {
            let theirs = saved(name)?;
            match self.manifest.entries.get(&theirs).map(|entry| entry.shape) {
                Some(there) if there == shape => return Some(theirs),
                Some(there) => wrong.push(format!("{name} is {shape} here, and {theirs} is {there}")),
                None => wrong.push(format!("{name} is missing under the name {theirs}")),
            }
            None
        };
        let parameters: Vec<_> =
            parameters.iter().map(|(name, p)| planned(name, parameter, p.logical_shape())).zip(&parameters).collect();
        let buffers: Vec<_> =
            buffers.iter().map(|(name, b)| planned(name, buffer, b.spec().shape)).zip(&buffers).collect();
        if !wrong.is_empty() {
            let folder = self.folder.display();
            return Err(Error::state("parameters", format!("do not fit {folder}: {}", wrong.join("; "))));
        }
        for (theirs, (_, parameter)) in parameters {
            let Some(theirs) = theirs else { continue };
            let leaf: &Leaf<R> = &parameter.leaf();
            let whole = || TensorPlacement::whole(leaf.spec().shape);
            let piece = parameter.placed().map_or_else(whole, |placed| placed.placement().clone());
            leaf.set(self.converted(leaf.runtime(), theirs, piece, leaf.spec().dtype)?)?;
        }
        for (theirs, (_, buffer)) in buffers {
            let Some(theirs) = theirs else { continue };
            let rt = buffer.value().runtime().clone();
            let spec = buffer.spec();
            buffer.set(self.converted(&rt, theirs, TensorPlacement::whole(spec.shape), spec.dtype)?)?;
        }
        Ok(())
    }

    /// Reads a piece of a saved tensor, converted to `dtype`.
    fn converted<R: Runtime>(
        &mut self,
        rt: &R,
        name: String,
        piece: TensorPlacement,
        dtype: DType,
    ) -> Result<numcore::Tensor<R>> {
        let saved = self.manifest.entries.get(&name).map_or(dtype, |entry| entry.dtype);
        let local = piece.local();
        self.read(rt, &Wanted::piece(name, piece, saved))?.reshape(local)?.to_dtype(dtype)
    }
}
