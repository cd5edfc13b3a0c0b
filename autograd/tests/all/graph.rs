//! The lifetime of a graph: what it refuses, what it saves, and when it frees memory.

use crate::common::{self, Log, constant, cpu, grad_of, leaf, of};
use autograd::{Backward, Leaf, Var, backward, backward_with_hooks, is_grad_enabled, no_grad};
use numcore::{
    ErrorKind, NullRuntime, Runtime, Tensor,
    fused::NnOps,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

#[test]
fn a_graph_is_swept_once_unless_it_is_retained() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 2.0]);
    let y = x.exp().unwrap().mul(&x).unwrap().sum_all().unwrap();
    let mut log = Log::default();
    Backward::of(&y).unwrap().retain_graph().run(&mut log).unwrap();
    let first = grad_of(&log.gradients, &x);
    backward_with_hooks(&y, &mut log).unwrap();
    assert!(grad_of(&log.gradients, &x).iter().zip(&first).all(|(twice, once)| *twice == 2.0 * once));
    let error = backward(&y).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::GraphFreed { .. }), "{error}");
    assert!(error.to_string().contains("retain_graph"));
}

#[test]
fn part_of_a_freed_graph_cannot_be_swept_again() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[1.0]);
    let shared = x.exp().unwrap();
    backward(&shared.mul(2.0).unwrap()).unwrap();
    let error = backward(&shared.mul(3.0).unwrap()).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::GraphFreed { op: "exp" }), "{error}");
}

#[test]
fn a_parameter_changed_before_its_backward_is_stale() {
    let rt = cpu();
    let w = leaf(&rt, "decoder.weight", [2], &[1.0, 2.0]);
    let x = leaf(&rt, "x", [2], &[3.0, 4.0]);
    let y = w.mul(&x).unwrap().sum_all().unwrap();
    of(&w).set(Tensor::from_slice(&rt, [2], &[5.0, 6.0]).unwrap()).unwrap();
    let error = backward(&y).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Stale { saved: 0, now: 1, .. }), "{error}");
    assert!(error.to_string().contains("decoder.weight"));
}

#[test]
fn a_change_of_what_backward_does_not_read_is_no_error() {
    let rt = cpu();
    let (w, b) = (leaf(&rt, "w", [2], &[1.0, 2.0]), leaf(&rt, "b", [2], &[3.0, 4.0]));
    let y = w.mul(2.0).unwrap().add(&b).unwrap().sum_all().unwrap();
    for leaf in [&w, &b] {
        of(leaf).set(Tensor::from_slice(&rt, [2], &[5.0, 6.0]).unwrap()).unwrap();
    }
    let gradients = backward(&y).unwrap();
    assert_eq!((grad_of(&gradients, &w), grad_of(&gradients, &b)), (vec![2.0; 2], vec![1.0; 2]));
}

#[test]
fn a_view_of_a_changed_parameter_is_stale_too() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let x = leaf(&rt, "x", [1, 2], &[1.0, 1.0]);
    let y = x.matmul(&w.t().unwrap()).unwrap().sum_all().unwrap();
    of(&w).set(Tensor::from_slice(&rt, [2, 2], &[0.0; 4]).unwrap()).unwrap();
    assert!(matches!(backward(&y).map(|_| ()).unwrap_err().kind(), ErrorKind::Stale { .. }));
}

#[test]
fn nothing_is_recorded_without_gradients() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 2.0]);
    let y = no_grad(|| {
        assert!(!is_grad_enabled());
        x.exp().unwrap()
    });
    assert!(is_grad_enabled() && !y.requires_grad() && x.exp().unwrap().requires_grad());
    // Also after a panic inside.
    let _ = std::panic::catch_unwind(|| no_grad(|| panic!("inside")));
    assert!(is_grad_enabled());
    // What mixes both only depends on the recorded part.
    let z = x.mul(&y).unwrap().sum_all().unwrap();
    assert_eq!(grad_of(&backward(&z).unwrap(), &x), common::values(&y));
}

#[test]
fn a_detached_value_depends_on_nothing() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[3.0]);
    let y = x.square().unwrap();
    assert!(!y.detach().requires_grad() && !x.detach().requires_grad());
    let z = y.detach().mul(&x).unwrap();
    assert_eq!(grad_of(&backward(&z).unwrap(), &x), [9.0]);
}

#[test]
fn a_frozen_leaf_gets_no_gradient() {
    let rt = cpu();
    let (w, x) = (leaf(&rt, "w", [2], &[1.0, 2.0]), leaf(&rt, "x", [2], &[3.0, 4.0]));
    of(&w).set_requires_grad(false);
    // The variable is created again from the leaf, as a parameter's is in every forward pass.
    let y = of(&w).var().mul(&x).unwrap().sum_all().unwrap();
    let gradients = backward(&y).unwrap();
    assert!(gradients.of(&w).is_none() && gradients.of(&x).is_some());
    gradients.require(&[of(&w), of(&x)]).unwrap();
    of(&w).set_requires_grad(true);
    assert!(of(&w).var().requires_grad());
}

#[test]
fn missing_gradients_are_named_in_order() {
    let rt = cpu();
    let leaves: Vec<Var<_>> = ["a", "b", "c", "d"].iter().map(|n| leaf(&rt, n, [], &[2.0])).collect();
    let gradients = backward(&leaves[2].exp().unwrap()).unwrap();
    of(&leaves[3]).set_requires_grad(false);
    let all: Vec<_> = leaves.iter().map(of).collect();
    let error = gradients.require(&all).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::MissingGradient { names } if names == &["a", "b"]), "{error}");
    assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{error}");
}

#[test]
fn whole_numbers_need_no_gradient() {
    let rt = cpu();
    let values = Tensor::from_vec(&rt, vec![1i64, 0]).unwrap();
    let error = Var::leaf("ids", values.clone()).unwrap_err().to_string();
    assert!(error.contains("leaf: dtypes i64: `ids` can have no gradient"), "{error}");
    let ids = Leaf::new("ids", values).unwrap().var();
    assert!(!ids.requires_grad());
    let table = leaf(&rt, "table", [2, 1], &[5.0, 6.0]);
    let gradients = backward(&table.embedding(&ids).unwrap().mul(2.0).unwrap().sum_all().unwrap()).unwrap();
    assert_eq!((gradients.len(), grad_of(&gradients, &table)), (1, vec![2.0, 2.0]));
}

#[test]
fn gradients_are_summed_over_sweeps_and_can_be_replaced() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[3.0]);
    let mut gradients = backward(&x.square().unwrap()).unwrap();
    backward_with_hooks(&x.mul(10.0).unwrap(), &mut gradients).unwrap();
    assert_eq!(grad_of(&gradients, &x), [16.0]);
    gradients.set(&of(&x), Tensor::from_slice(&rt, [], &[1.0]).unwrap()).unwrap();
    assert_eq!((grad_of(&gradients, &x), gradients.len()), (vec![1.0], 1));
}

/// A network whose forward pass keeps much.
fn network(x: &Var<NullRuntime>, weights: &[Var<NullRuntime>]) -> Var<NullRuntime> {
    let y = weights.iter().try_fold(x.clone(), |y, w| y.matmul(w)?.gelu()?.layer_norm(None, None, 1e-5));
    y.unwrap().sum_all().unwrap()
}

#[test]
fn a_graph_that_is_never_swept_leaves_nothing() {
    let rt = NullRuntime::new();
    let weights: Vec<_> = (0..4).map(|i| common::blank(&rt, &format!("w{i}"), [64, 64])).collect();
    let x = Var::new(Tensor::zeros(&rt, [32, 64], numcore::DType::F32).unwrap());
    let before = rt.memory().total.live;
    let loss = network(&x, &weights);
    assert!(rt.memory().total.live > before + 8 * 32 * 64 * 4);
    drop(loss);
    assert_eq!(rt.memory().total.live, before);
}

#[test]
fn a_sweep_frees_what_the_graph_kept_even_while_the_loss_lives() {
    let rt = NullRuntime::new();
    let weights: Vec<_> = (0..4).map(|i| common::blank(&rt, &format!("w{i}"), [64, 64])).collect();
    let x = Var::new(Tensor::zeros(&rt, [32, 64], numcore::DType::F32).unwrap());
    let before = rt.memory().total.live;
    let loss = network(&x, &weights);
    let gradients = backward(&loss).unwrap();
    let grads = 4 * 64 * 64 * 4;
    assert_eq!(rt.memory().total.live, before + grads + 4, "only the gradients and the loss are left");
    drop((gradients, loss));
    assert_eq!(rt.memory().total.live, before);
}

/// The peak of a backward pass stays near the memory after forward: intermediates are freed as the pass proceeds.
#[test]
fn intermediates_are_freed_as_the_sweep_passes() {
    let rt = NullRuntime::new();
    let x = common::blank(&rt, "x", [1 << 10]);
    let one = 4 << 10;
    let y = (0..64).try_fold(x, |y, _| y.exp()).unwrap().sum_all().unwrap();
    let after_forward = rt.memory().total.live;
    assert!(after_forward >= 64 * one);
    rt.reset_peak();
    drop(backward(&y).unwrap());
    let grown = rt.memory().total.peak - after_forward;
    assert!(grown <= 3 * one, "the peak grew by {grown} bytes, {} values", grown / one);
}

#[test]
fn nothing_is_kept_that_backward_does_not_read() {
    let rt = NullRuntime::new();
    let x = common::blank(&rt, "x", [1 << 10]);
    let before = rt.memory().total.live;
    // Sums and multiplications by a scalar save nothing: only the newest value is alive.
    let y = (0..64).try_fold(x, |y, _| y.mul(3.0)?.add(1.0)).unwrap();
    assert!(rt.memory().total.live <= before + (4 << 10));
    drop(y);
}

/// Saved leaves are references: the graph holds no second handle on a parameter's memory.
#[test]
fn a_graph_does_not_hold_the_memory_of_parameters() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let x = leaf(&rt, "x", [2, 2], &[1.0; 4]);
    let y = x.matmul(&w.t().unwrap()).unwrap().sum_all().unwrap();
    let taken = of(&w).take().unwrap();
    let memory = taken.try_mut().map_err(|_| ()).expect("the graph holds the parameter's memory");
    of(&w).put(memory.freeze().unwrap()).unwrap();
    assert_eq!(grad_of(&backward(&y).unwrap(), &x), [4.0, 6.0, 4.0, 6.0]);
}

#[test]
fn upstream_gradients_given_by_the_caller_are_not_written() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 2.0]);
    let seed = constant(&rt, [2], &[1.0, 1.0]);
    let (a, b) = (x.mul(2.0).unwrap(), x.mul(3.0).unwrap());
    let root = a.add(&b).unwrap();
    let mut log = Log::default();
    Backward::from(&root, &seed).unwrap().seed(&a, &seed).unwrap().run(&mut log).unwrap();
    assert_eq!((grad_of(&log.gradients, &x), common::values(&seed)), (vec![7.0; 2], vec![1.0; 2]));
}
