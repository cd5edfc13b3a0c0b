//! Values that are recomputed in backward: the same gradients, less memory.

use crate::common::{Log, blank, cpu, grad_of, leaf, of};
use autograd::{
    Backward, Var, backward, differentiable_grad, grad, manual_seed, next_seed, random_state, recomputed,
    with_recomputation,
};
use numcore::{
    ErrorKind, NullRuntime, Result, Runtime,
    fused::NnOps,
    ops::{Apply, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

fn numbers(n: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 7 + 3) % 17) as f64 / 17.0 - 0.4).collect()
}

type Make<R> = fn(&[Var<R>]) -> Result<Var<R>>;

fn through<R: Runtime>(again: bool, inputs: &[&Var<R>], make: Make<R>) -> Var<R> {
    if again {
        return recomputed(inputs, make).unwrap();
    }
    make(&inputs.iter().map(|v| (*v).clone()).collect::<Vec<_>>()).unwrap()
}

/// Gradients of `[x, scale, w]` of a matmul whose left operand is a norm, a dropout mask over it and a reshape.
fn gradients(again: bool) -> [Vec<f64>; 3] {
    let rt = cpu();
    manual_seed(5);
    let (x, scale) = (leaf(&rt, "x", [2, 3, 4], &numbers(24)), leaf(&rt, "scale", [4], &numbers(4)));
    let w = leaf(&rt, "w", [4, 5], &numbers(20));
    let h = x.square().unwrap();
    let normed = through(again, &[&h, &scale], |x| x[0].layer_norm(Some(&x[1]), None, 1e-5)?.dropout(0.3, next_seed()));
    // A matmul of three axes reads its left operand through a reshape.
    let y = normed.matmul(&w).unwrap().tanh().unwrap();
    let drawn = random_state();
    let gradients = backward(&y.square().unwrap().sum_all().unwrap()).unwrap();
    assert_eq!(random_state(), drawn, "backward leaves the stream of random seeds where it was");
    [&x, &scale, &w].map(|v| grad_of(&gradients, v))
}

#[test]
fn gradients_are_the_same_bit_for_bit() {
    assert_eq!(gradients(true), gradients(false));
}

#[test]
fn a_value_made_of_one_that_is_made_again() {
    let run = |again: bool| {
        let rt = cpu();
        let (x, w) = (leaf(&rt, "x", [3, 4], &numbers(12)), leaf(&rt, "w", [3, 3], &numbers(9)));
        let h = through(again, &[&x], |x| x[0].exp());
        let t = through(again, &[&h], |h| h[0].transpose(0, 1)?.gelu());
        let y = t.matmul(&w).unwrap().sum_all().unwrap();
        let gradients = backward(&y).unwrap();
        [&x, &w].map(|v| grad_of(&gradients, v))
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn gradients_can_be_differentiated() {
    let run = |again: bool| {
        let rt = cpu();
        let (x, w) = (leaf(&rt, "x", [3, 4], &numbers(12)), leaf(&rt, "w", [4, 3], &numbers(12)));
        let y = through(again, &[&x], |x| x[0].gelu()).matmul(&w).unwrap().square().unwrap().sum_all().unwrap();
        let first = differentiable_grad(&[&y], &[&x]).unwrap().remove(0).unwrap();
        grad_of(&backward(&first.square().unwrap().sum_all().unwrap()).unwrap(), &w)
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn the_value_is_not_kept() {
    let rt = NullRuntime::new();
    let (x, w) = (blank(&rt, "x", [64, 64]), blank(&rt, "w", [64, 64]));
    let one = 64 * 64 * 4;
    let kept = |again: bool| {
        let h = x.mul(2.0).unwrap();
        let before = rt.memory().total.live;
        let y = through(again, &[&h], |h| h[0].gelu()).matmul(&w).unwrap();
        (rt.memory().total.live - before, y)
    };
    assert_eq!(kept(false).0, 2 * one, "the activation and the product");
    let (bytes, y) = kept(true);
    assert_eq!(bytes, one, "the product alone");
    backward(&y.sum_all().unwrap()).unwrap();
    drop(y);
    assert_eq!(rt.memory().total.live, 2 * one, "nothing is left");
}

#[test]
fn leaves_it_reads_are_announced_and_must_be_as_they_were() {
    let rt = cpu();
    let (x, scale) = (leaf(&rt, "x", [2, 4], &numbers(8)), leaf(&rt, "scale", [4], &numbers(4)));
    let w = leaf(&rt, "w", [4, 4], &numbers(16));
    let forward = || -> Var<Cpu> {
        let y = recomputed(&[&x, &scale], |x| x[0].mul(&x[1])).unwrap().matmul(&w).unwrap();
        y.sum_all().unwrap()
    };
    let mut log = Log::default();
    Backward::of(&forward()).unwrap().run(&mut log).unwrap();
    assert!(log.events.iter().any(|e| e == "needed scale"), "{:?}", log.events);
    // Captured, the sweep reads it for this value alone.
    let seen = scale.clone();
    let captured = recomputed(&[&x.detach()], move |x| x[0].mul(&seen)).unwrap().matmul(&w).unwrap();
    let captured = captured.sum_all().unwrap();
    let loss = forward();
    let changed = scale.value().unwrap().mul(2.0).unwrap();
    of(&scale).set(changed).unwrap();
    let error = backward(&loss).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Stale { name, .. } if name == "scale"), "{error}");
    let error = grad(&[&captured], &[&w]).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Stale { name, .. } if name == "scale"), "{error}");
}

#[test]
fn a_scope_decides_what_is_kept() {
    let rt = NullRuntime::new();
    let (x, w) = (blank(&rt, "x", [64, 64]), blank(&rt, "w", [64, 64]));
    let one = 64 * 64 * 4;
    let through = |x: &Var<NullRuntime>| -> Result<Var<NullRuntime>> {
        let h = x.mul(2.0)?;
        recomputed(&[&h], |h| h[0].gelu())?.matmul(&w)
    };
    let kept = |on: bool| {
        let before = rt.memory().total.live;
        let y = with_recomputation(on, || through(&x)).unwrap();
        (rt.memory().total.live - before, y)
    };
    let ((less, y), (more, z)) = (kept(true), kept(false));
    assert_eq!([less, more], [2 * one, 3 * one]);
    drop((y, z));
}
