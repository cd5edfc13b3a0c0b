//! The time at which a leaf's gradient is final: once, right after its last consumer, for every order of operands.

use std::sync::Arc;

use crate::common::{Log, blank, constant, cpu, grad_of, leaf};
use autograd::{Backward, BackwardHook, Leaf, LeafGrad, Var, backward, backward_with_hooks};
use numcore::{
    NullRuntime, Result, Runtime,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps, cat},
};

#[test]
fn a_value_used_twice_is_added_once() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[1.0]);
    let z = x.mul(3.0).unwrap();
    let y = z.add(&z).unwrap();
    assert_eq!(grad_of(&y.backward().unwrap(), &x), [6.0]);
}

#[test]
fn a_leaf_used_in_many_places_fires_once() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[2.0, 3.0]);
    let square = x.mul(&x).unwrap();
    let y = square.add(&x).unwrap().mul(&x).unwrap().sum_all().unwrap();
    let mut log = Log::default();
    backward_with_hooks(&y, &mut log).unwrap();
    assert_eq!(log.ready(), ["x"]);
    // y = x³ + x², y' = 3x² + 2x.
    assert_eq!(grad_of(&log.gradients, &x), [16.0, 33.0]);
}

#[test]
fn a_leaf_read_through_views_fires_once_and_counts_every_view() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let parts = [w.t().unwrap().reshape([6]), w.reshape([6]), w.flip(&[1]).unwrap().reshape([6])];
    let [a, b, c] = parts.map(Result::unwrap);
    let weights = constant(&rt, [6], &[1.0, 10.0, 100.0, 1e3, 1e4, 1e5]);
    let y = a.add(&b).unwrap().add(&c).unwrap().mul(&weights).unwrap().sum_all().unwrap();
    let mut log = Log::default();
    backward_with_hooks(&y, &mut log).unwrap();
    assert_eq!(log.ready(), ["w"]);
    let expected =
        [1.0 + 1.0 + 100.0, 100.0 + 10.0 + 10.0, 1e4 + 100.0 + 1.0, 10.0 + 1e3 + 1e5, 1e3 + 1e4 + 1e4, 1e5 + 1e5 + 1e3];
    assert_eq!(grad_of(&log.gradients, &w), expected);
}

#[test]
fn long_chains_neither_recurse_forward_nor_backward_nor_when_dropped() {
    let rt = NullRuntime::new();
    let x = blank(&rt, "x", [1]);
    // A small stack: code that recurses 100 000 levels overflows it.
    let run = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
        let chain = |n: usize| (0..n).try_fold(x.clone(), |y, _| y.mul(&y)).unwrap();
        let y = chain(100_000);
        let mut log = Log::default();
        backward_with_hooks(&y, &mut log).unwrap();
        assert_eq!(log.ready(), ["x"]);
        drop(y);
        drop(chain(100_000));
    });
    run.unwrap().join().unwrap();
}

/// Records the number of launches after which each leaf became final.
struct Launches {
    rt: NullRuntime,
    ready: Vec<(String, u64)>,
}

impl BackwardHook<NullRuntime> for Launches {
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<NullRuntime>>, _: LeafGrad<NullRuntime>) -> Result<()> {
        self.ready.push((leaf.name().to_string(), self.rt.launches()));
        Ok(())
    }
}

/// The leaves, each with the fraction of backward's launches that had run when it became final.
fn launches_at(build: impl Fn(&NullRuntime) -> Var<NullRuntime>) -> (Vec<(String, u64)>, u64) {
    let rt = NullRuntime::new();
    let y = build(&rt);
    let before = rt.launches();
    let mut hook = Launches { rt: rt.clone(), ready: Vec::new() };
    backward_with_hooks(&y, &mut hook).unwrap();
    let ready = hook.ready.into_iter().map(|(n, l)| (n, l - before)).collect();
    (ready, rt.launches() - before)
}

/// The leaf `w` is used last (first in backward); a long part follows that does not concern it.
#[test]
fn a_leaf_is_final_while_the_rest_of_the_sweep_is_still_to_come() {
    for w_first in [true, false] {
        let (ready, all) = launches_at(|rt| {
            let (x, w) = (blank(rt, "x", [4]), blank(rt, "w", [4]));
            let below = (0..20).try_fold(x, |y, _| y.exp()).unwrap();
            let top = if w_first { w.mul(&below) } else { below.mul(&w) };
            top.unwrap().sum_all().unwrap()
        });
        let w = ready.iter().find(|(n, _)| n == "w").unwrap().1;
        assert!(w <= 3 && all > 20, "w was final after {w} of {all} launches (first operand: {w_first})");
        assert_eq!(ready.last().unwrap().0, "x");
    }
}

/// A later consumer that contributes nothing must not hold a leaf back to the end, nor let it go early.
#[test]
fn a_consumer_that_contributes_nothing_settles_its_leaf() {
    let (ready, all) = launches_at(|rt| {
        let (x, w) = (blank(rt, "x", [4]), blank(rt, "w", [4]));
        let below = (0..20).try_fold(x, |y, _| y.exp()).unwrap();
        // The gradient of a comparison's operand is nothing.
        let mask = w.add(&w).unwrap().gt(0.0).unwrap().to_dtype(numcore::DType::F32).unwrap();
        below.mul(&w).unwrap().mul(&mask).unwrap().sum_all().unwrap()
    });
    assert_eq!(ready.iter().filter(|(n, _)| n == "w").count(), 1);
    assert!(ready[0].0 == "w" && ready[0].1 + 15 < all, "{ready:?} of {all}");
}

#[test]
fn a_leaf_whose_every_consumer_contributes_nothing_never_fires() {
    let rt = cpu();
    let (x, w) = (leaf(&rt, "x", [2], &[1.0, 2.0]), leaf(&rt, "w", [2], &[1.0, -1.0]));
    let y = x.mul(&w.floor().unwrap()).unwrap().sum_all().unwrap();
    let mut log = Log::default();
    backward_with_hooks(&y, &mut log).unwrap();
    assert_eq!(log.ready(), ["x"]);
    assert!(log.gradients.of(&w).is_none());
}

/// Leaves become final from the last used to the first: the order buckets are planned for.
#[test]
fn leaves_become_final_in_reverse_order_of_use() {
    let rt = NullRuntime::new();
    let layers: Vec<Var<NullRuntime>> = (0..8).map(|i| blank(&rt, &format!("w{i}"), [4, 4])).collect();
    let y = layers.iter().try_fold(blank(&rt, "x", [2, 4]), |y, w| y.matmul(w)?.relu()).unwrap();
    let mut log = Log::default();
    backward_with_hooks(&y.sum_all().unwrap(), &mut log).unwrap();
    let weights: Vec<&str> = log.ready().into_iter().filter(|n| *n != "x").collect();
    assert_eq!(weights, ["w7", "w6", "w5", "w4", "w3", "w2", "w1", "w0"]);
}

#[test]
fn the_same_graph_gives_the_same_order_every_time() {
    let events = || {
        let rt = NullRuntime::new();
        let leaves: Vec<Var<NullRuntime>> = (0..40).map(|i| blank(&rt, &format!("w{i}"), [3])).collect();
        let pairs: Vec<Var<NullRuntime>> =
            (0..40).map(|i| leaves[i * 7 % 40].mul(&leaves[i * 11 % 40]).unwrap()).collect();
        let y = cat(&pairs.iter().collect::<Vec<_>>(), 0).unwrap().sum_all().unwrap();
        let mut log = Log::default();
        backward_with_hooks(&y, &mut log).unwrap();
        log.events
    };
    let first = events();
    assert!(first.len() >= 40 && (0..5).all(|_| events() == first));
}

#[test]
fn several_roots_are_swept_together() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[2.0, 3.0]);
    let shared = x.square().unwrap();
    let (a, b) = (shared.sum_all().unwrap(), shared.mul(&x).unwrap());
    let seed = constant(&rt, [2], &[1.0, 10.0]);
    let mut log = Log::default();
    Backward::of(&a).unwrap().seed(&b, &seed).unwrap().run(&mut log).unwrap();
    assert_eq!(log.ready(), ["x"]);
    // 2x + seed · 3x².
    assert_eq!(grad_of(&log.gradients, &x), [4.0 + 12.0, 6.0 + 270.0]);
}

#[test]
fn a_root_may_be_given_twice_or_be_a_leaf_or_a_view_of_one() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let seed = constant(&rt, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let mut log = Log::default();
    let transposed = x.t().unwrap();
    Backward::from(&x, &seed)
        .unwrap()
        .seed(&x, &seed)
        .unwrap()
        .seed(&transposed, &seed)
        .unwrap()
        .run(&mut log)
        .unwrap();
    assert_eq!(log.ready(), ["x"]);
    assert_eq!(grad_of(&log.gradients, &x), [3.0, 7.0, 8.0, 12.0]);
}

#[test]
fn roots_one_of_which_lies_below_the_other() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[2.0]);
    let low = x.square().unwrap();
    let high = low.square().unwrap();
    let mut log = Log::default();
    Backward::of(&low).unwrap().seed(&high, &constant(&rt, [], &[1.0])).unwrap().run(&mut log).unwrap();
    assert_eq!(grad_of(&log.gradients, &x), [4.0 + 32.0]);
}

#[test]
fn a_loss_of_several_elements_or_without_a_graph_is_an_error() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 2.0]);
    let error = |r: Result<autograd::Gradients<_>>| r.map(|_| ()).unwrap_err().to_string();
    assert!(error(backward(&x.exp().unwrap())).contains("reduce it"));
    assert!(error(backward(&constant(&rt, [], &[1.0]))).contains("needs gradients"));
    let wrong = Backward::from(&x.exp().unwrap(), &constant(&rt, [1], &[1.0])).map(|_| ()).unwrap_err();
    assert!(wrong.to_string().contains("backward"), "{wrong}");
}

/// Rows of a table used by index and as a whole: the gradients of both meet in one memory.
#[test]
fn a_tied_table_gets_both_gradients() {
    let rt = cpu();
    let table = leaf(&rt, "table", [3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let ids = Var::new(numcore::Tensor::from_vec(&rt, vec![2i64, 0, 2]).unwrap());
    let rows = table.embedding(&ids).unwrap();
    let logits = rows.matmul(&table.t().unwrap()).unwrap();
    let mut log = Log::default();
    backward_with_hooks(&logits.sum_all().unwrap(), &mut log).unwrap();
    assert_eq!(log.ready(), ["table"]);
    // d/dT of Σ_n Σ_v T[id_n]·T[v]: column sums of T for picked rows, sums of picked rows for every row.
    assert_eq!(grad_of(&log.gradients, &table), [9.0 + 11.0, 12.0 + 14.0, 11.0, 14.0, 11.0 + 18.0, 14.0 + 24.0]);
}

#[test]
fn an_error_of_the_hook_ends_the_sweep() {
    struct Refuse;
    impl<R: Runtime> BackwardHook<R> for Refuse {
        fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, _: LeafGrad<R>) -> Result<()> {
            Err(numcore::Error::state(leaf.name().to_string(), "no room"))
        }
    }
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[2.0]);
    let error = backward_with_hooks(&x.exp().unwrap(), &mut Refuse).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("`x`: no room, at autograd/tests/all/order.rs"), "{text}");
}
