//! Layers that differ between training and evaluation.

use autograd::{Var, manual_seed};
use nn::*;
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};

use super::{init, message, same, uniform};
use crate::common::{V, close, cpu, f64s};

/// After one batch the running statistics have moved by the momentum towards the batch's mean and unbiased variance.
#[test]
fn batch_norm_tracks_statistics() {
    let norm = BatchNorm1d::new(&init(), 3).unwrap();
    let x = uniform(&[5, 3, 2], 4);
    let y = norm.forward(&x).unwrap();
    let by_channel = |x: &V| x.transpose(0, 1).unwrap().reshape([3, 10]).unwrap();
    let (mean, var) = (by_channel(&x).mean(&[1]).unwrap(), by_channel(&x).var(&[1], 1).unwrap());
    same(&norm.running_mean.var(), &mean.mul(0.1).unwrap());
    same(&norm.running_var.var(), &var.mul(0.1).unwrap().add(0.9).unwrap());
    assert_eq!(norm.num_batches_tracked.value().to_vec::<i64>().unwrap(), [1]);
    let out = by_channel(&y);
    assert!(f64s(&out.mean(&[1]).unwrap()).iter().all(|m| m.abs() < 1e-6), "what comes out has mean 0");
    let before = f64s(&norm.running_mean.var());
    norm.eval();
    norm.forward(&x).unwrap();
    assert_eq!(f64s(&norm.running_mean.var()), before, "in use it tracks nothing");
    norm.train();
    assert!(message(norm.forward(&uniform(&[1, 3], 0))).contains("one value per channel"));
}

/// Rows that fill a batch up have no part in its statistics, and one row that counts has none to give.
#[test]
fn batch_norm_counts_the_rows_that_count() {
    let x = uniform(&[8, 3], 4);
    for (count, own) in [(3, 6), (2, 4), (1, 2)] {
        let [counted, alone] = [0; 2].map(|_| BatchNorm1d::new(&init(), 3).unwrap());
        let before = set_counted_rows(Some(CountedRows { count, rows: 4 }));
        let y = counted.forward(&x);
        set_counted_rows(before);
        same(&y.unwrap().narrow(0, 0, own).unwrap(), &alone.forward(&x.narrow(0, 0, own).unwrap()).unwrap());
        same(&counted.running_var.var(), &alone.running_var.var());
    }
    let norm = BatchNorm1d::new(&init(), 3).unwrap();
    for count in [0, 1] {
        let before = set_counted_rows(Some(CountedRows { count, rows: 8 }));
        let y = norm.forward(&x);
        set_counted_rows(before);
        norm.eval();
        same(&y.unwrap(), &norm.forward(&x).unwrap());
        norm.train();
    }
    assert_eq!(norm.num_batches_tracked.value().to_vec::<i64>().unwrap(), [0]);
}

#[test]
fn dropout_drops_scales_and_repeats() {
    let dropout = Dropout::new(0.3).unwrap();
    let x = Var::leaf("x", Tensor::ones(&cpu(), [100_000], DType::F32).unwrap()).unwrap();
    let draw = || {
        let y = dropout.forward(&x).unwrap();
        let gradients = y.sum_all().unwrap().backward().unwrap();
        (f64s(&y), gradients.of(&x).unwrap().to_f64s().unwrap())
    };
    manual_seed(5);
    let (y, slope) = draw();
    let dropped = y.iter().filter(|&&v| v == 0.0).count() as f64 / 1e5;
    assert!((dropped - 0.3).abs() < 5.0 * (0.21f64 / 1e5).sqrt(), "{dropped}");
    assert!(y.iter().all(|&v| v == 0.0 || (v - 1.0 / 0.7).abs() < 1e-6));
    assert_eq!(y, slope, "the gradient passes where the value did");
    assert_ne!(draw().0, y, "each call draws anew");
    manual_seed(5);
    assert_eq!(draw().0, y, "the same seed gives the same mask");
    dropout.mode.set_training(false);
    assert!(draw().0.iter().all(|&v| v == 1.0));
}

/// The sum of a weight and its offset is not rounded in half precision, as in Gemma.
#[test]
fn an_offset_of_a_norms_weight_keeps_digits() {
    let norm = RmsNorm { eps: Some(1e-6), ..RmsNorm::with_offset(&init().dtype(DType::BF16), 6, 1.0).unwrap() };
    assert_eq!(norm.weight.value().unwrap().to_f64s().unwrap(), [0.0; 6]);
    let weights = [0.001, -0.003, 0.01, 0.0, 0.25, -0.0078125];
    norm.weight.set(Tensor::from_slice(&cpu(), [6], &weights).unwrap().to_dtype(DType::BF16).unwrap()).unwrap();
    let weights = norm.weight.value().unwrap().to_f64s().unwrap();
    let x = Var::new(uniform(&[3, 6], 4).value().unwrap().to_dtype(DType::BF16).unwrap());
    let values = x.value().unwrap().to_f64s().unwrap();
    let due: Vec<f64> = values
        .chunks(6)
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / 6.0;
            row.iter().zip(&weights).map(move |(x, w)| x / (mean + 1e-6).sqrt() * (1.0 + w)).collect::<Vec<_>>()
        })
        .collect();
    let due = Tensor::from_slice(&cpu(), [3, 6], &due).unwrap().to_dtype(DType::BF16).unwrap();
    close("norm", &norm.forward(&x).unwrap().value().unwrap(), &due, 0.0);
}
