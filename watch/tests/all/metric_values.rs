//! Metrics are those of scikit-learn, sacreBLEU, rouge-score, jiwer and pycocotools, and those of one rank on many.

use std::{array, collections::BTreeMap};

use comm::{NoOpCommunicator, Ranks};
use numcore::{NullRuntime, Result, rng::Philox};
use runtime_cpu::Cpu;
use serde_json::Value;
use watch::metrics::{
    Accuracy, AreaUnderCurve, Average, Bleu, CalibrationError, ClassMetric, Detection, ErrorRate, Mean,
    MeanAveragePrecision, Metric, Regression, Rouge, over_ranks,
};

/// Series `k` of the references' script.
fn series(k: u64, n: u64) -> impl Iterator<Item = u64> {
    (0..n).map(move |i| (37 * i * i + 101 * i + 13 * k + 7) % 97)
}

fn classes(k: u64, of: u64) -> Vec<i64> {
    series(k, 60).map(|x| (x % of) as i64).collect()
}

fn shares(k: u64) -> Vec<f64> {
    series(k, 40).map(|x| x as f64 / 97.0).collect()
}

type Box4 = [f64; 4];

fn boxes(k: u64) -> Vec<Box4> {
    let [x, y, w, h]: [Vec<u64>; 4] = array::from_fn(|j| series(k + j as u64, 5).collect());
    let corner = |at: u64, size: u64| (at % 40) as f64 + 10.0 + (size % 20) as f64;
    (0..5).map(|i| [(x[i] % 40) as f64, (y[i] % 40) as f64, corner(x[i], w[i]), corner(y[i], h[i])]).collect()
}

/// The boxes found in an image, and its objects.
fn image(image: u64) -> (Vec<Detection>, Vec<(Box4, i64)>) {
    let objects: Vec<(Box4, i64)> = boxes(10 * image).into_iter().zip((0..3).cycle()).collect();
    let (moved, scores) = (series(image, 5), series(image + 3, 5));
    let mut found = Vec::new();
    for (j, ((&([x1, y1, x2, y2], class), moved), score)) in objects.iter().zip(moved).zip(scores).enumerate() {
        let (moved, score) = ((moved % 5) as f64, (score % 8) as f64 / 8.0);
        found.push(Detection { corners: [x1 + moved, y1, x2 + moved, y2], class, score });
        if j % 2 == 0 {
            found.push(Detection { corners: [x1, y1 + 2.0, x2, y2 + 2.0], class, score });
        }
    }
    (found, objects)
}

fn with<M: Metric>(mut metric: M, update: impl FnOnce(&mut M)) -> f64 {
    update(&mut metric);
    metric.value().expect("a value")
}

#[test]
fn metrics_are_those_of_others() {
    let references: Value = serde_json::from_str(include_str!("metrics.json")).unwrap();
    let mut found = BTreeMap::new();
    let (given, right) = (classes(1, 5), classes(2, 4));
    let averages = [("macro", Average::Macro), ("weighted", Average::Weighted), ("micro", Average::Micro)];
    let class = |metric: Result<ClassMetric>| with(metric.unwrap(), |m| m.update(&given, &right).unwrap());
    for (name, average) in averages {
        found.insert(format!("precision_{name}"), class(ClassMetric::precision(6, average)));
        found.insert(format!("recall_{name}"), class(ClassMetric::recall(6, average)));
        found.insert(format!("f2_{name}"), class(ClassMetric::f_beta(2.0, 6, average)));
        found.insert(format!("iou_{name}"), class(ClassMetric::iou(6, average)));
    }
    found.insert("precision_of_1".into(), class(ClassMetric::precision(6, Average::Of(1))));
    found.insert("iou_of_4".into(), class(ClassMetric::iou(6, Average::Of(4))));
    let numbers = |metric| with(metric, |m: &mut Regression| m.update(&shares(3), &shares(4)).unwrap());
    found.insert("mae".into(), numbers(Regression::mae()));
    found.insert("mse".into(), numbers(Regression::mse()));
    found.insert("rmse".into(), numbers(Regression::rmse()));
    found.insert("r2".into(), numbers(Regression::r2()));
    let scores: Vec<f64> = series(5, 80).map(|x| (x % 20) as f64 / 20.0).collect();
    let binary: Vec<i64> = series(6, 80).map(|x| i64::from(x % 3 == 0)).collect();
    let area = |metric| with(metric, |m: &mut AreaUnderCurve| m.update(&scores, &binary).unwrap());
    found.insert("roc".into(), area(AreaUnderCurve::roc()));
    found.insert("average_precision".into(), area(AreaUnderCurve::precision_recall()));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let texts: Vec<(String, Vec<String>)> = references["texts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (text(&one["given"]), one["references"].as_array().unwrap().iter().map(text).collect()))
        .collect();
    let rate = |metric| with(metric, |m: &mut ErrorRate| texts.iter().for_each(|(g, r)| m.update(g, &r[0])));
    found.insert("wer".into(), rate(ErrorRate::words()));
    found.insert("cer".into(), rate(ErrorRate::characters()));
    let bleu = |texts: &[(String, Vec<String>)]| {
        let update =
            |m: &mut Bleu, (given, r): &(String, Vec<String>)| m.update(given, &Vec::from_iter(r.iter().map(|r| &**r)));
        with(Bleu::new(), |m| texts.iter().for_each(|one| update(m, one)))
    };
    found.insert("bleu".into(), bleu(&texts));
    found.insert("bleu_first".into(), bleu(&texts[..1]));
    let second = (texts[1].0.clone(), texts[1].1[..1].to_vec());
    found.insert("bleu_smoothed".into(), bleu(&[second]));
    let ascii = || texts.iter().filter(|(given, _)| given.is_ascii());
    let rouge = |metric| with(metric, |m: &mut Rouge| ascii().for_each(|(g, r)| m.update(g, &r[0])));
    found.insert("rouge1".into(), rouge(Rouge::of_grams(1)));
    found.insert("rouge2".into(), rouge(Rouge::of_grams(2)));
    found.insert("rougeL".into(), rouge(Rouge::longest()));
    let detect = |metric| {
        let count = |m: &mut MeanAveragePrecision, k| m.update(k, &image(k).0, &image(k).1).unwrap();
        with(metric, |m| (0..6).for_each(|k| count(m, k)))
    };
    found.insert("map".into(), detect(MeanAveragePrecision::coco(3)));
    found.insert("map_50".into(), detect(MeanAveragePrecision::at(0.5, 3).unwrap()));
    found.insert("map_75".into(), detect(MeanAveragePrecision::at(0.75, 3).unwrap()));
    let values = references["values"].as_object().unwrap();
    assert_eq!(found.len(), values.len());
    for (name, due) in values {
        assert!((found[name] - due.as_f64().unwrap()).abs() < 1e-14, "{name}: {} and not {due}", found[name]);
    }
}

#[test]
fn a_determination_does_not_depend_on_the_distance_from_zero() {
    let of = |shift: f64| {
        let (given, right) =
            (series(3, 40).map(|x| x as f64 / 64.0 + shift), series(4, 40).map(|x| x as f64 / 64.0 + shift));
        with(Regression::r2(), |m| m.update(&Vec::from_iter(given), &Vec::from_iter(right)).unwrap())
    };
    assert!((of(1e9) - of(0.0)).abs() < 1e-15);
    assert_eq!(of((1u64 << 40) as f64), of((1u64 << 41) as f64));
    let mut constant = Regression::r2();
    constant.update(&[1.0, 2.0], &[0.1, 0.1]).unwrap();
    assert_eq!(constant.value(), None);
}

/// By the definition, over the rows of each bin.
#[test]
fn calibration_is_the_distance_of_confidence_and_accuracy() {
    // Confidences of two classes: 0.75 right, 0.75 wrong, 1 right, 0.5 (the first of equal ones) wrong.
    let rows = [0.75, 0.25, 0.25, 0.75, 0.0, 1.0, 0.5, 0.5];
    let of = |mut metric: CalibrationError| {
        metric.update(&rows, 2, &[0, 0, 1, 1]).unwrap();
        metric.value()
    };
    // Two bins: all rows are in the second. Their mean confidence is 0.75, their accuracy 0.5.
    assert_eq!(of(CalibrationError::expected(2).unwrap()), Some(0.25));
    // Four: {0.5}, {0.75, 0.75, 1}: gaps 0.5 and 2.5/3 - 2/3.
    assert_eq!(of(CalibrationError::expected(4).unwrap()), Some((0.5 + 0.5) / 4.0));
    assert_eq!(of(CalibrationError::worst(4).unwrap()), Some(0.5));
    let error = CalibrationError::expected(4).unwrap().update(&[2.0, -1.0], 2, &[0]).unwrap_err().to_string();
    assert!(error.contains("apply softmax"), "{error}");
    assert!(CalibrationError::expected(0).is_err());
}

#[test]
fn boxes_of_the_wrong_form_are_refused_and_count_nothing() {
    let good = [0.0, 0.0, 1.0, 1.0];
    let one = |corners, class, score| [Detection { corners, class, score }];
    let mut metric = MeanAveragePrecision::coco(2);
    for (found, objects) in [
        (one([1.0, 0.0, 0.0, 1.0], 0, 0.5), vec![(good, 0)]),
        (one(good, 2, 0.5), vec![(good, 0)]),
        (one(good, 0, f64::NAN), vec![(good, 0)]),
        (one(good, 0, 0.5), vec![(good, 0), ([0.0, f64::NAN, 1.0, 1.0], 1)]),
    ] {
        metric.update(3, &found, &objects).unwrap_err();
    }
    assert_eq!(metric, MeanAveragePrecision::coco(2));
    // An object without an area is never found, and a box in an image without objects is wrong.
    metric.update(0, &one([0.0; 4], 0, 0.5), &[([0.0; 4], 0)]).unwrap();
    metric.update(1, &one(good, 0, 0.5), &[]).unwrap();
    assert_eq!(metric.value(), Some(0.0));
}

/// One metric of each kind.
#[derive(Clone)]
struct All {
    accuracy: Accuracy,
    f1: ClassMetric,
    area: AreaUnderCurve,
    mean: Mean,
    r2: Regression,
    calibration: CalibrationError,
    errors: ErrorRate,
    bleu: Bleu,
    rouge: Rouge,
    boxes: MeanAveragePrecision,
}

/// Calls a function with each metric.
macro_rules! each {
    ($all:expr, $f:expr) => {{
        let all = $all;
        All {
            accuracy: $f(&all.accuracy)?,
            f1: $f(&all.f1)?,
            area: $f(&all.area)?,
            mean: $f(&all.mean)?,
            r2: $f(&all.r2)?,
            calibration: $f(&all.calibration)?,
            errors: $f(&all.errors)?,
            bleu: $f(&all.bleu)?,
            rouge: $f(&all.rouge)?,
            boxes: $f(&all.boxes)?,
        }
    }};
}

impl All {
    fn bits(&self) -> [u64; 10] {
        let all: [&dyn Metric; 10] = [
            &self.accuracy,
            &self.f1,
            &self.area,
            &self.mean,
            &self.r2,
            &self.calibration,
            &self.errors,
            &self.bleu,
            &self.rouge,
            &self.boxes,
        ];
        all.map(|metric| metric.value().expect("a value").to_bits())
    }
}

/// The counts of a rank's share of 97 examples.
fn counted(rank: usize, ranks: usize) -> Result<All> {
    let mut rng = Philox::new(11, 0);
    let mut all = All {
        accuracy: Accuracy::top(2),
        f1: ClassMetric::f1(3, Average::Macro)?,
        area: AreaUnderCurve::precision_recall(),
        mean: Mean::new(),
        r2: Regression::r2(),
        calibration: CalibrationError::expected(5)?,
        errors: ErrorRate::characters(),
        bleu: Bleu::new(),
        rouge: Rouge::of_grams(1),
        boxes: MeanAveragePrecision::coco(3),
    };
    for example in 0..97 {
        let scores: Vec<f32> = (0..3).map(|_| (rng.next_u64() % 4) as f32 / 4.0).collect();
        let (target, given) = ((rng.next_u64() % 3) as i64, (rng.next_u64() % 3) as i64);
        // Terms of all sizes: their sum in f64 depends on the order.
        let loss = f64::from_bits(rng.next_u64() >> 1).min(1e300);
        let loss = if loss.is_finite() { loss } else { 1.0 };
        let mut text = || (0..9).map(|_| ["a ", "b ", "cd "][(rng.next_u64() % 3) as usize]).collect::<String>();
        let (text, reference) = (text(), text());
        if example % ranks as u64 != rank as u64 {
            continue;
        }
        all.accuracy.update(&scores, 3, &[target])?;
        all.f1.update(&[given], &[target])?;
        all.area.update(&[f64::from(scores[0])], &[target.min(1)])?;
        all.mean.add(loss);
        all.r2.update(&[f64::from(scores[0]) / 3.0], &[f64::from(scores[1]) / 7.0])?;
        all.calibration.update(&scores, 3, &[target])?;
        all.errors.update(&text, &reference);
        all.bleu.update(&text, &[&reference]);
        all.rouge.update(&text, &reference);
        let (found, objects) = image(example);
        all.boxes.update(example, &found, &objects)?;
    }
    Ok(all)
}

#[test]
fn many_ranks_count_the_bits_of_one() {
    let one = counted(0, 1).unwrap();
    for ranks in 1..=8 {
        let found = Ranks::new(ranks).run(
            |_| Ok(Cpu::with_threads(1)),
            |comm| {
                let own = counted(comm.rank(), ranks)?;
                Ok(each!(&own, |metric| over_ranks(metric, &comm)).bits())
            },
        );
        assert_eq!(found.unwrap(), vec![one.bits(); ranks], "{ranks} ranks");
    }
    // A world of one, without an engine; and metrics of other options, which are refused or reset.
    let alone = |all: &All| {
        Ok::<_, numcore::Error>(each!(all, |metric| over_ranks(metric, &NoOpCommunicator::new(&NullRuntime::new()))))
    };
    assert_eq!(alone(&one).unwrap().bits(), one.bits());
    let mut other = CalibrationError::expected(6).unwrap();
    assert!(other.absorb(&one.calibration.counted()).is_err() && Bleu::new().absorb(&[0; 8]).is_err());
    assert!(Regression::r2().absorb(&one.f1.counted()).is_err() && ErrorRate::words().absorb(&[]).is_err());
}
