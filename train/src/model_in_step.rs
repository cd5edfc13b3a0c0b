//! The model of a loop whose training step owns the model.

use nn::{Module, Visitor};
use numcore::Runtime;

/// The model of a loop whose training step owns the model, as a pipeline owns its stages:
/// `Trainer::new(&ModelInStep, pipeline, loader)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelInStep;

impl<R: Runtime> Module<R> for ModelInStep {
    fn visit(&self, _: &str, _: &mut dyn Visitor<R>) {}
}
