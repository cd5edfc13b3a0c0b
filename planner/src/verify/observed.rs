//! The gradients of a step, as its backward passes give them.

use std::{collections::BTreeMap, sync::Arc};

use distributed::{
    combinations::Feature,
    train::{Step, TrainStep},
};
use numcore::{Result, Runtime, Tensor, ops::PointwiseOps};
use parking_lot::Mutex;

use super::record::NamedValues;

/// The gradients that a step has shown so far.
pub(super) struct ObservedGradients<R: Runtime>(Arc<Mutex<ByLeaf<R>>>);

/// Gradients by the ids of leaves: two stages of one rank may have copies of one name.
type ByLeaf<R> = BTreeMap<usize, ObservedGradient<R>>;

struct ObservedGradient<R: Runtime> {
    name: String,
    /// The number of gradients that were final before.
    before: usize,
    value: Tensor<R>,
}

impl<R: Runtime> ObservedGradients<R> {
    /// Observes the gradients of all later steps.
    pub(super) fn of(step: &mut TrainStep<R>) -> Self {
        let all: Arc<Mutex<ByLeaf<R>>> = Arc::default();
        // Each pass has a gradient of its own where ranks sum in each pass.
        let (seen, adds) = (all.clone(), step.properties().features.has(Feature::ReduceEachPass));
        let mut count = 0;
        step.on_gradient(move |leaf, gradient| {
            let mut seen = seen.lock();
            let value = match seen.remove(&leaf.id()).filter(|_| adds) {
                Some(before) => before.value.add(gradient)?,
                None => gradient.copy()?,
            };
            seen.insert(leaf.id(), ObservedGradient { name: leaf.name().to_string(), before: count, value });
            count += 1;
            Ok(())
        });
        ObservedGradients(all)
    }

    /// Takes the gradients since the last call, divided by `weight`, and their names in the order in which they were
    /// final.
    pub(super) fn take(&self, weight: f64) -> Result<(NamedValues, Vec<String>)> {
        let mut seen: Vec<_> = std::mem::take(&mut *self.0.lock()).into_values().collect();
        seen.sort_by_key(|gradient| gradient.before);
        let (mut values, mut names) = (NamedValues::new(), Vec::new());
        for ObservedGradient { name, value, .. } in seen {
            let gradient: Vec<f64> = value.to_f64s()?.into_iter().map(|value| value / weight).collect();
            add_to(&mut values, name.clone(), &gradient);
            names.push(name);
        }
        Ok((values, names))
    }
}

/// Adds values to those that a map has under a key.
pub(super) fn add_to<K: Ord>(sums: &mut BTreeMap<K, Vec<f64>>, key: K, values: &[f64]) {
    match sums.get_mut(&key) {
        Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
        None => drop(sums.insert(key, values.to_vec())),
    }
}
