//! Softmax of rows with NaN, or with nothing but infinities.

mod common;

use common::*;
use numcore::fused::NnOps;

const INF: f32 = f32::INFINITY;

/// Rows of 70: whole lanes and an end.
fn row(first: [f32; 3], rest: f32) -> Vec<f32> {
    first.into_iter().chain(std::iter::repeat(rest)).take(70).collect()
}

fn softmax(x: Vec<f32>) -> Vec<f32> {
    let runs = runtimes().into_iter().map(|cpu| {
        let x = T::from_vec(&cpu, x.clone()).unwrap();
        x.softmax(-1).unwrap().to_vec::<f32>().unwrap()
    });
    let runs: Vec<Vec<f32>> = runs.collect();
    let bits = |y: &[f32]| y.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect::<Vec<_>>();
    assert!(runs.iter().all(|y| bits(y) == bits(&runs[0])), "the same everywhere");
    runs.into_iter().next().unwrap()
}

#[test]
fn one_nan_makes_all_of_its_row_nan() {
    for (at, rest) in [(0, 1.0), (40, -3.0), (69, -INF), (69, INF)] {
        let mut x = row([rest; 3], rest);
        x[at] = f32::NAN;
        assert!(softmax(x).iter().all(|y| y.is_nan()), "{at} among {rest}");
    }
}

#[test]
fn infinities() {
    assert!(softmax(row([-INF; 3], -INF)).iter().all(|&y| y == 0.0));
    let y = softmax(row([2.0, -INF, 2.0], -INF));
    assert_eq!((y[0], y[1], y[2], y[69]), (0.5, 0.0, 0.5, 0.0));
    // Finite values vanish next to an infinite one, except those whose exponential is infinite, too.
    let y = softmax(row([INF, 5.0, 1000.0], -1000.0));
    assert!(y[0].is_nan() && y[1] == 0.0 && y[2].is_nan() && y[3..].iter().all(|&y| y == 0.0));
}
