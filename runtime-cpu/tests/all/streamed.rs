//! Outputs beyond any cache, which take another way to memory.

use crate::common::*;
use numcore::{
    Tensor,
    ops::{PointwiseOps, ViewOps},
};

#[test]
fn large_outputs_are_whole() {
    let n = (8 << 20) + 37;
    let values: Vec<f32> = (0..n).map(|i| (i % 1021) as f32).collect();
    for cpu in runtimes() {
        let x = Tensor::from_slice(&cpu, [n], &values).unwrap();
        let sum = x.narrow(0, 1, n - 1).unwrap().add(&x.narrow(0, 0, n - 1).unwrap()).unwrap().to_vec::<f32>().unwrap();
        let wrong = sum.iter().zip(values.windows(2)).position(|(sum, pair)| *sum != pair[0] + pair[1]);
        assert_eq!((wrong, sum.len()), (None, n - 1), "{cpu:?}");
    }
}
