//! Ranks are threads: graphs of different threads never touch each other.

use crate::common::{self, Log, cpu, grad_of, leaf};
use autograd::{Var, backward, backward_with_hooks, is_grad_enabled, manual_seed, next_seed, no_grad};
use numcore::{
    Tensor,
    fused::NnOps,
    ops::{MatmulOps, PointwiseOps, ReduceOps},
};
use runtime_cpu::Cpu;

fn training(rank: usize) -> Vec<Vec<f64>> {
    let rt = cpu();
    manual_seed(rank as u64);
    let numbers: Vec<f64> = (0..64).map(|i| ((i * 29 + rank * 7) % 31) as f64 / 31.0 - 0.5).collect();
    let mut w = leaf(&rt, "w", [8, 8], &numbers);
    let x = common::constant(&rt, [8, 8], &numbers);
    (0..20)
        .map(|_| {
            let y = x.matmul(&w).unwrap().dropout(0.2, next_seed()).unwrap().tanh().unwrap();
            let grad = grad_of(&backward(&y.square().unwrap().sum_all().unwrap()).unwrap(), &w);
            let moved: Vec<f64> = common::values(&w).iter().zip(&grad).map(|(w, g)| w - 0.01 * g).collect();
            w = leaf(&rt, "w", [8, 8], &moved);
            grad
        })
        .collect()
}

#[test]
fn four_ranks_at_once_are_as_one_by_one() {
    let alone: Vec<_> = (0..4).map(training).collect();
    let together: Vec<_> = std::thread::scope(|s| {
        let ranks: Vec<_> = (0..4).map(|rank| s.spawn(move || training(rank))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn modes_and_seeds_belong_to_the_thread() {
    manual_seed(3);
    let first = next_seed();
    no_grad(|| {
        std::thread::scope(|s| {
            s.spawn(|| {
                assert!(is_grad_enabled());
                manual_seed(99);
                next_seed();
            });
        });
        assert!(!is_grad_enabled());
    });
    let second = next_seed();
    manual_seed(3);
    assert_eq!((next_seed(), next_seed()), (first, second));
}

/// Leaves are shared by threads that each run forward and backward of their own: hogwild reading, gradients kept apart.
#[test]
fn one_leaf_in_the_graphs_of_several_threads() {
    let rt = cpu();
    let w = leaf(&rt, "w", [4], &[1.0, 2.0, 3.0, 4.0]);
    let grads: Vec<Vec<f64>> = std::thread::scope(|s| {
        let run = |k: usize| {
            let w = &w;
            s.spawn(move || {
                let mut log = Log::default();
                for _ in 0..50 {
                    backward_with_hooks(&w.mul(k as f64).unwrap().sum_all().unwrap(), &mut log).unwrap();
                }
                grad_of(&log.gradients, w)
            })
        };
        let threads: Vec<_> = (1..=4).map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(grads, (1..=4).map(|k| vec![50.0 * k as f64; 4]).collect::<Vec<_>>());
}

/// A graph built in one thread, continued in another, and used for backward in a third: numbers still grow along every
/// edge.
#[test]
fn a_graph_may_move_between_threads() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[0.5]);
    let deep = |y: Var<Cpu>, n: usize| (0..n).try_fold(y, |y, _| y.sin()).unwrap();
    let here = deep(x.clone(), 100);
    let there = std::thread::scope(|s| {
        let below = here.clone();
        s.spawn(move || deep(below, 3).add(&Var::new(Tensor::from_slice(&cpu(), [], &[1.0]).unwrap())).unwrap()).join()
    });
    let y = there.unwrap().mul(&here).unwrap();
    let expected = grad_of(
        &backward(&deep(deep(x.clone(), 100), 3).add(1.0).unwrap().mul(&deep(x.clone(), 100)).unwrap()).unwrap(),
        &x,
    );
    let swept = std::thread::scope(|s| s.spawn(|| grad_of(&backward(&y).unwrap(), &x)).join().unwrap());
    assert!((swept[0] - expected[0]).abs() < 1e-12 * expected[0].abs(), "{swept:?} {expected:?}");
}
