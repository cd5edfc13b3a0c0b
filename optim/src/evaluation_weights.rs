//! Weights to evaluate a model with, in place of the trained ones.

use std::{collections::HashMap, sync::Arc};

use autograd::Leaf;
use numcore::{Error, Result, Runtime, Tensor, ops::PointwiseOps};

use crate::{Optimizer, state::AVERAGE};

/// Values for the parameters of a model, to evaluate it with: averages that an [`Ema`](crate::Ema) or an optimizer
/// keeps. They are views, so neither that optimizer nor those averages can be updated until they are dropped.
#[doc(alias("eval"))]
pub struct EvaluationWeights<R: Runtime>(Vec<(Arc<Leaf<R>>, Tensor<R>)>);

impl<R: Runtime> EvaluationWeights<R> {
    /// Takes values in the dtypes of their parameters.
    pub(crate) fn new(values: impl IntoIterator<Item = (Arc<Leaf<R>>, Tensor<R>)>) -> Result<Self> {
        let typed = |(leaf, value): (Arc<Leaf<R>>, Tensor<R>)| {
            let value = value.to_dtype(leaf.spec().dtype)?;
            Ok((leaf, value))
        };
        values.into_iter().map(typed).collect::<Result<_>>().map(EvaluationWeights)
    }

    /// The averages that an optimizer keeps as its state `average`, as schedule-free rules do. Parameters without such
    /// an average, or that no step has updated yet, keep their values.
    ///
    /// # Errors
    /// An error if no parameter of the optimizer has an average.
    pub fn of(optimizer: &dyn Optimizer<R>) -> Result<Self> {
        let (mut averages, mut updated) = (HashMap::new(), HashMap::new());
        for (name, value) in optimizer.state_dict()? {
            // Combined optimizers number the entries of each.
            let name = name.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches('.');
            if let Some((AVERAGE, parameter)) = name.split_once('.') {
                averages.insert(parameter.to_string(), value);
            } else if let Some(parameter) = name.strip_prefix("step.") {
                updated.insert(parameter.to_string(), value.item()? > 0.0);
            }
        }
        if averages.is_empty() {
            let why = "keeps no averages: use a schedule-free rule, or `Ema`";
            return Err(Error::state("the optimizer", why));
        }
        averages.retain(|name, _| updated.get(name) == Some(&true));
        let leaves: Vec<_> = optimizer.params().into_iter().flat_map(|params| params.leaves().to_vec()).collect();
        Self::new(leaves.into_iter().filter_map(|leaf| averages.remove(&*leaf.name()).map(|value| (leaf, value))))
    }

    /// Sets the parameters to these values, and returns the values that they had.
    pub fn exchange(self) -> Result<Self> {
        let own = self.0.iter().map(|(leaf, _)| Ok((leaf.clone(), leaf.value()?))).collect::<Result<_>>()?;
        self.0.into_iter().try_for_each(|(leaf, value)| leaf.set(value))?;
        Ok(EvaluationWeights(own))
    }

    /// Runs `f` with these values as the parameters', and restores the parameters' own.
    pub fn during<T>(self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let own = self.exchange()?;
        let result = f();
        own.exchange()?;
        result
    }
}
