//! Budgets of checkpointed scopes: their bills, and the memory that they hold.

use crate::common::blank;
use autograd::{Checkpoint, Var, products, saved_bytes};
use numcore::{
    NullRuntime, Runtime,
    fused::NnOps,
    ops::{MatmulOps, Op, PointwiseOps, ViewOps},
};

/// A budget counts memory: a view costs what it is a view of. A policy within it takes part of it.
#[test]
fn budgets_count_memory() {
    let rt = NullRuntime::new();
    let (x, w) = (blank(&rt, "x", [64, 64]), blank(&rt, "w", [64, 64]));
    let row = 64 * 4;
    let forward = || x.matmul(&w)?.exp()?.narrow(0, 0, 1)?.matmul(&w)?.square();
    let saved = |y: &Var<NullRuntime>| saved_bytes(y).iter().map(|(_, bytes)| bytes).sum::<usize>();
    for budget in [0, row, 2 * row, 64 * row, 65 * row] {
        let (y, bill) = Checkpoint::budget(budget).run_with_bill(forward);
        let kept = saved(&y.unwrap());
        assert!(kept <= budget && kept == bill.kept_bytes, "{budget}: {kept}, {bill}");
    }
    // A policy of views keeps the output that they are views of.
    let views = || Checkpoint::keep(|call| matches!(call.op, Op::View(_)));
    for (policy, kept) in [(Checkpoint::keep(products), 65 * row), (views(), 64 * row)] {
        let (y, bill) = Checkpoint::budget(0).run_with_bill(|| policy.run(forward));
        assert_eq!((saved(&y.unwrap()), bill.kept_bytes), (kept, kept));
    }
    let (y, bill) = views().run_with_bill(forward);
    assert_eq!((saved(&y.unwrap()), bill.kept_bytes), (64 * row, 64 * row));
    // The rest of the budget is for others.
    for (budget, kept) in [(64 * row, 64 * row), (65 * row, 65 * row)] {
        let (y, bill) = Checkpoint::budget(budget).run_with_bill(|| views().run(forward));
        assert_eq!((saved(&y.unwrap()), bill.kept_bytes), (kept, kept), "{bill}");
    }
}

/// The memory that blocks hold for backward is that of their bills, with the outputs between them.
#[test]
fn bills_are_the_memory_that_blocks_hold() {
    let rt = NullRuntime::new();
    let (x, up, down) = (blank(&rt, "x", [64, 64]), blank(&rt, "up", [64, 256]), blank(&rt, "down", [256, 64]));
    let block = |h: &Var<NullRuntime>| {
        let qkv = h.layer_norm(None, None, 1e-5)?.matmul(&up)?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv.narrow(-1, 64 * i, 64)?.reshape([1, 64, 4, 16])?.permute(&[0, 2, 1, 3]));
        let found = q?.causal_attention(&k?, &v?)?.permute(&[0, 2, 1, 3])?.reshape([64, 64])?.add(h)?;
        found.layer_norm(None, None, 1e-5)?.matmul(&up)?.gelu()?.matmul(&down)?.add(&found)
    };
    let before = rt.memory().total.live;
    let mut all = Vec::new();
    for budget in (0..16).map(|k| k * 24 * 1024) {
        let (mut h, mut bills) = (x.clone(), 0);
        for _ in 0..4 {
            let (y, bill) = Checkpoint::budget(budget).run_with_bill(|| block(&h));
            (h, bills) = (y.unwrap(), bills + bill.kept_bytes);
        }
        let held = rt.memory().total.live - before;
        assert_eq!(held, bills + 4 * 64 * 64 * 4, "{budget}");
        all.push(bills);
    }
    assert!(all[0] == 0 && all[15] > 4 * 200 * 1024, "{all:?}");
}

/// Scopes of one budget, in which the product is another call.
#[test]
fn each_scope_has_the_choice_of_its_own_calls() {
    let rt = NullRuntime::new();
    let x = blank(&rt, "x", [64, 64]);
    let one = 64 * 64 * 4;
    for _ in 0..2 {
        let (_y, early) = Checkpoint::budget(one).run_with_bill(|| x.matmul(&x)?.exp()?.matmul(&x));
        let (_z, late) = Checkpoint::budget(one).run_with_bill(|| x.exp()?.matmul(&x)?.exp());
        for bill in [early, late] {
            assert_eq!((bill.kept_bytes, bill.recomputed_ops, bill.recomputed_flops), (one, 1, 0));
        }
    }
}
