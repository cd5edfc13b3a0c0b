//! The gradients of a step, as its backward passes give them.

use std::{collections::BTreeMap, sync::Arc};

use autograd::LeafGrad;
use distributed::{
    combinations::Feature,
    train::{Step, TrainStep},
};
use numcore::Runtime;
use parking_lot::Mutex;

use super::record::NamedValues;

/// The gradients that a step has shown so far.
pub(super) struct ObservedGradients(Arc<Mutex<ByLeaf>>);

/// Gradients by the ids of leaves: two stages of one rank may have copies of one name.
type ByLeaf = BTreeMap<usize, ObservedGradient>;

struct ObservedGradient {
    name: String,
    /// The number of gradients that were final before.
    before: usize,
    value: Vec<f64>,
}

impl ObservedGradients {
    /// Observes the gradients of all later steps.
    pub(super) fn of<R: Runtime>(step: &mut TrainStep<R>) -> Self {
        let all: Arc<Mutex<ByLeaf>> = Arc::default();
        let (seen, each_pass) = (all.clone(), step.properties().features.has(Feature::ReduceEachPass));
        let mut count = 0;
        step.on_gradient(move |leaf, gradient| {
            let mut seen = seen.lock();
            // A pass has a gradient of its own where ranks sum in each pass, and where the memory has a wider dtype.
            let adds = each_pass || matches!(gradient, LeafGrad::Own(_));
            let mut value = gradient.value()?.to_f64s()?;
            if let Some(before) = seen.remove(&leaf.id()).filter(|_| adds) {
                value.iter_mut().zip(&before.value).for_each(|(sum, before)| *sum += before);
            }
            seen.insert(leaf.id(), ObservedGradient { name: leaf.name().to_string(), before: count, value });
            count += 1;
            Ok(())
        });
        ObservedGradients(all)
    }

    /// Takes the gradients since the last call, divided by `weight`, and their names in the order in which they were
    /// final.
    pub(super) fn take(&self, weight: f64) -> (NamedValues, Vec<String>) {
        let mut seen: Vec<_> = std::mem::take(&mut *self.0.lock()).into_values().collect();
        seen.sort_by_key(|gradient| gradient.before);
        let (mut values, mut names) = (NamedValues::new(), Vec::new());
        for ObservedGradient { name, value, .. } in seen {
            let gradient: Vec<f64> = value.into_iter().map(|value| value / weight).collect();
            add_to(&mut values, name.clone(), &gradient);
            names.push(name);
        }
        (values, names)
    }
}

/// Adds values to those that a map has under a key.
pub(super) fn add_to<K: Ord>(sums: &mut BTreeMap<K, Vec<f64>>, key: K, values: &[f64]) {
    match sums.get_mut(&key) {
        Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
        None => drop(sums.insert(key, values.to_vec())),
    }
}
