//! What an optimizer can be made of.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime};

use crate::{Combined, Elementwise, FlatOptimizer, Optimizer, ParamGroups, UpdateRule};

/// Whatever a training step can make its optimizer of: a configuration, [`ParamGroups`], an optimizer that was made already, or a function
/// ([`OptimizerFn`]).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no optimizer",
    label = "give a configuration, `AdamWConfig` for one, `ParamGroups`, or an optimizer"
)]
pub trait IntoOptimizer<R: Runtime> {
    /// The optimizer of these parameters, of which there may be none. An optimizer that was made already has its own.
    fn into_optimizer(self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>>;
}

/// All parameters in one group, which knows its learning rate without any too.
impl<R: Runtime, C: UpdateRule + 'static> IntoOptimizer<R> for C {
    fn into_optimizer(self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        Ok(Box::new(FlatOptimizer::over(self, leaves)?))
    }
}

impl<R: Runtime, E: Elementwise + 'static> IntoOptimizer<R> for ParamGroups<E> {
    fn into_optimizer(self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        Ok(Box::new(self.optimizer(leaves)?))
    }
}

impl<R: Runtime> IntoOptimizer<R> for Box<dyn Optimizer<R>> {
    fn into_optimizer(self, _: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        Ok(self)
    }
}

impl<R: Runtime, C: UpdateRule + 'static> IntoOptimizer<R> for FlatOptimizer<R, C> {
    fn into_optimizer(self, _: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        Ok(Box::new(self))
    }
}

impl<R: Runtime> IntoOptimizer<R> for Combined<R> {
    fn into_optimizer(self, _: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        Ok(Box::new(self))
    }
}

/// A function that makes an optimizer of the parameters it is given: of a model's, or of one stage's after another.
#[derive(Clone)]
pub struct OptimizerFn<F>(pub F);

impl<R: Runtime, F> IntoOptimizer<R> for OptimizerFn<F>
where
    F: FnOnce(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>>,
{
    fn into_optimizer(self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        (self.0)(leaves)
    }
}
