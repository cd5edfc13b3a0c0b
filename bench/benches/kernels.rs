//! Criterion benches of single kernels, to measure one change; the binary compares with other frameworks.
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use weftgrad::prelude::*;

fn pointwise(c: &mut Criterion) {
    let cpu = Cpu::new();
    let mut group = c.benchmark_group("pointwise");
    for n in [1usize << 10, 1 << 16, 1 << 22] {
        let x = Tensor::uniform(&cpu, [n], DType::F32, -3.0, 3.0, 1).expect("a tensor");
        group.throughput(Throughput::Elements(n as u64));
        group.bench_function(BenchmarkId::new("add", n), |b| b.iter(|| x.add(&x).expect("a sum")));
        group.bench_function(BenchmarkId::new("gelu", n), |b| b.iter(|| x.gelu().expect("a result")));
        group.bench_function(BenchmarkId::new("sum", n), |b| b.iter(|| x.sum_all().expect("a sum")));
    }
}

fn rows(c: &mut Criterion) {
    let cpu = Cpu::new();
    let x = Tensor::uniform(&cpu, [512, 1024], DType::F32, -3.0, 3.0, 1).expect("a tensor");
    let w = Tensor::ones(&cpu, [1024], DType::F32).expect("a weight");
    let mut group = c.benchmark_group("rows 512x1024");
    group.bench_function("softmax", |b| b.iter(|| x.softmax(-1).expect("a result")));
    group.bench_function("layer_norm", |b| b.iter(|| x.layer_norm(Some(&w), Some(&w), 1e-5).expect("a result")));
}

fn matmul(c: &mut Criterion) {
    let cpu = Cpu::new();
    let mut group = c.benchmark_group("matmul");
    for n in [64usize, 256, 1024] {
        let a = Tensor::uniform(&cpu, [n, n], DType::F32, -1.0, 1.0, 1).expect("a matrix");
        group.throughput(Throughput::Elements(2 * (n * n * n) as u64));
        group.bench_function(BenchmarkId::from_parameter(n), |b| b.iter(|| a.matmul(&a).expect("a product")));
    }
}

criterion_group!(benches, pointwise, rows, matmul);
criterion_main!(benches);
