//! A stage: the part of a model that one rank runs as a whole.

use autograd::Var;
use nn::{Forward, Module, Visitor};
use numcore::{Error, Result, Runtime};

/// A part of a model: several values in, several out, of any shapes and element types. Its parameters are those it visits as a
/// [`Module`]; a parameter's name should be its name in the whole model.
///
/// A stage is given what the stage before made, in its order; the first is given a micro-batch's inputs, what the last makes goes
/// to the loss. It must make values of the same shapes and dtypes for every micro-batch. Gradients flow back to the floating
/// inputs that needed them where they were made: integers and masks travel forward alone.
#[doc(alias("TrainablePipelineStage"))]
pub trait Stage<R: Runtime>: Module<R> {
    /// Applies it to one micro-batch.
    fn forward(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>>;
}

impl<R: Runtime, S: Stage<R> + ?Sized> Stage<R> for Box<S> {
    fn forward(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        (**self).forward(inputs)
    }
}

/// Consecutive layers of a longer list, one value in and one out. They keep their names in the whole list: "3", "4", ….
pub struct Layers<R: Runtime> {
    first: usize,
    layers: Vec<Box<dyn Forward<R>>>,
}

impl<R: Runtime> Layers<R> {
    /// The layers from number `first` on.
    pub fn new(first: usize, layers: Vec<Box<dyn Forward<R>>>) -> Self {
        Layers { first, layers }
    }
}

impl<R: Runtime> Module<R> for Layers<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        let named = self.layers.iter().enumerate();
        named.for_each(|(k, layer)| layer.visit(&(self.first + k).to_string(), visitor));
        visitor.leave();
    }
}

impl<R: Runtime> Stage<R> for Layers<R> {
    fn forward(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        let [x] = inputs else {
            return Err(Error::argument("pipeline layers", format!("take one value, got {}", inputs.len())));
        };
        Ok(vec![self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))?])
    }
}
