//! A backward in two parts: first what leads to the inputs, weight gradients later.

use crate::common::{self, Log, constant, cpu, grad_of, leaf, of};
use autograd::{Backward, Var, backward_with_hooks};
use numcore::{
    ErrorKind, NullRuntime, Tensor,
    fused::NnOps,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

struct Stage {
    x: Var<Cpu>,
    weights: Vec<Var<Cpu>>,
}

impl Stage {
    fn new() -> Stage {
        let rt = cpu();
        let numbers = |n: usize, s: f64| (0..n).map(|i| ((i * 13 % 17) as f64 / 17.0 - 0.5) * s).collect::<Vec<_>>();
        let x = leaf(&rt, "x", [3, 4], &numbers(12, 1.0));
        let weights = vec![
            leaf(&rt, "fc1.weight", [8, 4], &numbers(32, 1.0)),
            leaf(&rt, "fc1.bias", [8], &numbers(8, 0.1)),
            leaf(&rt, "norm.weight", [8], &numbers(8, 2.0)),
            leaf(&rt, "fc2.weight", [4, 8], &numbers(32, 0.7)),
        ];
        Stage { x, weights }
    }

    fn forward(&self) -> Var<Cpu> {
        let [w1, b1, g, w2] = &self.weights[..] else { unreachable!("four weights") };
        let h = self.x.linear(w1, Some(b1)).unwrap().gelu().unwrap().rms_norm(Some(g), 1e-6).unwrap();
        h.linear(w2, None).unwrap().add(&self.x).unwrap()
    }

    fn gradients(&self, log: &Log<Cpu>) -> Vec<Vec<f64>> {
        std::iter::once(&self.x).chain(&self.weights).map(|v| grad_of(&log.gradients, v)).collect()
    }
}

fn seed() -> Var<Cpu> {
    constant(&cpu(), [3, 4], &(0..12).map(|i| 1.0 + i as f64).collect::<Vec<_>>())
}

#[test]
fn inputs_first_and_weights_later_equal_the_whole_bit_for_bit() {
    let stage = Stage::new();
    let mut whole = Log::default();
    Backward::from(&stage.forward(), &seed()).unwrap().run(&mut whole).unwrap();
    let mut split = Log::default();
    let deferred = Backward::from(&stage.forward(), &seed()).unwrap().inputs_only(&[&stage.x], &mut split).unwrap();
    assert_eq!(split.ready(), ["x"]);
    assert!(!deferred.is_empty() && deferred.len() >= 3);
    deferred.run(&mut split).unwrap();
    assert_eq!(split.ready().len(), 5, "each leaf fires once: {:?}", split.ready());
    assert_eq!(stage.gradients(&split), stage.gradients(&whole));
}

#[test]
fn deferred_parts_run_in_any_order_of_micro_batches() {
    let stage = Stage::new();
    let mut whole = Log::default();
    for _ in 0..2 {
        Backward::from(&stage.forward(), &seed()).unwrap().run(&mut whole).unwrap();
    }
    let mut split = Log::default();
    let parts: Vec<_> = (0..2)
        .map(|_| Backward::from(&stage.forward(), &seed()).unwrap().inputs_only(&[&stage.x], &mut split).unwrap())
        .collect();
    parts.into_iter().rev().for_each(|d| d.run(&mut split).unwrap());
    assert_eq!(stage.gradients(&split), stage.gradients(&whole));
}

/// A pipeline stage's input is an intermediate only in name: it is received, and is a leaf of the stage's graph. The
/// gradient of an intermediate may be requested as well.
#[test]
fn an_intermediate_can_be_the_input() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [2], &[1.0, 2.0]), leaf(&rt, "w", [2], &[3.0, 4.0]));
    let below = x.square().unwrap();
    let y = below.mul(&w).unwrap().sum_all().unwrap();
    let mut log = Log::default();
    let rest = Backward::of(&y).unwrap().inputs_only(&[&below], &mut log).unwrap();
    assert!(log.gradients.of(&w).is_none(), "a weight gradient belongs to the second part");
    rest.run(&mut log).unwrap();
    assert_eq!((grad_of(&log.gradients, &x), grad_of(&log.gradients, &w)), (vec![6.0, 16.0], vec![1.0, 4.0]));
}

/// Weight casts are work of the second part: the first launches nothing for them.
#[test]
fn the_first_part_launches_no_weight_gradient() {
    let rt = NullRuntime::new();
    let (x, w) = (common::blank(&rt, "x", [4, 4]), common::blank(&rt, "w", [4, 4]));
    let forward = || {
        let cast = w.to_dtype(numcore::DType::BF16).unwrap();
        let y = x.to_dtype(numcore::DType::BF16).unwrap().matmul(&cast).unwrap();
        y.to_dtype(numcore::DType::F32).unwrap().sum_all().unwrap()
    };
    let count = |f: &mut dyn FnMut()| {
        let before = rt.launches();
        f();
        rt.launches() - before
    };
    let (a, b) = (forward(), forward());
    let mut whole = 0;
    whole += count(&mut || backward_with_hooks(&a, &mut Log::default()).unwrap());
    let mut deferred = None;
    let mut log = Log::default();
    let first = count(&mut || deferred = Some(Backward::of(&b).unwrap().inputs_only(&[&x], &mut log).unwrap()));
    let second = count(&mut || deferred.take().unwrap().run(&mut log).unwrap());
    assert_eq!(first + second, whole);
    assert_eq!(second, 2, "the product and the cast of the weight's gradient");
}

#[test]
fn a_weight_that_is_used_on_both_sides_fires_after_both() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [2, 2], &[1.0, 2.0, 3.0, 4.0]), leaf(&rt, "w", [2, 2], &[0.5, -1.0, 2.0, 0.25]));
    let forward = || x.matmul(&w).unwrap().matmul(&w.t().unwrap()).unwrap().sum_all().unwrap();
    let (mut whole, mut split) = (Log::default(), Log::default());
    backward_with_hooks(&forward(), &mut whole).unwrap();
    Backward::of(&forward()).unwrap().inputs_only(&[&x], &mut split).unwrap().run(&mut split).unwrap();
    assert_eq!(split.ready(), ["x", "w"]);
    assert_eq!(grad_of(&split.gradients, &w), grad_of(&whole.gradients, &w));
}

#[test]
fn inputs_that_play_no_part_defer_everything() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [], &[1.0]), leaf(&rt, "w", [], &[3.0]));
    let mut log = Log::default();
    let rest = Backward::of(&w.square().unwrap()).unwrap().inputs_only(&[&x], &mut log).unwrap();
    assert!(log.ready().is_empty());
    rest.run(&mut log).unwrap();
    assert_eq!(grad_of(&log.gradients, &w), [6.0]);
}

/// The second part must not read a weight that was updated in between.
#[test]
fn a_weight_changed_between_the_parts_is_stale_where_it_is_read() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [2], &[1.0, 2.0]), leaf(&rt, "w", [2], &[3.0, 4.0]));
    let y = w.square().unwrap().mul(&x).unwrap().sum_all().unwrap();
    let mut log = Log::default();
    let rest = Backward::of(&y).unwrap().inputs_only(&[&x], &mut log).unwrap();
    of(&w).set(Tensor::from_slice(&rt, [2], &[0.0, 0.0]).unwrap()).unwrap();
    assert!(matches!(rest.run(&mut log).unwrap_err().kind(), ErrorKind::Stale { .. }));
}
