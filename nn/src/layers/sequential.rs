//! Chains of layers.

use autograd::Var;
use numcore::{Result, Runtime, Within};

use super::Numbered;
use crate::{Forward, Module, Stage, module::one_value};

/// A chain of layers, named "0", "1", …, each applied to the output of the one before.
///
/// ```
/// use nn::{Init, Linear, Relu, Sequential};
/// # use numcore::NullRuntime;
/// let init = Init::new(&NullRuntime::new(), 0);
/// let model = Sequential::new().push(Linear::new(&init, 8, 16)?).push(Relu).push(Linear::new(&init, 16, 3)?);
/// assert_eq!(model.len(), 3);
/// # Ok::<(), numcore::Error>(())
/// ```
#[derive(Module)]
pub struct Sequential<R: Runtime> {
    #[module(flatten)]
    layers: Numbered<Box<dyn Forward<R>>>,
}

impl<R: Runtime> Default for Sequential<R> {
    fn default() -> Self {
        Self::starting_at(0)
    }
}

impl<R: Runtime> Sequential<R> {
    /// A sequence of no layers: the identity.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a stage of a longer sequence, whose layers are named from number `first` on.
    pub fn starting_at(first: usize) -> Self {
        Sequential { layers: Numbered::new(first, Vec::new()) }
    }

    /// Splits the sequence into consecutive stages, whose layers keep their names. Each cut is the index of the first
    /// layer of the next stage; cuts do not descend.
    pub fn split(self, cuts: &[usize]) -> Vec<Self> {
        self.layers.split(cuts.iter().copied()).into_iter().map(|layers| Sequential { layers }).collect()
    }

    /// Appends a layer at the end.
    pub fn push(mut self, layer: impl Forward<R> + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Tells whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns the layers in order, for example to make pipeline stages of them.
    pub fn into_layers(self) -> Vec<Box<dyn Forward<R>>> {
        self.layers.into_iter().collect()
    }
}

impl<R: Runtime> FromIterator<Box<dyn Forward<R>>> for Sequential<R> {
    fn from_iter<I: IntoIterator<Item = Box<dyn Forward<R>>>>(layers: I) -> Self {
        Sequential { layers: Numbered::new(0, layers.into_iter().collect()) }
    }
}

impl<R: Runtime> Forward<R> for Sequential<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.layers.numbered().try_fold(x.clone(), |x, (i, layer)| layer.forward(&x).within(i)).at_caller()
    }
}

impl<R: Runtime> Stage<R> for Sequential<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        Ok(vec![self.forward(one_value("sequential stage", inputs)?)?])
    }
}
