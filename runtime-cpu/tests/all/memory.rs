//! The account of memory is exact, and a loop in its steady state takes nothing from the system.

use crate::common::*;
use numcore::{
    DType, ErrorKind, MemoryCategory, Runtime, Tensor, TensorMut,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

#[test]
fn live_and_peak_bytes_are_exact() {
    let cpu = Cpu::with_threads(2);
    let x = Tensor::ones(&cpu, [10, 25], DType::F32).unwrap();
    assert_eq!(cpu.memory().total.live, 1000);
    let y = x.add(&x).unwrap().add(&x).unwrap();
    let stats = cpu.memory();
    assert_eq!((stats.total.live, stats.total.peak, stats.allocations), (2000, 3000, 3));
    let view = y.t().unwrap().narrow(0, 0, 2).unwrap();
    drop(y);
    assert_eq!(cpu.memory().total.live, 2000, "a view keeps the memory");
    drop((view, x));
    cpu.reset_peak();
    assert_eq!((cpu.memory().total.live, cpu.memory().total.peak), (0, 0));
}

#[test]
fn categories_belong_to_the_handle() {
    let cpu = Cpu::with_threads(1);
    let parameters = cpu.with_category(MemoryCategory::Parameters);
    let w = Tensor::ones(&parameters, [64], DType::F32).unwrap();
    let g = TensorMut::zeros(&cpu.with_category(MemoryCategory::Gradients), [16].into(), DType::F64).unwrap();
    let y = w.add(&w).unwrap();
    let stats = cpu.memory();
    let by =
        [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Activations].map(|u| stats.of(u).live);
    assert_eq!(by, [256, 128, 256], "what an op makes is an activation");
    assert_eq!(stats.total.live, 640);
    drop((y, g));
    assert_eq!(parameters.memory().of(MemoryCategory::Parameters).live, 256);
    let fork = cpu.fork().unwrap();
    assert_eq!(fork.memory().total.live, 0, "a fork has an account of its own");
    let moved = w.to_device(&fork).unwrap();
    assert_eq!((fork.memory().total.live, cpu.memory().total.live), (256, 256));
    drop((moved, w));
    assert_eq!((fork.memory().total.live, cpu.memory().total.live), (0, 0));
}

#[test]
fn trimming_keeps_what_lives() {
    let cpu = Cpu::with_threads(1);
    let x = Tensor::ones(&cpu, [1000], DType::F32).unwrap();
    drop(x.add(&x).unwrap().mul(&x).unwrap());
    assert!(cpu.memory().reserved >= 12_000);
    cpu.trim();
    assert!(cpu.memory().reserved < 8_000, "free blocks went back");
    assert_eq!(x.to_vec::<f32>().unwrap(), vec![1.0; 1000]);
}

#[test]
fn a_thousand_steps_reserve_no_more_than_the_second() {
    let cpu = Cpu::with_threads(2);
    let w = Tensor::uniform(&cpu, [200, 300], DType::F32, -1.0, 1.0, 1).unwrap();
    let h = w.to_dtype(DType::BF16).unwrap();
    let step = || {
        let y = w.matmul(&w.t().unwrap()).unwrap().gelu().unwrap();
        let z = h.matmul(&h.t().unwrap()).unwrap().to_dtype(DType::F32).unwrap();
        y.mul(&z).unwrap().sum(&[0]).unwrap().sort_sum()
    };
    let first = step();
    assert_eq!(step(), first);
    let reserved = cpu.memory().reserved;
    for _ in 0..1000 {
        assert_eq!(step(), first);
    }
    assert_eq!(cpu.memory().reserved, reserved);
    assert_eq!(cpu.memory().total.live, 200 * 300 * 6);
}

trait SortSum {
    fn sort_sum(&self) -> f64;
}

impl SortSum for T {
    fn sort_sum(&self) -> f64 {
        use numcore::ops::SortOps;
        self.sort(0, true).unwrap().0.sum_all().unwrap().item().unwrap()
    }
}

#[test]
fn what_cannot_be_had_is_an_error() {
    let cpu = Cpu::with_threads(1);
    let e = Tensor::ones(&cpu, [1 << 50], DType::F64).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::OutOfMemory { requested, .. } if *requested == 1 << 53), "{e}");
    let x = Tensor::ones(&cpu, [4], DType::F32).unwrap();
    close(&x, &[1.0; 4], 0.0, "still works");
}

#[test]
fn buffers_may_be_dropped_and_used_on_any_thread() {
    let cpu = Cpu::with_threads(2);
    let x = Tensor::uniform(&cpu, [1000], DType::F32, 0.0, 1.0, 1).unwrap();
    let expected = x.exp().unwrap().to_bytes().unwrap();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..200 {
                    assert!(x.exp().unwrap().to_bytes().unwrap() == expected);
                }
            });
        }
    });
    assert_eq!(cpu.memory().total.live, 4000);
}

#[test]
fn capabilities_name_the_processor() {
    let cpu = Cpu::with_threads(2);
    let c = cpu.capabilities();
    assert!(c.name.contains(cpu.simd().name()) && c.parallelism == 2);
    assert_eq!(format!("{}", cpu.device()), "cpu:0".trim_end_matches(":0"));
    assert!(format!("{cpu:?}").contains("2 threads"));
}
