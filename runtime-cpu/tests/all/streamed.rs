//! Outputs beyond any cache, which take other ways to memory.

use crate::common::*;
use numcore::{
    Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

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

/// A kernel tries each way several times in its first launches.
const LAUNCHES: usize = 13;

#[test]
fn every_way_gives_the_same_bits() {
    let (n, cpu) = ((8 << 20) + 37, Cpu::with_threads(2));
    let x = Tensor::normal(&cpu, [n], numcore::DType::F32, 0.0, 2.0, 1).unwrap();
    type Function = fn(&Tensor<Cpu>) -> numcore::Result<Tensor<Cpu>>;
    for function in [(|x| x.exp()) as Function, |x| x.gelu()] {
        let first = function(&x).unwrap();
        let end = x.narrow(0, n - 1000, 1000).unwrap().contiguous().unwrap();
        let part = function(&end).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(first.narrow(0, n - 1000, 1000).unwrap().to_vec::<f32>().unwrap(), part);
        for launch in 1..LAUNCHES {
            let differ = function(&x).unwrap().sub(&first).unwrap().abs().unwrap().amax_all().unwrap();
            assert_eq!(differ.item().unwrap(), 0.0, "launch {launch}");
        }
    }
}
