//! Splits of examples into training and validation, and weights of classes. Each is a function of a seed.
//!
//! Indices ascend, and go to [`Dataset::subset`](crate::Dataset::subset). Classes are any values with an order:
//! numbers, names.
//!
//! ```
//! use data::{Dataset, InMemory, split};
//! # fn main() -> numcore::Result<()> {
//! let classes: Vec<i64> = (0..40).map(|i| i64::from(i % 10 == 0)).collect();
//! let examples = InMemory::new((0..40).collect::<Vec<i32>>());
//! for [training, validation] in split::stratified_k_fold(&classes, 4, 7)? {
//!     let (training, validation) = ((&examples).subset(training)?, (&examples).subset(validation)?);
//!     assert_eq!((training.len(), validation.len()), (30, 10));
//! }
//! # Ok(())
//! # }
//! ```

use std::{collections::BTreeMap, fmt::Debug};

use numcore::{Error, Result, Within};

use crate::order::KeyedPermutation;

/// Indices of training and of validation examples.
pub type SplitIndices = [Vec<usize>; 2];

/// Splits examples so that each class is divided in proportion: `first` training examples, and the rest. scikit-learn's
/// `train_test_split(stratify=…)`. Classes with the largest remainders round up; of equal ones, the first classes.
///
/// # Errors
/// Fails if there are fewer examples than `first`.
#[track_caller]
#[doc(alias("train_test_split"))]
#[doc(alias("StratifiedShuffleSplit"))]
pub fn stratified<C: Ord>(classes: &[C], first: usize, seed: u64) -> Result<SplitIndices> {
    let len = classes.len();
    if first > len {
        let allowed = format!("at most {len}, the number of examples");
        return Err(Error::range("split::stratified", "first", first, allowed)).at_caller();
    }
    let classes: Vec<Vec<usize>> = by_class(classes, seed).into_values().collect();
    let share = |class: &Vec<usize>| class.len() as u128 * first as u128;
    let mut counts: Vec<usize> = classes.iter().map(|class| (share(class) / len.max(1) as u128) as usize).collect();
    let mut largest: Vec<usize> = (0..classes.len()).collect();
    largest.sort_by_key(|&class| std::cmp::Reverse(share(&classes[class]) % len.max(1) as u128));
    let left = first - counts.iter().sum::<usize>();
    largest.into_iter().take(left).for_each(|class| counts[class] += 1);
    let parts = classes.iter().zip(counts).map(|(class, count)| class.split_at(count));
    let (training, validation): (Vec<&[usize]>, Vec<&[usize]>) = parts.unzip();
    Ok([training.concat(), validation.concat()].map(sorted))
}

/// Splits `len` examples into `k` parts at random, whose sizes differ by at most one. Fold `f` has part `f` for
/// validation and the others for training: scikit-learn's `KFold(shuffle=True)`.
///
/// # Errors
/// Fails if `k` is below 2, or above the number of examples.
#[track_caller]
#[doc(alias("KFold"))]
#[doc(alias("cross_validation"))]
pub fn k_fold(len: usize, k: usize, seed: u64) -> Result<Vec<SplitIndices>> {
    folds("split::k_fold", by_class(&vec![(); len], seed).into_values().flatten(), len, k).at_caller()
}

/// Splits examples into `k` parts that have each class in proportion. Its numbers in two parts differ by at most one,
/// and so do the sizes of the parts. scikit-learn's `StratifiedKFold(shuffle=True)`.
///
/// # Errors
/// Fails if `k` is below 2, or above the number of examples of some class, which some part would lack.
#[track_caller]
#[doc(alias("StratifiedKFold"))]
pub fn stratified_k_fold<C: Ord + Debug>(classes: &[C], k: usize, seed: u64) -> Result<Vec<SplitIndices>> {
    let op = "split::stratified_k_fold";
    let grouped = by_class(classes, seed);
    if let Some((class, examples)) = grouped.iter().find(|(_, examples)| examples.len() < k) {
        let allowed = format!("at most {}, the number of examples of class {class:?}", examples.len());
        return Err(Error::range(op, "k", k, allowed)).at_caller();
    }
    folds(op, grouped.into_values().flatten(), classes.len(), k).at_caller()
}

/// Weights `n / (C · n_c)` of `count` classes that are numbers from 0, for
/// [`WeightedOrder`](crate::order::WeightedOrder) or a weighted loss: scikit-learn's `class_weight="balanced"`. `n` is
/// the number of examples, `n_c` of those in the class, `C` the number of classes.
///
/// # Errors
/// Fails if a class is not below `count`, or a class has no example.
#[track_caller]
#[doc(alias("compute_class_weight"))]
#[doc(alias("balanced"))]
pub fn class_weights(classes: &[i64], count: usize) -> Result<Vec<f64>> {
    let op = "split::class_weights";
    let mut counts = vec![0usize; count];
    for (example, &class) in classes.iter().enumerate() {
        let Some(counted) = usize::try_from(class).ok().and_then(|class| counts.get_mut(class)) else {
            return Err(Error::range(op, "class", class, format!("in 0..{count}, at example {example}"))).at_caller();
        };
        *counted += 1;
    }
    if let Some(class) = counts.iter().position(|&counted| counted == 0) {
        return Err(Error::argument(op, format!("class {class} of {count} has no example to weigh it by"))).at_caller();
    }
    Ok(counts.into_iter().map(|counted| classes.len() as f64 / (count as f64 * counted as f64)).collect())
}

/// The examples of each class, in a random order.
fn by_class<C: Ord>(classes: &[C], seed: u64) -> BTreeMap<&C, Vec<usize>> {
    let order = KeyedPermutation::new(classes.len() as u64, seed, 0);
    let mut grouped = BTreeMap::<&C, Vec<usize>>::new();
    for place in 0..classes.len() as u64 {
        let example = order.number(place) as usize;
        grouped.entry(&classes[example]).or_default().push(example);
    }
    grouped
}

/// Deals examples out to `k` parts in turn.
fn folds(op: &'static str, examples: impl Iterator<Item = usize>, len: usize, k: usize) -> Result<Vec<SplitIndices>> {
    if k < 2 || k > len {
        return Err(Error::range(op, "k", k, format!("at least 2, and at most {len}, the number of examples")));
    }
    let mut parts = vec![Vec::new(); k];
    examples.enumerate().for_each(|(place, example)| parts[place % k].push(example));
    let others = |f: usize| parts.iter().enumerate().filter(move |(part, _)| *part != f).flat_map(|(_, part)| part);
    Ok((0..k).map(|f| [others(f).copied().collect(), parts[f].clone()].map(sorted)).collect())
}

fn sorted(mut indices: Vec<usize>) -> Vec<usize> {
    indices.sort_unstable();
    indices
}
