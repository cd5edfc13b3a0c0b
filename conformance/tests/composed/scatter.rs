//! Scattering: replacement and every reduction against loops, equal indices, ties, NaN, zeros, dtypes and views.

use autograd::Var;
use numcore::{
    DType,
    ops::{
        PointwiseOps, ReduceOps, ScatterOps,
        ScatterReduction::{self, *},
        ViewOps,
    },
    rng::Philox,
};

use crate::common::*;

/// The result at each position of `x: [R, N]`, from `index: [r, n]` and `src`, by definition.
fn reduced(x: &Array, index: &[Vec<usize>], src: &Array, how: Option<ScatterReduction>, own: bool) -> Array {
    let mut named: Vec<Vec<f64>> = vec![Vec::new(); x.v.len()];
    for (r, row) in index.iter().enumerate() {
        row.iter().enumerate().for_each(|(i, &to)| named[r * x.shape[1] + to].push(src.at(&[r, i])));
    }
    let place = |(&x, values): (&f64, Vec<f64>)| {
        let Some(&last) = values.last() else { return x };
        let Some(how) = how else { return last };
        let all: Vec<f64> = own.then_some(x).into_iter().chain(values).collect();
        match how {
            Sum => all.iter().sum(),
            Prod => all.iter().product(),
            Mean => all.iter().sum::<f64>() / all.len() as f64,
            Amax => all.iter().copied().fold(f64::NEG_INFINITY, |a, b| if b > a || b.is_nan() { b } else { a }),
            Amin => all.iter().copied().fold(f64::INFINITY, |a, b| if b < a || b.is_nan() { b } else { a }),
        }
    };
    Array { shape: x.shape.clone(), v: x.v.iter().zip(named).map(place).collect() }
}

#[test]
fn every_reduction() {
    let mut rng = Philox::new(3, 0);
    for (rows, n, named, count) in [(3, 5, 2, 9), (1, 4, 1, 1), (2, 1, 2, 33), (2, 300, 2, 500), (4, 6, 4, 0)] {
        let x = Array::random(&[rows, n], 1);
        let src = Array::random(&[rows, count + 1], 2);
        let index: Vec<Vec<usize>> =
            (0..named).map(|_| (0..count).map(|_| rng.below(n as u64) as usize).collect()).collect();
        let flat: Vec<i64> = index.iter().flatten().map(|&i| i as i64).collect();
        let at = ints(&[named, count], &flat);
        let replaced = x.tensor().scatter(1, &at, &src.tensor()).unwrap();
        reduced(&x, &index, &src, None, false).is("scatter", &replaced, 0.0);
        for how in [Sum, Prod, Mean, Amax, Amin] {
            for own in [true, false] {
                let want = reduced(&x, &index, &src, Some(how), own);
                let got = x.tensor().scatter_reduce(1, &at, &src.tensor(), how, own).unwrap();
                want.is(&format!("{how:?} {own} {rows} {n} {count}"), &got, 1e-12);
                // Along the other axis, of views.
                let got = x.tensor().t().unwrap();
                let got = got.scatter_reduce(0, &at.t().unwrap(), &src.tensor().t().unwrap(), how, own).unwrap();
                want.is("transposed", &got.t().unwrap(), 1e-12);
            }
        }
    }
}

/// The example of `torch.Tensor.scatter_reduce_`.
#[test]
fn documented_example() {
    let src = row(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let (index, input) = (ints(&[6], &[0, 1, 0, 1, 2, 1]), row(&[1.0, 2.0, 3.0, 4.0]));
    let run = |how, own| input.scatter_reduce(0, &index, &src, how, own).unwrap();
    holds(&run(Sum, true), &[4], &[5.0, 14.0, 8.0, 4.0]);
    holds(&run(Sum, false), &[4], &[4.0, 12.0, 5.0, 4.0]);
    holds(
        &row(&[5.0, 4.0, 3.0, 2.0]).scatter_reduce(0, &index, &src, Amax, true).unwrap(),
        &[4],
        &[5.0, 6.0, 5.0, 2.0],
    );
    holds(
        &row(&[5.0, 4.0, 3.0, 2.0]).scatter_reduce(0, &index, &src, Amax, false).unwrap(),
        &[4],
        &[3.0, 6.0, 5.0, 2.0],
    );
}

#[test]
fn signs_of_zero_and_every_type_are_kept() {
    let minus = row(&[1.0, 1.0]).scatter(0, &ints(&[1], &[1]), &row(&[-0.0])).unwrap().to_f64s().unwrap();
    assert!(minus[1] == 0.0 && minus[1].is_sign_negative());
    let (index, values) = (ints(&[4], &[2, 0, 2, 1]), row(&[3.0, 1.0, 0.0, 2.0]));
    for dtype in NUMBERS {
        let (x, src) = (row(&[5.0, 6.0, 7.0, 8.0]).to_dtype(dtype).unwrap(), values.to_dtype(dtype).unwrap());
        holds(&x.scatter(0, &index, &src).unwrap(), &[4], &[1.0, 2.0, 0.0, 8.0]);
        let run = |how| x.scatter_reduce(0, &index, &src, how, false).unwrap();
        holds(&run(Amax), &[4], &[1.0, 2.0, 3.0, 8.0]);
        holds(&run(Amin), &[4], &[1.0, 2.0, 0.0, 8.0]);
        holds(&run(Prod), &[4], &[1.0, 2.0, 0.0, 8.0]);
        holds(&run(Sum), &[4], &[1.0, 2.0, 3.0, 8.0]);
        holds(&x.scatter_value(0, &index, 4.0).unwrap(), &[4], &[4.0, 4.0, 4.0, 8.0]);
        holds(
            &x.index_copy(0, &ints(&[2], &[3, 0]), &src.narrow(0, 0, 2).unwrap()).unwrap(),
            &[4],
            &[1.0, 6.0, 7.0, 3.0],
        );
        holds(&x.index_fill(0, &ints(&[2], &[3, 0]), 2.0).unwrap(), &[4], &[2.0, 6.0, 7.0, 2.0]);
    }
    let truth = T::from_slice(&cpu(), [3], &[true, false, true]).unwrap();
    let set = truth.scatter(0, &ints(&[2], &[0, 1]), &T::from_slice(&cpu(), [2], &[false, true]).unwrap()).unwrap();
    assert_eq!(set.to_vec::<bool>().unwrap(), [false, true, true]);
}

#[test]
fn nan_and_infinities_win() {
    let index = ints(&[4], &[0, 0, 1, 1]);
    let src = row(&[1.0, f64::NAN, f64::INFINITY, 2.0]);
    for how in [Amax, Amin] {
        let y = row(&[0.0, 0.0]).scatter_reduce(0, &index, &src, how, true).unwrap().to_f64s().unwrap();
        assert!(y[0].is_nan(), "{y:?}");
        assert_eq!(y[1], if how == Amax { f64::INFINITY } else { 0.0 });
    }
}

/// Values that tie share the gradient evenly, `self` among them, as in PyTorch.
#[test]
fn ties_share() {
    let x = Var::leaf("x", row(&[3.0, 3.0, 9.0])).unwrap();
    let src = Var::leaf("src", row(&[3.0, 3.0, 1.0, 2.0, 9.0, 9.0, 9.0])).unwrap();
    let index = Var::new(ints(&[7], &[0, 0, 0, 1, 2, 2, 2]));
    for (own, of_x, of_src) in [
        (true, [1.0 / 3.0, 1.0, 0.25], [1.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 0.25, 0.25, 0.25]),
        (false, [0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 1.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0]),
    ] {
        let y = x.scatter_reduce(0, &index, &src, Amax, own).unwrap();
        let g = y.sum_all().unwrap().backward().unwrap();
        holds(g.of(&x).unwrap(), &[3], &of_x);
        holds(g.of(&src).unwrap(), &[7], &of_src);
    }
}

/// A repeated value, as a bias over a batch: strides of 0 in every operand.
#[test]
fn repeated_operands() {
    let x = row(&[1.0]).broadcast_to([2, 3]).unwrap();
    let src = row(&[5.0]).broadcast_to([2, 2]).unwrap();
    let index = ints(&[2], &[2, 2]).broadcast_to([2, 2]).unwrap();
    holds(&x.scatter(1, &index, &src).unwrap(), &[2, 3], &[1.0, 1.0, 5.0, 1.0, 1.0, 5.0]);
    for (how, want) in [(Sum, 11.0), (Prod, 25.0), (Mean, 11.0 / 3.0), (Amax, 5.0), (Amin, 1.0)] {
        let y = x.scatter_reduce(1, &index, &src, how, true).unwrap();
        holds(&y, &[2, 3], &[1.0, 1.0, want, 1.0, 1.0, want]);
    }
}

/// A half-precision mean is not rounded before the division: 2048 + 1 is not an `f16` value.
#[test]
fn means_of_halves() {
    let x = row(&[0.0]).to_dtype(DType::F16).unwrap();
    let src = row(&[2048.0, 1.0, 1.0]).to_dtype(DType::F16).unwrap();
    let y = x.scatter_reduce(0, &ints(&[3], &[0, 0, 0]), &src, Mean, false).unwrap();
    assert_eq!(y.to_f64s().unwrap(), [683.5]);
}

/// The first example of ONNX's `ScatterND`, rows, reductions, and coordinates that are out of range one by one.
#[test]
fn by_coordinates() {
    let x = row(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let y = x.scatter_nd(&ints(&[4, 1], &[4, 3, 1, -1]), &row(&[9.0, 10.0, 11.0, 12.0])).unwrap();
    holds(&y, &[8], &[1.0, 11.0, 3.0, 10.0, 9.0, 6.0, 7.0, 12.0]);
    let grid = x.reshape([2, 2, 2]).unwrap();
    let (at, src) =
        (ints(&[3, 2], &[0, 1, 1, 0, 0, 1]), row(&[10.0, 20.0, 30.0, 40.0, 0.5, 60.0]).reshape([3, 2]).unwrap());
    holds(&grid.scatter_nd(&at, &src).unwrap(), &[2, 2, 2], &[1.0, 2.0, 0.5, 60.0, 30.0, 40.0, 7.0, 8.0]);
    let run = |how| grid.scatter_nd_reduce(&at, &src, how, true).unwrap().to_f64s().unwrap();
    assert_eq!(run(Sum), [1.0, 2.0, 13.5, 84.0, 35.0, 46.0, 7.0, 8.0]);
    assert_eq!(run(Prod), [1.0, 2.0, 15.0, 4800.0, 150.0, 240.0, 7.0, 8.0]);
    assert_eq!(run(Amin), [1.0, 2.0, 0.5, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let bad = grid.scatter_nd(&ints(&[1, 2], &[0, 2]), &row(&[1.0, 2.0]).reshape([1, 2]).unwrap());
    refused(
        bad.and_then(|t| t.to_f64s()),
        &["scatter_nd", "index 2 at position [0, 1] of the index [1, 2] is not in 0..2"],
    );
    refused(grid.scatter_nd(&at, &x), &["scatter_nd", "[2, 2, 2]", "[3, 2]", "[8]"]);
}

/// A NaN whose position is not named keeps its gradient; at a named position, all NaN share.
#[test]
fn nan_keeps_its_gradient() {
    let nan = f64::NAN;
    for how in [Amax, Amin] {
        for (own, x, index, src, of_x, of_src) in [
            (true, [nan, 1.0], vec![1], vec![1.0], [1.0, 0.5], vec![0.5]),
            (false, [nan, 1.0], vec![1], vec![2.0], [1.0, 0.0], vec![1.0]),
            (true, [nan, 1.0], vec![0, 0], vec![2.0, 3.0], [1.0, 1.0], vec![0.0, 0.0]),
            (true, [nan, 1.0], vec![0, 0], vec![nan, 3.0], [0.5, 1.0], vec![0.5, 0.0]),
            (false, [1.0, 1.0], vec![0, 0, 1], vec![nan, 3.0, 2.0], [0.0, 0.0], vec![1.0, 0.0, 1.0]),
        ] {
            let name = format!("{how:?} {own} {x:?} {index:?} {src:?}");
            let n = src.len();
            let x = Var::leaf("x", row(&x)).unwrap();
            let src = Var::leaf("src", row(&src)).unwrap();
            let y = x.scatter_reduce(0, &Var::new(ints(&[n], &index)), &src, how, own).unwrap();
            let g = y.sum_all().unwrap().backward().unwrap();
            Array { shape: vec![2], v: of_x.to_vec() }.is(&name, g.of(&x).unwrap(), 1e-12);
            Array { shape: vec![n], v: of_src }.is(&name, g.of(&src).unwrap(), 1e-12);
        }
    }
}
