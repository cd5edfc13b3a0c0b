//! Windows as columns, and back: against loops, and one the adjoint of the other.

use numcore::ops::{ColumnOps, PointwiseOps, PoolOptions, ReduceOps, ViewOps};

use crate::common::*;

#[test]
fn columns_of_an_image() {
    let x = Array::random(&[2, 3, 5, 4], 1);
    let o = PoolOptions { stride: [2, 1], padding: [1, 2], dilation: [2, 1], ..PoolOptions::new([2, 3]) };
    let (p, q) = ((5 + 2 - 3) / 2 + 1, 4 + 4 - 3 + 1);
    let want = Array::of(&[2, 3 * 6, p * q], |at| {
        let (c, r, s) = (at[1] / 6, at[1] / 3 % 2, at[1] % 3);
        let row = (at[2] / q * 2 + r * 2) as isize - 1;
        let column = (at[2] % q + s) as isize - 2;
        x.get(&[at[0] as isize, c as isize, row, column], 0.0)
    });
    want.is("im2col", &x.tensor().im2col(&o).unwrap(), 0.0);
    let y = Array::random(&want.shape, 2);
    let folded = y.tensor().col2im([5, 4], &o).unwrap();
    assert_eq!(folded.dims(), [2, 3, 5, 4]);
    let inner = |a: &T, b: &T| a.mul(b).unwrap().sum_all().unwrap().item().unwrap();
    let (left, right) = (inner(&want.tensor(), &y.tensor()), inner(&x.tensor(), &folded));
    assert!((left - right).abs() < 1e-11, "{left} {right}");
}

#[test]
fn signals_and_volumes() {
    let signal = row(&[1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 4]).unwrap();
    let o = PoolOptions { stride: [1], ..PoolOptions::new([2]) };
    let columns = signal.im2col(&o).unwrap();
    holds(&columns, &[1, 2, 3], &[1.0, 2.0, 3.0, 2.0, 3.0, 4.0]);
    holds(&columns.col2im([4], &o).unwrap(), &[1, 1, 4], &[1.0, 4.0, 6.0, 4.0]);
    let volume = Array::random(&[1, 2, 2, 3, 2], 3);
    let columns = volume.tensor().im2col(&PoolOptions::new([2, 1, 2])).unwrap();
    let want = Array::of(&[1, 8, 3], |at| volume.at(&[0, at[1] / 4, at[1] / 2 % 2, at[2], at[1] % 2]));
    want.is("volume", &columns, 0.0);
    volume.is("apart", &columns.col2im([2, 3, 2], &PoolOptions::new([2, 1, 2])).unwrap(), 0.0);
}
