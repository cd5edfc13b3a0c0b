//! Metrics are what their formulas say, and what one rank would count, at any number of ranks.

use numcore::{Result, Tensor, rng::Philox};
use runtime_cpu::Cpu;
use watch::metrics::{
    Accuracy, AreaUnderCurve, Average, Bleu, CalibrationError, ClassMetric, ConfusionMatrix, ErrorRate, IGNORED, Mean,
    MeanAveragePrecision, Metric, Perplexity, Regression, Rouge,
};

/// Numbers of few values, so that many are equal.
fn coarse(rng: &mut Philox, values: u64) -> f32 {
    (rng.next_u64() % values) as f32 - 1.0
}

fn says<T>(result: Result<T>, words: &[&str]) {
    let error = result.err().expect("an error").to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error} should say {words:?}");
}

#[test]
fn accuracy_is_that_of_a_stable_sort() {
    let mut rng = Philox::new(3, 0);
    let (rows, classes) = (200, 7);
    let scores: Vec<f32> = (0..rows * classes).map(|_| coarse(&mut rng, 5)).collect();
    let targets: Vec<i64> = (0..rows).map(|i| if i % 9 == 0 { IGNORED } else { (rng.next_u64() % 7) as i64 }).collect();
    for k in 0..=8 {
        let (mut right, mut counted) = (0, 0);
        for (row, &target) in scores.chunks(classes).zip(&targets).filter(|(_, target)| **target != IGNORED) {
            let mut order: Vec<usize> = (0..classes).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            counted += 1;
            right += u64::from(order.iter().take(k).any(|&class| class as i64 == target));
        }
        let mut accuracy = Accuracy::top(k);
        accuracy.update(&scores, classes, &targets).unwrap();
        assert_eq!((accuracy.value(), accuracy.count()), (Some(right as f64 / counted as f64), counted), "top {k}");
    }
}

#[test]
fn tensors_are_counted_as_what_they_hold() {
    let cpu = Cpu::new();
    let scores = Tensor::from_slice(&cpu, [1, 2, 3], &[0.1f32, 0.7, 0.2, 0.5, 0.3, 0.2]).unwrap();
    let targets = Tensor::from_slice(&cpu, [1, 2], &[1i64, 1]).unwrap();
    let mut accuracy = Accuracy::new();
    accuracy.update_tensors(&scores, &targets).unwrap();
    let half = numcore::ops::PointwiseOps::to_dtype(&scores, numcore::DType::BF16).unwrap();
    accuracy.update_tensors(&half, &targets).unwrap();
    assert_eq!((accuracy.value(), accuracy.count()), (Some(0.5), 4));
    let mut matrix = ConfusionMatrix::new(3).unwrap();
    matrix.update_tensors(&scores, &targets).unwrap();
    assert_eq!((matrix.of(1, 1), matrix.of(1, 0), matrix.count()), (1, 1, 2));
    says(ConfusionMatrix::new(2).unwrap().update_tensors(&scores, &targets), &["6 scores", "2 rows of 2"]);
}

#[test]
fn what_does_not_fit_is_refused_and_counts_nothing() {
    let mut accuracy = Accuracy::new();
    says(accuracy.update(&[1.0, 2.0, 3.0], 2, &[0]), &["3 scores", "1 rows of 2 classes"]);
    says(accuracy.update(&[], 0, &[]), &["0 classes"]);
    says(accuracy.update(&[1.0, 2.0, 1.0, 2.0], 2, &[0, 2]), &["class is 2, and must be in 0..2", "-100"]);
    says(accuracy.update(&[1.0, 2.0], 2, &[-1]), &["class is -1"]);
    assert_eq!(accuracy, Accuracy::new());
    let mut matrix = ConfusionMatrix::new(2).unwrap();
    says(matrix.update(&[0], &[0, 1]), &["shapes [1], [2]: each target needs one class"]);
    says(matrix.update(&[0, 2], &[0, 1]), &["class is 2"]);
    assert_eq!(matrix.count(), 0);
    says(ConfusionMatrix::new(1 << 40), &["memory to hold their square"]);
    let mut auroc = AreaUnderCurve::roc();
    says(auroc.update(&[0.0, f64::NAN], &[0, 1]), &["score is NaN", "it is score 1"]);
    says(auroc.update(&[0.0], &[2]), &["target is 2", "it is target 0"]);
    assert_eq!(auroc, AreaUnderCurve::roc());
    auroc.update(&[f64::NAN], &[IGNORED]).unwrap();
    for mut metric in [Box::new(accuracy) as Box<dyn Metric>, Box::new(matrix), Box::new(auroc), Box::new(Mean::new())]
    {
        says(metric.absorb(&[1, 2, 3]), &["the counts of another rank"]);
    }
    says(Accuracy::top(5).absorb(&Accuracy::top(1).counted()), &["the counts of another rank"]);
    says(AreaUnderCurve::roc().absorb(&9u64.to_le_bytes()), &["the counts of another rank"]);
}

#[test]
fn nothing_has_no_value() {
    let none = [
        Accuracy::new().value(),
        ConfusionMatrix::new(0).unwrap().value(),
        ClassMetric::f1(3, Average::Macro).unwrap().value(),
        AreaUnderCurve::roc().value(),
        AreaUnderCurve::precision_recall().value(),
        Mean::new().value(),
        Perplexity::new().value(),
        Regression::r2().value(),
        CalibrationError::expected(15).unwrap().value(),
        ErrorRate::words().value(),
        Bleu::new().value(),
        Rouge::longest().value(),
        MeanAveragePrecision::coco(3).value(),
    ];
    assert_eq!(none, [None; 13]);
    let mut one_class = AreaUnderCurve::roc();
    one_class.update(&[0.5, 0.7], &[1, 1]).unwrap();
    assert_eq!(one_class.value(), None);
}

/// Values that scikit-learn's `f1_score` gives for these rows.
#[test]
fn f1_follows_scikit_learn() {
    let (targets, given) = ([0, 1, 2, 0, 1, 2, IGNORED], [0, 2, 1, 0, 0, 1, 2]);
    let of = |average, classes| {
        let mut f1 = ClassMetric::f1(classes, average).unwrap();
        f1.update(&given, &targets).unwrap();
        f1.value().unwrap()
    };
    // The example of scikit-learn's documentation: per class 0.8, 0 and 0.
    assert!((of(Average::Macro, 3) - 0.8 / 3.0).abs() < 1e-15);
    assert!((of(Average::Micro, 3) - 1.0 / 3.0).abs() < 1e-15);
    assert!((of(Average::Weighted, 3) - 0.8 / 3.0).abs() < 1e-15);
    assert_eq!([of(Average::Of(0), 3), of(Average::Of(1), 3)], [0.8, 0.0]);
    // A class that never occurs is no part of a mean, and 0 by itself.
    assert_eq!(of(Average::Macro, 5), of(Average::Macro, 3));
    assert_eq!(of(Average::Of(4), 5), 0.0);
    let error = ClassMetric::f1(2, Average::Of(2)).unwrap_err().to_string();
    assert!(error.contains("there is no class 2 among 2"), "{error}");
}

#[test]
fn f1_is_the_mean_of_precision_and_recall() {
    let mut rng = Philox::new(5, 0);
    let draw = |rng: &mut Philox| (0..300).map(|_| (rng.next_u64() % 4) as i64).collect::<Vec<_>>();
    let (given, targets) = (draw(&mut rng), draw(&mut rng));
    for class in 0..4 {
        let count =
            |f: &dyn Fn(i64, i64) -> bool| given.iter().zip(&targets).filter(|(g, t)| f(**g, **t)).count() as f64;
        let right = count(&|g, t| g == class && t == class);
        let (precision, recall) = (right / count(&|g, _| g == class), right / count(&|_, t| t == class));
        let mut f1 = ClassMetric::f1(4, Average::Of(class as usize)).unwrap();
        f1.update(&given, &targets).unwrap();
        let due = 2.0 * precision * recall / (precision + recall);
        assert!((f1.value().unwrap() - due).abs() < 1e-14, "class {class}");
    }
}

/// The definition: over all pairs.
fn area_by_pairs(scores: &[f64], targets: &[i64]) -> f64 {
    let of = |class| scores.iter().zip(targets).filter(move |(_, t)| **t == class).map(|(s, _)| *s).collect::<Vec<_>>();
    let (positive, negative) = (of(1), of(0));
    let won = |p: &f64, n: &f64| if p > n { 2u64 } else { u64::from(p == n) };
    let twice: u64 = positive.iter().map(|p| negative.iter().map(|n| won(p, n)).sum::<u64>()).sum();
    twice as f64 / (2 * positive.len() * negative.len()) as f64
}

#[test]
fn the_area_is_the_share_of_pairs_in_order() {
    let mut rng = Philox::new(7, 0);
    for values in [1, 2, 3, 10, 1 << 40] {
        let scores: Vec<f64> = (0..150).map(|_| (rng.next_u64() % values) as f64 - 1.0).collect();
        let targets: Vec<i64> =
            (0..150).map(|i| if i % 11 == 0 { IGNORED } else { (rng.next_u64() % 3 / 2) as i64 }).collect();
        let mut auroc = AreaUnderCurve::roc();
        auroc.update(&scores, &targets).unwrap();
        assert_eq!(auroc.value(), Some(area_by_pairs(&scores, &targets)), "{values} values");
    }
    // The example of scikit-learn's documentation.
    let mut known = AreaUnderCurve::roc();
    known.update(&[0.1, 0.4, 0.35, 0.8], &[0, 0, 1, 1]).unwrap();
    assert_eq!(known.value(), Some(0.75));
    let mut zeros = AreaUnderCurve::roc();
    zeros.update(&[0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY], &[0, 1, 1, 0]).unwrap();
    assert_eq!(zeros.value(), Some(0.875));
}

#[test]
fn means_weigh_and_perplexity_is_of_tokens() {
    let mut mean = Mean::new();
    mean.add_weighted(2.0, 3.0);
    mean.add_weighted(f64::NAN, 0.0);
    mean.add(6.0);
    assert_eq!((mean.value(), mean.weight()), (Some(3.0), 4.0));
    let mut perplexity = Perplexity::new();
    perplexity.add_mean(50f64.ln(), 10);
    perplexity.add_sum(30.0 * 50f64.ln(), 30);
    assert!((perplexity.value().unwrap() - 50.0).abs() < 1e-12);
}

#[test]
fn errors_name_the_caller_s_line() {
    let errors = [
        Accuracy::top(1).update(&[1.0], 2, &[0]),
        AreaUnderCurve::roc().update(&[1.0], &[7]),
        ConfusionMatrix::new(usize::MAX).map(|_| ()),
        ClassMetric::f1(3, Average::Of(3)).map(|_| ()),
        watch::sink::Picture::new(2, 2, 1, vec![0]).map(|_| ()),
        watch::sink::read_jsonl("no such file").map(|_| ()),
    ];
    for (k, error) in errors.into_iter().map(Result::unwrap_err).enumerate() {
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{k}: {error}");
    }
}
