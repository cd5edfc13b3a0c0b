//! Conversions into the source of a training step's optimizers.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime};

use crate::{Combined, FlatOptimizer, Optimizer, ParamGroups, Shards, UpdateRule};

/// A value that a training step can make its optimizers of: a configuration, [`ParamGroups`], an existing optimizer, or
/// a function ([`OptimizerFn`]).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no optimizer",
    label = "give a configuration, `AdamWConfig` for one, `ParamGroups`, or an optimizer"
)]
pub trait IntoOptimizer<R: Runtime> {
    /// Converts the value into a source of optimizers.
    fn into_source(self) -> OptimizerSource<R>;
}

/// The source of a training step's optimizers: of one, of one per pipeline stage, or of those of shards.
pub struct OptimizerSource<R: Runtime> {
    make: Box<MakeOptimizer<R>>,
    shards: Option<Arc<dyn Shards<R>>>,
}

/// Makes the optimizer of some parameters.
type MakeOptimizer<R> = dyn FnMut(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>>;

impl<R: Runtime> OptimizerSource<R> {
    /// Creates a source of optimizers of unsharded parameters.
    pub fn new(make: impl FnMut(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> + 'static) -> Self {
        OptimizerSource { make: Box::new(make), shards: None }
    }

    /// Creates a source of one existing optimizer, which has its parameters already.
    pub fn made(optimizer: Box<dyn Optimizer<R>>) -> Self {
        let mut made = Some(optimizer);
        Self::new(move |_| {
            let why = "an optimizer that was made already trains one model as a whole: give a configuration, or a function \
                       (`optimizer_with`), where stages or experts have optimizers of their own";
            made.take().ok_or_else(|| Error::config("TrainStep::builder", "optimizer", why))
        })
    }

    /// Makes the optimizer of these parameters, which may be empty. An existing optimizer keeps its own parameters.
    ///
    /// # Errors
    /// Errors of making the optimizer; and an error if an existing optimizer was returned before.
    pub fn optimizer(&mut self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        (self.make)(leaves)
    }

    /// The rule that updates shards. `None` for existing optimizers, and for functions that make some.
    pub fn shards(&self) -> Option<&Arc<dyn Shards<R>>> {
        self.shards.as_ref()
    }
}

impl<R: Runtime> IntoOptimizer<R> for OptimizerSource<R> {
    fn into_source(self) -> OptimizerSource<R> {
        self
    }
}

/// A configuration makes an optimizer with all parameters in one group, which has a learning rate even without
/// parameters.
impl<R: Runtime, C: UpdateRule + 'static> IntoOptimizer<R> for C {
    fn into_source(self) -> OptimizerSource<R> {
        let shards: Arc<dyn Shards<R>> = Arc::new(self.clone());
        OptimizerSource {
            shards: Some(shards),
            ..OptimizerSource::new(move |leaves| Ok(Box::new(FlatOptimizer::over(self.clone(), leaves)?)))
        }
    }
}

impl<R: Runtime, C: UpdateRule> IntoOptimizer<R> for ParamGroups<C> {
    fn into_source(self) -> OptimizerSource<R> {
        let shards: Arc<dyn Shards<R>> = Arc::new(self.clone());
        OptimizerSource {
            shards: Some(shards),
            ..OptimizerSource::new(move |leaves| Ok(Box::new(self.optimizer(leaves)?)))
        }
    }
}

impl<R: Runtime> IntoOptimizer<R> for Arc<dyn Shards<R>> {
    fn into_source(self) -> OptimizerSource<R> {
        let why = "updates shards alone: ask for `zero`, or give a configuration";
        let make = move |_| Err(Error::config("TrainStep::builder", "optimizer", why));
        OptimizerSource { shards: Some(self), ..OptimizerSource::new(make) }
    }
}

impl<R: Runtime> IntoOptimizer<R> for Box<dyn Optimizer<R>> {
    fn into_source(self) -> OptimizerSource<R> {
        OptimizerSource::made(self)
    }
}

impl<R: Runtime, C: UpdateRule + 'static> IntoOptimizer<R> for FlatOptimizer<R, C> {
    fn into_source(self) -> OptimizerSource<R> {
        OptimizerSource::made(Box::new(self))
    }
}

impl<R: Runtime> IntoOptimizer<R> for Combined<R> {
    fn into_source(self) -> OptimizerSource<R> {
        OptimizerSource::made(Box::new(self))
    }
}

/// A function that makes an optimizer of given parameters: of a model, or of its stages one after another.
#[derive(Clone)]
pub struct OptimizerFn<F>(pub F);

impl<R: Runtime, F> IntoOptimizer<R> for OptimizerFn<F>
where
    F: FnMut(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> + 'static,
{
    fn into_source(self) -> OptimizerSource<R> {
        OptimizerSource::new(self.0)
    }
}
