//! Splits, folds and weighted orders: scikit-learn's numbers, frequencies, ranks and ends of domains.

use std::collections::BTreeSet;

use data::{
    InMemory, Loader,
    order::{Order, WeightedOrder},
    split::{class_weights, k_fold, stratified, stratified_k_fold},
};
use numcore::Result;
use serde_json::Value;

fn reference() -> Value {
    serde_json::from_str(include_str!("../references/sklearn.json")).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn integers(value: &Value) -> Vec<usize> {
    floats(value).into_iter().map(|x| x as usize).collect()
}

fn classes_of(reference: &Value) -> Vec<i64> {
    floats(&reference["classes"]).into_iter().map(|x| x as i64).collect()
}

fn counts(classes: &[i64], of: &[usize]) -> Vec<usize> {
    (0..4).map(|class| of.iter().filter(|&&example| classes[example] == class).count()).collect()
}

fn error<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

/// Requires each of `len` examples once in both parts together, in ascending order.
fn check_parts([training, validation]: &[Vec<usize>; 2], len: usize) {
    assert!(training.is_sorted() && validation.is_sorted());
    let all: BTreeSet<usize> = training.iter().chain(validation).copied().collect();
    assert_eq!((all.len(), training.len() + validation.len()), (len, len));
}

#[test]
fn stratified_parts_have_the_counts_of_scikit_learn() {
    let reference = reference();
    let classes = classes_of(&reference);
    for (first, expect) in reference["split"].as_object().unwrap() {
        let parts = stratified(&classes, first.parse().unwrap(), 5).unwrap();
        check_parts(&parts, classes.len());
        assert_eq!(counts(&classes, &parts[0]), integers(expect), "{first}");
        assert_ne!(parts, stratified(&classes, first.parse().unwrap(), 6).unwrap(), "another seed");
    }
    assert!(stratified::<i64>(&[], 0, 1).unwrap().concat().is_empty());
    assert_eq!(stratified(&["warp"], 1, 1).unwrap(), [vec![0], vec![]]);
    assert!(error(stratified(&classes, 44, 1)).contains("first is 44, and must be at most 43"));
}

#[test]
fn folds_have_the_counts_of_scikit_learn() {
    let reference = reference();
    let classes = classes_of(&reference);
    for (k, expect) in reference["folds"].as_object().unwrap() {
        let folds = stratified_k_fold(&classes, k.parse().unwrap(), 5).unwrap();
        folds.iter().for_each(|fold| check_parts(fold, classes.len()));
        let mut found: Vec<Vec<usize>> = folds.iter().map(|[_, part]| counts(&classes, part)).collect();
        found.sort();
        assert_eq!(found, expect.as_array().unwrap().iter().map(integers).collect::<Vec<_>>(), "{k}");
    }
    let folds = k_fold(43, 5, 1).unwrap();
    let mut sizes: Vec<usize> = folds.iter().map(|[_, part]| part.len()).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, integers(&reference["sizes"]));
    let validated: BTreeSet<usize> = folds.iter().flat_map(|[_, part]| part.clone()).collect();
    assert!(validated.len() == 43 && !folds[0][1].iter().eq(&[0, 5, 10, 15, 20, 25, 30, 35, 40]));
    assert!(error(k_fold(3, 4, 1)).contains("k is 4, and must be at least 2, and at most 3"));
    assert!(k_fold(3, 1, 1).is_err() && k_fold(0, 2, 1).is_err() && stratified_k_fold::<i64>(&[], 2, 1).is_err());
    assert!(error(stratified_k_fold(&classes, 4, 1)).contains("at most 3, the number of examples of class 3"));
}

#[test]
fn weights_of_classes_are_those_of_scikit_learn() {
    let reference = reference();
    let classes = classes_of(&reference);
    assert_eq!(class_weights(&classes, 4).unwrap(), floats(&reference["weights"]));
    assert!(error(class_weights(&classes, 5)).contains("class 4 of 5 has no example"));
    assert!(error(class_weights(&classes, 3)).contains("class is 3, and must be in 0..3, at example 40"));
    assert!(class_weights(&[-1], 1).is_err() && class_weights(&[], 0).unwrap().is_empty());
}

#[test]
fn draws_have_their_weights_and_no_more_than_one_place_without_replacement() {
    let weights = [1.0, 0.0, 3.0, 0.5, 0.0, 5.5, 0.0];
    let (mut with, mut first) = ([0.0; 7], [0.0; 7]);
    let draws = WeightedOrder::with_replacement(&weights, 10, 3).unwrap();
    let places = WeightedOrder::without_replacement(&weights, 3, 3).unwrap();
    for epoch in 0..4000 {
        draws.indices(epoch, 0..10).into_iter().for_each(|i| with[i as usize] += 1.0);
        let drawn = places.indices(epoch, 0..3);
        first[drawn[0] as usize] += 1.0;
        assert_eq!(drawn.iter().collect::<BTreeSet<_>>().len(), 3);
        assert!(drawn.iter().all(|&i| weights[i as usize] > 0.0));
    }
    for (counts, draws) in [(with, 40_000.0), (first, 4000.0)] {
        for (count, weight) in counts.into_iter().zip(weights) {
            let (expect, p) = (draws * weight / 10.0, weight / 10.0);
            assert!((count - expect).abs() <= 4.5 * (expect * (1.0 - p)).sqrt(), "{count} for {expect}");
        }
    }
    // The second draw is from those that are left: P(5 then 2) = 0.55 · 3 / 4.5.
    let second = (0..4000).filter(|&epoch| places.indices(epoch, 0..2) == [5, 2]).count() as f64;
    assert!((second - 4000.0 * 0.55 * 3.0 / 4.5).abs() < 4.5 * (4000.0f64 * 0.367 * 0.633).sqrt(), "{second}");
}

#[test]
fn weighted_orders_are_functions_of_position_and_refuse_bad_weights() {
    let weights: Vec<f64> = (0..50).map(f64::from).collect();
    let orders =
        [WeightedOrder::with_replacement(&weights, 40, 1), WeightedOrder::without_replacement(&weights, 40, 1)];
    for order in orders.map(Result::unwrap) {
        let whole = order.indices(2, 0..40);
        assert_ne!(order.indices(0, 0..40), whole);
        assert_eq!((order.indices(2, 7..19), order.indices(2, 40..40)), (whole[7..19].to_vec(), vec![]));
    }
    let note = |weights: &[f64], seed| WeightedOrder::with_replacement(weights, 2, seed).unwrap().describe();
    assert!(note(&[1.0, 2.0], 1) != note(&[1.0, 3.0], 1) && note(&[1.0, 2.0], 1) != note(&[1.0, 2.0], 2));
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(error(WeightedOrder::with_replacement(&[1.0, bad], 1, 0)).contains("at example 1"), "{bad}");
    }
    for none in [&[][..], &[0.0, 0.0], &[f64::MAX, f64::MAX]] {
        assert!(error(WeightedOrder::with_replacement(none, 1, 0)).contains("a finite sum above 0"));
    }
    let few = WeightedOrder::without_replacement(&[1.0, 0.0, 2.0], 3, 0);
    assert!(error(few).contains("len is 3, and must be at most 2"));
    assert!(WeightedOrder::without_replacement(&[1.0], 0, 0).unwrap().indices(3, 0..0).is_empty());
}

#[test]
fn ranks_share_a_weighted_epoch_and_augment_each_drawing() {
    let read = |ranks: usize, workers: usize| -> Vec<(i64, u64)> {
        let weights = [0.1, 2.0, 0.7];
        let batches: Vec<Vec<Vec<(i64, u64)>>> = (0..ranks)
            .map(|rank| {
                let order = WeightedOrder::with_replacement(&weights, 37, 9).unwrap();
                let loader = Loader::new(InMemory::new(vec![0i64, 1, 2])).batch(8).order(order).workers(workers);
                let loader = loader.rank(rank, ranks).augment(1, |x, rng| Ok((x, rng.next_u64())));
                let cut = |batch: data::Batch<Vec<_>>| batch.data[..batch.count].to_vec();
                loader.epoch(1).unwrap().map(|batch| cut(batch.unwrap())).collect()
            })
            .collect();
        (0..batches[0].len()).flat_map(|step| batches.iter().flat_map(move |own| own[step].clone())).collect()
    };
    let alone = read(1, 0);
    assert_eq!(alone.iter().map(|(_, drawn)| drawn).collect::<BTreeSet<_>>().len(), 37, "each drawing has its values");
    for ranks in [2, 3, 4, 5, 8] {
        assert_eq!(read(ranks, ranks % 3), alone, "{ranks} ranks");
    }
}
