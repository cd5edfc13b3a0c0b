//! The model of a loop whose training step owns the model.

use nn::{Module, Visitor};
use numcore::Runtime;

/// The model of a loop whose training step owns the model, as a pipeline owns its stages:
/// `Trainer::new(&InStep, pipeline, loader)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct InStep;

impl<R: Runtime> Module<R> for InStep {
    fn visit(&self, _: &str, _: &mut dyn Visitor<R>) {}
}
