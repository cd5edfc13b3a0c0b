//! Smoke.
use numcore::{Tensor, DType, ops::*};
use runtime_cpu::Cpu;
#[test]
fn smoke() {
    let cpu = Cpu::new();
    println!("{cpu:?} {:?}", numcore::Runtime::capabilities(&cpu));
    let x = Tensor::from_slice(&cpu, [2, 3], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    println!("{}", x.add(&x).unwrap());
    println!("{}", x.t().unwrap().gelu().unwrap());
    println!("{}", x.matmul(&x.t().unwrap()).unwrap());
    println!("{}", x.sum(&[], false).unwrap());
    println!("{}", x.sum(&[0], false).unwrap());
    println!("{}", x.sum(&[1], false).unwrap());
    println!("{}", x.cumsum(1).unwrap());
    println!("{}", x.sort(0, true).unwrap().1);
    println!("{}", Tensor::arange(&cpu, 0.0, 0.5, 10, DType::F32).unwrap());
    println!("{}", Tensor::uniform(&cpu, [3, 3], DType::F16, 0.0, 1.0, 7).unwrap());
    println!("{}", Tensor::eye(&cpu, 3, DType::BF16).unwrap());
}
