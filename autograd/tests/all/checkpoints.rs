//! Checkpointed segments: the gradients of the plain model, in less memory.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::common::{self, Log, blank, cpu, grad_of, leaf, of, run_checkpointed, values};
use autograd::{
    Backward, BackwardHook, Checkpoint, CheckpointBill, Function, Leaf, LeafGrad, Var, apply_function, backward,
    backward_with_hooks, checkpoint, differentiable_grad, grad, manual_seed, next_seed, no_grad, products,
    random_state, recomputed, saved_bytes,
};
use numcore::{
    DType, ErrorKind, Flat, FlatLayout, MemoryCategory, NullRuntime, Result, Runtime, Tensor, TensorMut,
    fused::NnOps,
    ops::{Apply, Backprop, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

fn numbers(n: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 11 + 5) % 19) as f64 / 19.0 - 0.4).collect()
}

struct Layer {
    w: Var<Cpu>,
    b: Var<Cpu>,
}

impl Layer {
    fn new(rt: &Cpu, i: usize) -> Layer {
        let b = numbers(4).iter().map(|v| v * 0.1 * (1.0 + i as f64)).collect::<Vec<_>>();
        Layer { w: leaf(rt, &format!("w{i}"), [4, 4], &numbers(16)), b: leaf(rt, &format!("b{i}"), [4], &b) }
    }

    fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        x.linear(&self.w, Some(&self.b))?.tanh()?.dropout(0.3, next_seed())
    }
}

/// The gradients of all leaves, and where the random stream ended.
fn train(checkpointed: bool) -> (Vec<Vec<f64>>, Vec<String>, u64) {
    let rt = cpu();
    manual_seed(17);
    let layers: Arc<Vec<Layer>> = Arc::new((0..4).map(|i| Layer::new(&rt, i)).collect());
    let x = leaf(&rt, "x", [3, 4], &numbers(12));
    let mut h = x.clone();
    for pair in [0..2, 2..4] {
        let (inner, range) = (layers.clone(), pair.clone());
        let segment = move |ins: &[Var<Cpu>]| {
            let y = range.clone().try_fold(ins[0].clone(), |h, i| inner[i].forward(&h))?;
            Ok(vec![y])
        };
        h = if checkpointed {
            run_checkpointed(&[&h], segment).unwrap().remove(0)
        } else {
            segment(&[h]).unwrap().remove(0)
        };
    }
    let mut log = Log::default();
    backward_with_hooks(&h.square().unwrap().sum_all().unwrap(), &mut log).unwrap();
    let leaves = std::iter::once(&x).chain(layers.iter().flat_map(|l| [&l.w, &l.b]));
    let grads = leaves.map(|v| grad_of(&log.gradients, v)).collect();
    let mut ready: Vec<String> = log.ready().iter().map(|s| s.to_string()).collect();
    ready.sort();
    (grads, ready, random_state().drawn)
}

#[test]
fn gradients_are_the_same_bit_for_bit_with_the_same_dropout_masks() {
    let (plain, recomputed) = (train(false), train(true));
    assert_eq!(recomputed.0, plain.0);
    assert_eq!(recomputed.1, plain.1, "every leaf fires once");
    assert_eq!(recomputed.2, plain.2, "recomputation leaves the random stream where it was");
}

/// Recomputation needs the values of forward: of a leaf that needs a gradient, of a frozen one, and of those that a
/// segment within reads.
#[test]
fn leaves_that_a_segment_reads_must_be_as_they_were() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[1.0]);
    let [kept, scale, frozen] = ["kept", "scale", "frozen"].map(|name| leaf(&rt, name, [], &[2.0]));
    of(&frozen).set_requires_grad(false);
    let frozen = of(&frozen).var();
    for (changed, nested) in [(None, false), (None, true)]
        .into_iter()
        .chain([&scale, &frozen].into_iter().flat_map(|leaf| [(Some(leaf), false), (Some(leaf), true)]))
    {
        let (a, b, c) = (kept.clone(), scale.clone(), frozen.clone());
        let segment = move |x: &[Var<Cpu>]| Ok(vec![x[0].mul(&a)?.mul(&b)?.mul(&c)?.exp()?.square()?]);
        let y = match nested {
            false => run_checkpointed(&[&x], segment).unwrap().remove(0),
            true => {
                let segment = Arc::new(segment);
                run_checkpointed(&[&x], move |x| {
                    run_checkpointed(&[&x[0]], {
                        let s = segment.clone();
                        move |x| s(x)
                    })
                })
                .unwrap()
                .remove(0)
            }
        };
        let Some(changed) = changed else {
            assert_eq!(grad_of(&backward(&y).unwrap(), &x), [16.0 * 16f64.exp()]);
            continue;
        };
        of(changed).set(changed.value().unwrap()).unwrap();
        let error = backward(&y).map(|_| ()).unwrap_err();
        let due = of(changed).name();
        assert!(matches!(error.kind(), ErrorKind::Stale { name, .. } if **name == *due), "{due} {nested}: {error}");
    }
}

#[test]
fn variables_of_the_graph_may_be_captured() {
    let rt = cpu();
    let (x, y) = (leaf(&rt, "x", [], &[3.0]), leaf(&rt, "y", [], &[2.0]));
    let other = y.square().unwrap();
    let z = checkpoint(|| x.mul(&other)?.square()).unwrap();
    let gradients = backward(&z).unwrap();
    assert_eq!((grad_of(&gradients, &x), grad_of(&gradients, &y)), (vec![96.0], vec![288.0]));
}

#[test]
fn only_inputs_are_kept_and_outputs_live_until_they_are_used() {
    let rt = NullRuntime::new();
    let w = blank(&rt, "w", [64, 64]);
    let x = blank(&rt, "x", [64, 64]);
    let one = 64 * 64 * 4;
    let forward = |checkpointed: bool| {
        let inner = w.clone();
        let deep =
            move |ins: &[Var<NullRuntime>]| Ok(vec![(0..8).try_fold(ins[0].clone(), |h, _| h.matmul(&inner)?.tanh())?]);
        let before = rt.memory().total.live;
        let y = if checkpointed { run_checkpointed(&[&x], deep) } else { deep(std::slice::from_ref(&x)) };
        (y.unwrap().remove(0), rt.memory().total.live - before)
    };
    let ((plain, kept), (recomputed, little)) = (forward(false), forward(true));
    assert!(kept >= 8 * one && little == one, "{kept} and {little}");
    // And after backward nothing is left of either.
    for y in [plain, recomputed] {
        backward(&y.sum_all().unwrap()).unwrap();
    }
    assert_eq!(rt.memory().total.live, 2 * one);
}

#[test]
fn several_inputs_and_outputs_some_of_which_are_not_used() {
    let rt = cpu();
    let (x, y) = (leaf(&rt, "x", [2], &[1.0, 2.0]), leaf(&rt, "y", [2], &[3.0, 5.0]));
    let constant = common::constant(&rt, [2], &[10.0, 100.0]);
    let outs = run_checkpointed(&[&x, &constant, &y], |ins| {
        Ok(vec![ins[0].mul(&ins[1])?, ins[0].mul(&ins[2])?, ins[2].exp()?])
    });
    let outs = outs.unwrap();
    assert_eq!(values(&outs[1]), [3.0, 10.0]);
    let loss = outs[0].add(&outs[1].mul(2.0).unwrap()).unwrap().sum_all().unwrap();
    let gradients = backward(&loss).unwrap();
    assert_eq!((grad_of(&gradients, &x), grad_of(&gradients, &y)), (vec![16.0, 110.0], vec![2.0, 4.0]));
}

#[test]
fn an_input_given_twice_gets_both_parts() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[3.0]);
    let h = x.mul(2.0).unwrap();
    let y = run_checkpointed(&[&h, &h], |ins| Ok(vec![ins[0].mul(&ins[1])?])).unwrap().remove(0);
    assert_eq!(grad_of(&backward(&y).unwrap(), &x), [24.0]);
}

#[test]
fn a_segment_may_read_the_leaf_it_is_given() {
    let rt = cpu();
    let w = leaf(&rt, "w", [], &[3.0]);
    let inner = w.clone();
    let y = run_checkpointed(&[&w], move |ins| Ok(vec![ins[0].mul(&inner)?])).unwrap().remove(0);
    let mut log = Log::default();
    backward_with_hooks(&y, &mut log).unwrap();
    assert_eq!((grad_of(&log.gradients, &w), log.ready()), (vec![6.0], vec!["w"]));
}

#[test]
fn segments_nest() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [2], &[0.5, -0.25]), leaf(&rt, "w", [2], &[1.5, 2.0]));
    let plain = {
        let h = x.mul(&w).unwrap().tanh().unwrap().mul(&w).unwrap();
        backward(&h.sum_all().unwrap()).unwrap()
    };
    let outer_w = w.clone();
    let y = run_checkpointed(&[&x], move |ins| {
        let inner_w = outer_w.clone();
        let h = run_checkpointed(&[&ins[0]], move |ins| Ok(vec![ins[0].mul(&inner_w)?.tanh()?]))?.remove(0);
        Ok(vec![h.mul(&outer_w)?])
    });
    let mut log = Log::default();
    backward_with_hooks(&y.unwrap()[0].sum_all().unwrap(), &mut log).unwrap();
    for leaf in [&x, &w] {
        assert_eq!(grad_of(&log.gradients, leaf), grad_of(&plain, leaf));
    }
    assert_eq!(log.ready().len(), 2, "{:?}", log.ready());
}

#[test]
fn a_segment_runs_once_with_gradients_and_without() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[1.0]);
    let runs = Arc::new(AtomicUsize::new(0));
    let segment = |runs: Arc<AtomicUsize>| {
        move |ins: &[Var<Cpu>]| {
            runs.fetch_add(1, Ordering::Relaxed);
            Ok(vec![ins[0].exp()?])
        }
    };
    let y = run_checkpointed(&[&x], segment(runs.clone())).unwrap().remove(0);
    backward(&y).unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 1, "op calls are repeated, and not the closure");
    let y = no_grad(|| run_checkpointed(&[&x], segment(runs.clone()))).unwrap().remove(0);
    assert!(!y.requires_grad() && runs.load(Ordering::Relaxed) == 2);
}

/// Whole models are checkpointed in parts of many layers: more leaves than an op has inputs.
#[test]
fn a_segment_may_read_any_number_of_leaves() {
    let rt = cpu();
    let weights: Vec<Var<Cpu>> = (0..150).map(|i| leaf(&rt, &format!("w{i}"), [], &[1.0 + i as f64 / 1e3])).collect();
    let x = leaf(&rt, "x", [], &[0.5]);
    let inner = weights.clone();
    let segment = move |ins: &[Var<Cpu>]| Ok(vec![inner.iter().try_fold(ins[0].clone(), |h, w| h.mul(w)?.add(w))?]);
    let plain = backward(&segment(std::slice::from_ref(&x)).unwrap()[0]).unwrap();
    let mut log = Log::default();
    backward_with_hooks(&run_checkpointed(&[&x], segment).unwrap()[0], &mut log).unwrap();
    assert_eq!(log.ready().len(), 151);
    for v in weights.iter().chain([&x]) {
        assert_eq!(grad_of(&log.gradients, v), grad_of(&plain, v));
    }
}

struct Slots {
    flat: Flat<Cpu>,
    leaves: Vec<Arc<Leaf<Cpu>>>,
    fired: Vec<String>,
}

impl BackwardHook<Cpu> for Slots {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<Cpu>>) -> Result<Option<TensorMut<Cpu>>> {
        let at = self.leaves.iter().position(|l| Arc::ptr_eq(l, leaf));
        at.map(|i| self.flat.lend(i)).transpose()
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<Cpu>>, grad: LeafGrad<Cpu>) -> Result<()> {
        self.fired.push(leaf.name().to_string());
        match grad {
            LeafGrad::Slot(slot) => self.flat.restore(slot),
            LeafGrad::Own(_) => Ok(()),
        }
    }
}

/// A leaf that is read inside and outside of segments, through views, accumulates into one slot.
#[test]
fn slots_reach_into_segments() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let x = leaf(&rt, "x", [1, 2], &[0.5, -1.0]);
    let forward = |checkpointed: bool| {
        let inner = w.clone();
        let segment = move |ins: &[Var<Cpu>]| Ok(vec![ins[0].matmul(&inner.t()?)?.matmul(&inner)?]);
        let h = if checkpointed { run_checkpointed(&[&x], segment) } else { segment(std::slice::from_ref(&x)) };
        h.unwrap()[0].matmul(&w).unwrap().sum_all().unwrap()
    };
    let plain = backward(&forward(false)).unwrap();
    let layout = FlatLayout::new(DType::F64, [("w".to_string(), [2, 2].into())]);
    let mut slots = Slots { flat: Flat::zeros(&rt, layout).unwrap(), leaves: vec![of(&w)], fired: Vec::new() };
    for times in 1..=2 {
        backward_with_hooks(&forward(true), &mut slots).unwrap();
        let expected: Vec<f64> = grad_of(&plain, &w).iter().map(|g| g * times as f64).collect();
        assert_eq!(slots.flat.tensor(0).unwrap().to_f64s().unwrap(), expected);
    }
    assert_eq!(slots.fired.iter().filter(|n| *n == "w").count(), 2);
}

#[test]
fn deferred_weight_gradients_of_a_segment() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [2], &[1.0, 2.0]), leaf(&rt, "w", [2], &[3.0, 4.0]));
    let inner = w.clone();
    let y = run_checkpointed(&[&x], move |ins| Ok(vec![ins[0].mul(&inner)?.square()?])).unwrap().remove(0);
    let mut log = Log::default();
    let rest = Backward::of(&y.sum_all().unwrap()).unwrap().inputs_only(&[&x], &mut log).unwrap();
    rest.run(&mut log).unwrap();
    assert_eq!((grad_of(&log.gradients, &x), grad_of(&log.gradients, &w)), (vec![18.0, 64.0], vec![6.0, 32.0]));
    let mut fired = log.ready();
    fired.sort_unstable();
    assert_eq!(fired, ["w", "x"]);
}

/// A third derivative goes through values that the second one recomputed; the graph can be used again.
#[test]
fn gradients_can_be_differentiated() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 2.0]);
    let run = |checkpointed: bool| {
        let f = || x.square()?.tanh()?.mul(&x)?.softmax(-1)?.square();
        let y = if checkpointed { checkpoint(f) } else { f() }.unwrap();
        let mut all = Vec::new();
        for _ in 0..2 {
            let first = differentiable_grad(&[&y], &[&x]).unwrap().remove(0).unwrap();
            let second = differentiable_grad(&[&first.square().unwrap()], &[&x]).unwrap().remove(0).unwrap();
            let third = grad(&[&second], &[&x]).unwrap().remove(0).unwrap();
            all.extend([first, second, third].map(|g| values(&g)));
        }
        assert_eq!(all[..3], all[3..]);
        all
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn a_kept_graph_keeps_no_recomputed_values() {
    let rt = NullRuntime::new();
    let (x, w) = (blank(&rt, "x", [64, 64]), blank(&rt, "w", [64, 64]));
    let y = checkpoint(|| x.matmul(&w)?.tanh()?.matmul(&w)?.exp()).unwrap().sum_all().unwrap();
    let before = rt.memory().total.live;
    for _ in 0..2 {
        grad(&[&y], &[&x]).unwrap();
        assert_eq!(rt.memory().total.live, before);
    }
}

/// The value between two segments is saved as it is: the second one's chain ends there.
#[test]
fn values_that_leave_a_segment_are_kept() {
    let rt = NullRuntime::new();
    let (x, w) = (blank(&rt, "x", [64, 64]), blank(&rt, "w", [64, 64]));
    let one = 64 * 64 * 4;
    let saved = |y: &Var<NullRuntime>| saved_bytes(y).iter().map(|(_, bytes)| bytes).sum::<usize>();
    // The last call of a segment saves its own output.
    let deep = |h: &Var<NullRuntime>| h.matmul(&w)?.tanh()?.matmul(&w)?.softmax(-1);
    let chain = (0..4).try_fold(x.clone(), |h, _| checkpoint(|| deep(&h))).unwrap();
    assert_eq!(saved(&chain), 3 * one);
    let nested = checkpoint(|| (0..4).try_fold(x.clone(), |h, _| checkpoint(|| deep(&h)))).unwrap();
    assert_eq!(saved(&nested), 0, "the outer segment keeps its input alone");
    let read = |y: &Var<NullRuntime>| saved(&y.exp().unwrap().square().unwrap());
    assert_eq!(read(&nested), 2 * one, "what reads the output of a segment is outside");
    let again = checkpoint(|| recomputed(&[&x], |x| x[0].exp()?.tanh()?.matmul(&w))).unwrap();
    assert_eq!(read(&again), 2 * one, "as is what reads a value that is recomputed within it");
}

/// A variable that leaves its segment holds its value alone: neither inputs nor recomputed values.
#[test]
fn a_held_output_holds_nothing_else() {
    let rt = NullRuntime::new();
    let w = blank(&rt, "w", [64, 64]);
    let one = 64 * 64 * 4;
    let before = rt.memory().total.live;
    let x = blank(&rt, "x", [64, 64]);
    let y = checkpoint(|| x.exp()?.matmul(&w)?.tanh()?.matmul(&w)).unwrap();
    backward(&y.sum_all().unwrap()).unwrap();
    let kept = y.detach();
    drop((x, y));
    assert_eq!(rt.memory().total.live, before + one);
    drop(kept);
    assert_eq!(rt.memory().total.live, before);
}

/// Adds noise that it draws itself.
struct Noisy;

impl Function<Cpu> for Noisy {
    fn name(&self) -> &'static str {
        "noisy"
    }

    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        let noise = Tensor::normal(ins[0].runtime(), *ins[0].shape(), ins[0].dtype(), 0.0, 1.0, next_seed())?;
        Ok(vec![ins[0].add(&noise)?])
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        cx.upstream(0)?.map_or(Ok(()), |g| cx.give_value(0, &g))
    }
}

/// A budget keeps the outputs of functions, which may exchange values with ranks that choose otherwise.
#[test]
fn budgets_repeat_no_functions() {
    let rt = cpu();
    let x = leaf(&rt, "x", [4], &numbers(4));
    let forward = || apply_function(Arc::new(Noisy), &[&x])?.remove(0).exp()?.square();
    for budget in [0, 15, 16, 1000] {
        let (_y, bill) = Checkpoint::budget(budget).run_with_bill(|| forward().unwrap());
        assert!(bill.kept_bytes >= 4 * x.dtype().size() && bill.recomputed_ops <= 1, "{budget}: {bill}");
    }
}

#[test]
fn functions_draw_the_same_values_again() {
    let rt = cpu();
    let x = leaf(&rt, "x", [4], &numbers(4));
    let run = |checkpointed: bool| {
        manual_seed(11);
        let f = || apply_function(Arc::new(Noisy), &[&x])?.remove(0).square()?.dropout(0.5, next_seed())?.exp();
        let y = if checkpointed { checkpoint(f) } else { f() }.unwrap();
        let drawn = next_seed();
        let gradient = grad_of(&backward(&y.sum_all().unwrap()).unwrap(), &x);
        (gradient, drawn, next_seed())
    };
    assert_eq!(run(true), run(false));
}

/// A chain of op calls that would overflow the stack, were it followed or dropped by recursion.
#[test]
fn scopes_may_be_long() {
    let rt = NullRuntime::new();
    let x = blank(&rt, "x", [1]);
    let long = || checkpoint(|| (0..100_000).try_fold(x.clone(), |h, _| h.tanh())).unwrap();
    drop(long());
    backward(&long().sum_all().unwrap()).unwrap();
}

#[test]
fn policies_keep_what_they_say() {
    let rt = NullRuntime::new();
    let one = 64 * 64 * 4;
    let [x, up, down] = ["x", "mlp.up.weight", "mlp.down.weight"].map(|name| blank(&rt, name, [64, 64]));
    let forward = || x.matmul(&up)?.gelu()?.matmul(&down)?.gelu();
    let saved = |policy: &Checkpoint| -> usize {
        let y = policy.run(forward).unwrap();
        saved_bytes(&y).iter().map(|(_, bytes)| bytes).sum()
    };
    for (policy, due) in [
        (Checkpoint::keep(|_| false), 0),
        (Checkpoint::keep(|_| true), 3 * one),
        (Checkpoint::keep(products), 2 * one),
        (Checkpoint::named(["up"]), one),
        (Checkpoint::named(["mlp.down"]), one),
        (Checkpoint::named(["mlp.up", "mlp.down"]), 2 * one),
        (Checkpoint::named(["wn", "mlp"]), 2 * one),
        (Checkpoint::budget(0), 0),
        (Checkpoint::budget(one - 1), 0),
        (Checkpoint::budget(one), one),
        (Checkpoint::budget(2 * one), 2 * one),
        (Checkpoint::budget(usize::MAX), 3 * one),
    ] {
        assert_eq!(saved(&policy), due, "{policy:?}");
        let (y, bill) = policy.run_with_bill(forward);
        let y = y.unwrap();
        assert_eq!(bill.kept_bytes, due, "{policy:?}: {bill}");
        // As much as the bill says lives on, and no more.
        rt.reset_peak();
        let before = rt.memory().total.live;
        backward(&y.sum_all().unwrap()).unwrap();
        let most = rt.memory().total.peak - before;
        assert!(most <= bill.recomputed_bytes + 4 * one, "{policy:?}: {most} and {bill}");
    }
    // Of one output, a budget keeps the product that costs the most to compute.
    let bill = Checkpoint::budget(one).run_with_bill(forward).1;
    assert_eq!(
        bill,
        CheckpointBill {
            kept_bytes: one,
            recomputed_bytes: 2 * one,
            recomputed_ops: 2,
            recomputed_flops: 2 * 64 * 64 * 64
        }
    );
}

#[test]
fn policies_change_no_bit() {
    let rt = cpu();
    let gradients = |policy: Option<Checkpoint>| {
        manual_seed(3);
        let layers: Vec<Layer> = (0..3).map(|i| Layer::new(&rt, i)).collect();
        let x = leaf(&rt, "x", [3, 4], &numbers(12));
        let forward = || layers.iter().try_fold(x.clone(), |h, layer| layer.forward(&h));
        let y = policy.map_or_else(forward, |policy| policy.run(forward)).unwrap();
        let gradients = backward(&y.square().unwrap().sum_all().unwrap()).unwrap();
        layers.iter().flat_map(|l| [&l.w, &l.b]).chain([&x]).map(|v| grad_of(&gradients, v)).collect::<Vec<_>>()
    };
    let plain = gradients(None);
    let policies = [Checkpoint::keep(products), Checkpoint::named(["w1"]), Checkpoint::keep(|call| call.flops() == 0)];
    for policy in policies.into_iter().chain((0..12).map(|k| Checkpoint::budget(48 * k))) {
        assert_eq!(gradients(Some(policy.clone())), plain, "{policy:?}");
    }
}

#[test]
fn a_segment_whose_inputs_need_no_gradient_still_gives_its_leaves_theirs() {
    let rt = cpu();
    let w = leaf(&rt, "w", [], &[3.0]);
    let x = common::constant(&rt, [], &[2.0]);
    let inner = w.clone();
    let y = run_checkpointed(&[&x], move |ins| Ok(vec![ins[0].mul(&inner)?])).unwrap().remove(0);
    assert_eq!(grad_of(&backward(&y).unwrap(), &w), [2.0]);
    // And one that reads nothing that needs gradients is no node.
    let y = run_checkpointed(&[&x], |ins| Ok(vec![ins[0].exp()?])).unwrap().remove(0);
    assert!(!y.requires_grad());
}

#[test]
fn views_of_leaves_inside_and_views_as_inputs() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 3], &numbers(6));
    let plain = backward(&w.t().unwrap().exp().unwrap().matmul(&w).unwrap().sum_all().unwrap()).unwrap();
    let inner = w.clone();
    let y = run_checkpointed(&[&w.t().unwrap()], move |ins| Ok(vec![ins[0].exp()?.matmul(&inner)?])).unwrap().remove(0);
    let gradients = backward(&y.sum_all().unwrap()).unwrap();
    assert_eq!(grad_of(&gradients, &w), grad_of(&plain, &w));
}

/// A parameter that an inner segment is given as an input, captured by the outer one, has its gradient.
#[test]
fn parameters_given_to_an_inner_segment_are_known_to_the_outer() {
    let (h, w) = (leaf(&cpu(), "h", [2], &[1.0, 2.0]), leaf(&cpu(), "w", [2], &[3.0, 4.0]));
    let loss = |h: &Var<_>, w: &Var<_>| h.mul(w).and_then(|y| y.square()).and_then(|y| y.sum_all());
    let captured = w.clone();
    let outer = run_checkpointed(&[&h], move |v| {
        run_checkpointed(&[&v[0], &captured], move |u| Ok(vec![u[0].mul(&u[1])?.square()?.sum_all()?]))
    });
    let (nested, plain) = (backward(&outer.unwrap()[0]).unwrap(), backward(&loss(&h, &w).unwrap()).unwrap());
    assert_eq!(grad_of(&nested, &w), grad_of(&plain, &w));
    assert_eq!(grad_of(&nested, &h), grad_of(&plain, &h));
}

/// A segment's gradient is handed on if no slot is lent: it is in memory once.
#[test]
fn gradients_of_a_segment_are_not_copied() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2, 64], &[0.5; 128]);
    let w = leaf(&rt, "w", [64, 64], &[0.25; 64 * 64]);
    let own = w.clone();
    let y = run_checkpointed(&[&x], move |x| Ok(vec![x[0].linear(&own, None)?])).unwrap().remove(0);
    let loss = y.sum_all().unwrap();
    rt.reset_peak();
    let before = rt.memory().of(MemoryCategory::Gradients).live;
    let gradients = loss.backward().unwrap();
    let most = rt.memory().of(MemoryCategory::Gradients).peak - before;
    assert_eq!(grad_of(&gradients, &w), [1.0; 64 * 64]);
    assert!(most < 2 * 64 * 64 * 8, "{most} bytes, of a weight of {}", 64 * 64 * 8);
}
