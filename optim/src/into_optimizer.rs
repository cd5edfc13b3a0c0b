//! What an optimizer can be made of.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime};

use crate::{Combined, Elementwise, FlatOptimizer, Optimizer, ParamGroups, Shards, UpdateRule};

/// Whatever a training step can make its optimizers of: a configuration, [`ParamGroups`], an optimizer that was made
/// already, or a function ([`OptimizerFn`]).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no optimizer",
    label = "give a configuration, `AdamWConfig` for one, `ParamGroups`, or an optimizer"
)]
pub trait IntoOptimizer<R: Runtime> {
    /// The source of optimizers.
    fn into_source(self) -> OptimizerSource<R>;
}

/// The source of a training step's optimizers: of one, of one for each stage of a pipeline, or of those of shards.
pub struct OptimizerSource<R: Runtime> {
    make: Box<MakeOptimizer<R>>,
    shards: Option<Arc<dyn Shards<R>>>,
}

/// Makes the optimizer of some parameters.
type MakeOptimizer<R> = dyn FnMut(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>>;

impl<R: Runtime> OptimizerSource<R> {
    /// A source of optimizers of whole parameters.
    pub fn new(make: impl FnMut(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> + 'static) -> Self {
        OptimizerSource { make: Box::new(make), shards: None }
    }

    /// A source of one optimizer, which was made already and has its parameters.
    pub fn made(optimizer: Box<dyn Optimizer<R>>) -> Self {
        let mut made = Some(optimizer);
        Self::new(move |_| {
            let why = "an optimizer that was made already trains one model as a whole: give a configuration, or a function \
                       (`optimizer_with`), where stages or experts have optimizers of their own";
            made.take().ok_or_else(|| Error::config("TrainStep::builder", "optimizer", why))
        })
    }

    /// The optimizer of these parameters, of which there may be none. An optimizer that was made already has its own.
    ///
    /// # Errors
    /// As the optimizer's; and if an optimizer that was made already was given before.
    pub fn optimizer(&mut self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        (self.make)(leaves)
    }

    /// The rule by which shards are updated; none of a rule that looks at whole parameters, and of optimizers that were
    /// made already.
    pub fn shards(&self) -> Option<&Arc<dyn Shards<R>>> {
        self.shards.as_ref()
    }
}

/// All parameters in one group, which knows its learning rate without any too.
impl<R: Runtime, C: UpdateRule + 'static> IntoOptimizer<R> for C {
    fn into_source(self) -> OptimizerSource<R> {
        let shards = self.shards();
        OptimizerSource {
            shards,
            ..OptimizerSource::new(move |leaves| Ok(Box::new(FlatOptimizer::over(self.clone(), leaves)?)))
        }
    }
}

impl<R: Runtime, E: Elementwise + 'static> IntoOptimizer<R> for ParamGroups<E> {
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

/// A function that makes an optimizer of the parameters it is given: of a model's, or of one stage's after another.
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
