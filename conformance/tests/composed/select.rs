//! Picking by coordinates and masks, searching, distinct values, counts, suppression of boxes.

use autograd::Var;
use numcore::{
    DType,
    fused::NnOps,
    ops::{PointwiseOps, ReduceOps, SearchOps, SelectOps, SortOps, ViewOps, non_max_suppression},
    rng::Philox,
};

use crate::common::*;

fn i64s(x: &T) -> Vec<i64> {
    x.to_vec::<i64>().unwrap()
}

/// The examples of ONNX's `GatherND`.
#[test]
fn gathering_by_coordinates() {
    let x = row(&[0.0, 1.0, 2.0, 3.0]).reshape([2, 2]).unwrap();
    holds(&x.gather_nd(&ints(&[2, 2], &[0, 0, 1, 1]), 0).unwrap(), &[2], &[0.0, 3.0]);
    holds(&x.gather_nd(&ints(&[2, 1], &[1, 0]), 0).unwrap(), &[2, 2], &[2.0, 3.0, 0.0, 1.0]);
    let x = row(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]).reshape([2, 2, 2]).unwrap();
    holds(&x.gather_nd(&ints(&[2, 2], &[0, 1, 1, 0]), 0).unwrap(), &[2, 2], &[2.0, 3.0, 4.0, 5.0]);
    let deep = x.gather_nd(&ints(&[2, 1, 2], &[0, 1, 1, 0]), 0).unwrap();
    holds(&deep, &[2, 1, 2], &[2.0, 3.0, 4.0, 5.0]);
    holds(&x.gather_nd(&ints(&[2, 1], &[1, 0]), 1).unwrap(), &[2, 2], &[2.0, 3.0, 4.0, 5.0]);
    holds(&x.gather_nd(&ints(&[1, 3], &[-1, -2, 1]), 0).unwrap(), &[1], &[5.0]);
    holds(&x.gather_nd(&ints(&[3, 0], &[]), 0).unwrap(), &[3, 2, 2, 2], &x.to_f64s().unwrap().repeat(3));
    holds(&x.take(&ints(&[2, 2], &[7, 0, 3, 3])).unwrap(), &[2, 2], &[7.0, 0.0, 3.0, 3.0]);
    // Each coordinate is held to its own axis, though the flat position would be in range.
    for bad in [[0, 2, 0], [0, -3, 1], [2, 0, 0]] {
        refused(x.gather_nd(&ints(&[1, 3], &bad), 0).and_then(|t| t.to_f64s()), &["gather"]);
    }
    refused(x.gather_nd(&ints(&[2, 1], &[2, -3]), 1).and_then(|t| t.to_f64s()), &["gather"]);
}

#[test]
fn masks() {
    let x = Array::random(&[7, 5], 1);
    let mask = Array::of(&[7, 5], |at| f64::from(u8::from(x.at(at) > 0.3)));
    let truth = mask.tensor().to_dtype(DType::Bool).unwrap();
    let want: Vec<f64> = x.v.iter().copied().filter(|&v| v > 0.3).collect();
    holds(&x.tensor().masked_select(&truth).unwrap(), &[want.len()], &want);
    let seen = x.tensor().t().unwrap().contiguous().unwrap().t().unwrap();
    holds(&seen.masked_select(&truth).unwrap(), &[want.len()], &want);
    let places: Vec<i64> = (0..35i64).filter(|&k| mask.v[k as usize] != 0.0).flat_map(|k| [k / 5, k % 5]).collect();
    assert_eq!(i64s(&truth.nonzero().unwrap()), places);
    assert_eq!(i64s(&mask.tensor().nonzero().unwrap()), places);
    // A mask of rows, and one that broadcasts the values.
    let rows = T::from_slice(&cpu(), [3, 1], &[true, false, true]).unwrap();
    holds(&row(&[1.0, 2.0]).masked_select(&rows).unwrap(), &[4], &[1.0, 2.0, 1.0, 2.0]);
    let none = T::zeros(&cpu(), [2, 3], DType::Bool).unwrap();
    assert_eq!(none.nonzero().unwrap().dims(), [0, 2]);
    assert_eq!(row(&[1.0]).reshape([]).unwrap().nonzero().unwrap().dims(), [1, 0]);
    assert_eq!(x.tensor().narrow(0, 0, 2).unwrap().narrow(1, 0, 3).unwrap().masked_select(&none).unwrap().dims(), [0]);
    // ONNX's `Compress`: a shorter mask drops the rest.
    let x = row(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape([3, 2]).unwrap();
    let second = T::from_slice(&cpu(), [2], &[false, true]).unwrap();
    holds(&x.compress(&second, 0).unwrap(), &[1, 2], &[3.0, 4.0]);
    holds(&x.compress(&second, 1).unwrap(), &[3, 1], &[2.0, 4.0, 6.0]);
}

#[test]
fn what_a_mask_selects_has_a_gradient() {
    let x = Var::leaf("x", row(&[1.0, 2.0, 3.0])).unwrap();
    let mask = T::from_slice(&cpu(), [3], &[true, false, true]).unwrap();
    let y = x.masked_select(&mask).unwrap().square().unwrap().sum_all().unwrap();
    holds(y.backward().unwrap().of(&x).unwrap(), &[3], &[2.0, 0.0, 6.0]);
}

#[test]
fn searching() {
    // The examples of `torch.searchsorted` and `torch.bucketize`.
    let sorted = row(&[1.0, 3.0, 5.0, 7.0, 9.0, 2.0, 4.0, 6.0, 8.0, 10.0]).reshape([2, 5]).unwrap();
    let values = row(&[3.0, 6.0, 9.0, 3.0, 6.0, 9.0]).reshape([2, 3]).unwrap();
    assert_eq!(i64s(&sorted.searchsorted(&values, false).unwrap()), [1, 3, 4, 1, 2, 4]);
    assert_eq!(i64s(&sorted.searchsorted(&values, true).unwrap()), [2, 3, 5, 1, 3, 4]);
    let boundaries = row(&[1.0, 3.0, 5.0, 7.0, 9.0]);
    assert_eq!(i64s(&values.bucketize(&boundaries, false).unwrap()), [1, 3, 4, 1, 3, 4]);
    assert_eq!(i64s(&values.bucketize(&boundaries, true).unwrap()), [2, 3, 5, 2, 3, 5]);
    // Every length against counting.
    let mut rng = Philox::new(1, 0);
    for m in [0usize, 1, 2, 3, 7, 8, 9, 64, 65] {
        let mut sequence: Vec<f64> = (0..m).map(|_| rng.below(20) as f64).collect();
        sequence.sort_by(f64::total_cmp);
        let wanted: Vec<f64> = (-1..22).map(f64::from).chain([f64::NAN, f64::INFINITY, f64::NEG_INFINITY]).collect();
        for right in [false, true] {
            let count = |v: &f64| {
                sequence
                    .iter()
                    .filter(|s| {
                        if v.is_nan() {
                            true
                        } else if right {
                            *s <= v
                        } else {
                            *s < v
                        }
                    })
                    .count()
            };
            let want: Vec<i64> = wanted.iter().map(|v| count(v) as i64).collect();
            assert_eq!(i64s(&row(&sequence).searchsorted(&row(&wanted), right).unwrap()), want, "{m} {right}");
        }
    }
    assert_eq!(i64s(&ints(&[3], &[1, 5, 9]).searchsorted(&ints(&[2], &[5, 6]), false).unwrap()), [1, 2]);
}

/// NaN is the largest value of a sequence, as it is of the values.
#[test]
fn searching_among_nan() {
    let nan = f64::NAN;
    for m in 0..5 {
        for at_end in 0..4 {
            let finite = (0..m).map(f64::from);
            let sequence: Vec<f64> = finite.chain(std::iter::repeat_n(nan, at_end)).collect();
            let wanted = [-1.0, 0.0, 0.5, 1.0, 3.0, 4.0, f64::INFINITY, nan];
            let below = |a: f64, b: f64| a < b || b.is_nan() && !a.is_nan();
            for right in [false, true] {
                let count =
                    |v: f64| sequence.iter().filter(|&&s| if right { !below(v, s) } else { below(s, v) }).count();
                let want: Vec<i64> = wanted.iter().map(|&v| count(v) as i64).collect();
                let got = row(&sequence).searchsorted(&row(&wanted), right).unwrap();
                assert_eq!(i64s(&got), want, "{sequence:?} {right}");
                assert_eq!(i64s(&row(&wanted).bucketize(&row(&sequence), right).unwrap()), want);
            }
        }
    }
}

#[test]
fn smallest_elements() {
    let (values, at) = row(&[3.0, f64::NAN, -1.0, 2.0, -1.0]).topk_smallest(3, 0).unwrap();
    holds(&values, &[3], &[-1.0, -1.0, 2.0]);
    assert_eq!(i64s(&at), [2, 4, 3]);
    refused(row(&[1.0]).topk_smallest(2, 0), &["topk_smallest", "[1]", "fewer than 2"]);
}

/// The mask says what stayed, and the gradient passes there.
#[test]
fn a_mask_of_dropout() {
    let x = T::ones(&cpu(), [1000], DType::F32).unwrap();
    let (y, mask) = x.dropout_with_mask(0.25, 9).unwrap();
    let want: Vec<f32> = mask.to_vec::<bool>().unwrap().iter().map(|&m| if m { 1.0 / 0.75 } else { 0.0 }).collect();
    assert_eq!(y.to_vec::<f32>().unwrap(), want);
    refused(x.dropout_with_mask(1.5, 9), &["dropout", "1.5"]);
}

#[test]
fn distinct_values() {
    // The examples of `torch.unique`.
    let u = ints(&[2, 2], &[1, 3, 2, 3]).unique().unwrap();
    assert_eq!((i64s(&u.values), i64s(&u.inverse)), (vec![1, 2, 3], vec![0, 2, 1, 2]));
    assert_eq!((i64s(&u.counts), i64s(&u.first), u.inverse.dims()), (vec![1, 1, 2], vec![0, 2, 1], &[2usize, 2][..]));
    let mut rng = Philox::new(2, 0);
    let values: Vec<f64> = (0..200).map(|_| rng.below(23) as f64 - 9.5).collect();
    let u = row(&values).unique().unwrap();
    let mut want = values.clone();
    want.sort_by(f64::total_cmp);
    want.dedup();
    holds(&u.values, &[want.len()], &want);
    for (i, (&g, v)) in i64s(&u.inverse).iter().zip(&values).enumerate() {
        assert_eq!(want[g as usize], *v, "{i}");
    }
    let counts: Vec<i64> = want.iter().map(|w| values.iter().filter(|v| *v == w).count() as i64).collect();
    let first: Vec<i64> = want.iter().map(|w| values.iter().position(|v| v == w).unwrap() as i64).collect();
    assert_eq!((i64s(&u.counts), i64s(&u.first)), (counts, first));
    let nan = row(&[f64::NAN, 1.0, f64::NAN]).unique().unwrap();
    assert_eq!(i64s(&nan.counts), [1, 1, 1]);
    assert_eq!(row(&[]).unique().unwrap().values.dims(), [0]);
    assert_eq!(row(&[4.0]).unique().unwrap().values.to_f64s().unwrap(), [4.0]);
    let truth = T::from_slice(&cpu(), [3], &[true, false, true]).unwrap().unique().unwrap();
    assert_eq!(truth.values.to_vec::<bool>().unwrap(), [false, true]);
}

#[test]
fn distinct_slices() {
    let x = ints(&[4, 2], &[2, 1, 0, 5, 2, 1, 0, 4]);
    let u = x.unique_along(0).unwrap();
    assert_eq!((u.values.dims(), i64s(&u.values)), (&[3usize, 2][..], vec![0, 4, 0, 5, 2, 1]));
    assert_eq!((i64s(&u.inverse), i64s(&u.counts), i64s(&u.first)), (vec![2, 1, 2, 0], vec![1, 1, 2], vec![3, 1, 0]));
    let columns = x.t().unwrap().unique_along(1).unwrap();
    assert_eq!(i64s(&columns.values.t().unwrap()), vec![0, 4, 0, 5, 2, 1]);
}

#[test]
fn counts_of_numbers() {
    let x = ints(&[2, 3], &[1, 4, 1, 0, 4, 4]);
    assert_eq!(i64s(&x.bincount(None, 0).unwrap()), [1, 2, 0, 0, 3]);
    assert_eq!(i64s(&x.to_dtype(DType::U8).unwrap().bincount(None, 7).unwrap()), [1, 2, 0, 0, 3, 0, 0]);
    let weights = row(&[0.5, 1.0, 0.25, 2.0, 3.0, 4.0]).reshape([2, 3]).unwrap();
    holds(&x.bincount(Some(&weights), 0).unwrap(), &[5], &[2.0, 0.75, 0.0, 0.0, 8.0]);
    assert_eq!(ints(&[0], &[]).bincount(None, 2).unwrap().to_f64s().unwrap(), [0.0, 0.0]);
    refused(ints(&[1], &[-2]).bincount(None, 0), &["bincount", "-2"]);
    refused(row(&[1.0]).bincount(None, 0), &["bincount", "f64"]);
}

/// The boxes of ONNX's `NonMaxSuppression`: two groups that overlap, and one apart.
#[test]
fn suppression() {
    let boxes = [
        [0.0, 0.0, 1.0, 1.0],
        [0.0, 0.1, 1.0, 1.1],
        [0.0, -0.1, 1.0, 0.9],
        [0.0, 10.0, 1.0, 11.0],
        [0.0, 10.1, 1.0, 11.1],
        [0.0, 100.0, 1.0, 101.0],
    ];
    let boxes = row(boxes.as_flattened()).reshape([6, 4]).unwrap();
    let scores = row(&[0.9, 0.75, 0.6, 0.95, 0.5, 0.3]);
    assert_eq!(i64s(&non_max_suppression(&boxes, &scores, 0.5).unwrap()), [3, 0, 5]);
    assert_eq!(i64s(&non_max_suppression(&boxes, &scores, 0.9).unwrap()), [3, 0, 1, 2, 4, 5]);
    let equal = row(&[0.5; 6]);
    assert_eq!(i64s(&non_max_suppression(&boxes, &equal, 0.5).unwrap()), [0, 3, 5]);
    let none = T::zeros(&cpu(), [0, 4], DType::F64).unwrap();
    assert_eq!(non_max_suppression(&none, &row(&[]), 0.5).unwrap().dims(), [0]);
    refused(non_max_suppression(&boxes, &row(&[1.0]), 0.5), &["nms", "[6, 4]", "[1]"]);
}
