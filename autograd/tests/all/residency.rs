//! Values of leaves that are not in memory: fetched the same way by forward and backward, kept by no one.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::common::{Log, cpu, grad_of, leaf, of, run_checkpointed};
use autograd::{Leaf, Residency, Var, backward, backward_with_hooks};
use numcore::{
    ErrorKind, Result, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;
use shelf::Shelf;

mod shelf {
    //! Values kept elsewhere, with a count of how often they were fetched.
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    pub struct Shelf {
        pub values: Mutex<Vec<(String, Tensor<Cpu>)>>,
        pub fetched: AtomicUsize,
    }

    impl Residency<Cpu> for Shelf {
        fn fetch(&self, leaf: &Leaf<Cpu>) -> Result<Tensor<Cpu>> {
            self.fetched.fetch_add(1, Ordering::Relaxed);
            let values = self.values.lock().unwrap();
            let found = values.iter().find(|(n, _)| **n == *leaf.name()).map(|(_, t)| t.clone());
            found.ok_or_else(|| ErrorKind::NotResident { name: leaf.name().to_string() }.into())
        }
    }
}

/// Takes the value of a leaf out of memory; it can be fetched from the shelf.
fn release(leaf: &Var<Cpu>, shelf: &Arc<Shelf>) {
    let leaf = of(leaf);
    let value = leaf.take().unwrap();
    shelf.values.lock().unwrap().push((leaf.name().to_string(), value));
    leaf.set_residency(shelf.clone());
}

#[test]
fn a_value_released_after_forward_is_fetched_in_backward() {
    let rt = cpu();
    let shelf = Arc::new(Shelf::default());
    let w = leaf(&rt, "w", [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let x = leaf(&rt, "x", [1, 2], &[1.0, 1.0]);
    let y = x.matmul(&w.t().unwrap()).unwrap().sum_all().unwrap();
    release(&w, &shelf);
    assert!(!of(&w).is_resident());
    let gradients = backward(&y).unwrap();
    assert_eq!(grad_of(&gradients, &x), [4.0, 6.0]);
    assert_eq!(grad_of(&gradients, &w), [1.0; 4]);
    assert_eq!(shelf.fetched.load(Ordering::Relaxed), 1);
    assert!(!of(&w).is_resident(), "a fetched value is not kept by the leaf");
}

#[test]
fn a_value_that_is_absent_in_forward_is_fetched_too() {
    let rt = cpu();
    let shelf = Arc::new(Shelf::default());
    let w = leaf(&rt, "w", [2], &[1.0, 2.0]);
    release(&w, &shelf);
    assert_eq!(w.mul(2.0).unwrap().value().unwrap().to_f64s().unwrap(), [2.0, 4.0]);
    // Views of an absent leaf have a shape without a fetch.
    let before = shelf.fetched.load(Ordering::Relaxed);
    assert_eq!(w.reshape([2, 1]).unwrap().dims(), [2, 1]);
    assert_eq!(shelf.fetched.load(Ordering::Relaxed), before);
}

#[test]
fn an_absent_value_without_residency_is_an_error_that_names_it() {
    let rt = cpu();
    let w = leaf(&rt, "blocks.3.fc1.weight", [2], &[1.0, 2.0]);
    let y = w.square().unwrap().sum_all().unwrap();
    of(&w).take();
    let error = backward(&y).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotResident { .. }), "{error}");
    let words = error.to_string();
    assert!(
        words.contains("blocks.3.fc1.weight") && words.contains("while the trainer that shards its parameters lives"),
        "{words}"
    );
    assert!(w.exp().is_err());
}

#[test]
fn a_value_put_back_is_not_stale_and_one_of_another_shape_is_refused() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2], &[1.0, 2.0]);
    let y = w.square().unwrap().sum_all().unwrap();
    let value = of(&w).take().unwrap();
    assert!(of(&w).put(Tensor::from_slice(&rt, [3], &[0.0; 3]).unwrap()).is_err());
    of(&w).put(value).unwrap();
    assert_eq!(grad_of(&backward(&y).unwrap(), &w), [2.0, 4.0]);
}

/// The hook is notified of a leaf before its value is read, in the order of backward, and of no leaf that is not read.
#[test]
fn leaves_are_announced_before_they_are_read() {
    let rt = cpu();
    let vars = ["w0", "w1", "w2", "b"].map(|n| leaf(&rt, n, [2, 2], &[1.0, 2.0, 3.0, 4.0]));
    let [w0, w1, w2, b] = &vars;
    let x = leaf(&rt, "x", [1, 2], &[1.0, 1.0]);
    let y = x.matmul(w0).unwrap().matmul(w1).unwrap().add(&b.select(0, 0).unwrap()).unwrap().matmul(w2).unwrap();
    let mut log = Log::default();
    backward_with_hooks(&y.sum_all().unwrap(), &mut log).unwrap();
    let needed: Vec<&str> = log.events.iter().filter_map(|e| e.strip_prefix("needed ")).collect();
    assert_eq!(needed.iter().filter(|n| n.starts_with('w')).copied().collect::<Vec<_>>(), ["w2", "w1", "w0"]);
    assert!(!needed.contains(&"b"), "a sum does not read its operands: {needed:?}");
    for name in ["w0", "w1", "w2"] {
        let at = |what: &str| log.events.iter().position(|e| *e == format!("{what} {name}")).unwrap();
        assert!(at("needed") < at("ready"), "{:?}", log.events);
    }
}

#[test]
fn recomputation_fetches_like_the_first_run() {
    let rt = cpu();
    let shelf = Arc::new(Shelf::default());
    let w = leaf(&rt, "w", [2], &[2.0, 3.0]);
    let x = leaf(&rt, "x", [2], &[5.0, 7.0]);
    let inner = w.clone();
    let y = run_checkpointed(&[&x], move |ins| Ok(vec![ins[0].mul(&inner)?.square()?])).unwrap().remove(0);
    release(&w, &shelf);
    let gradients = backward(&y.sum_all().unwrap()).unwrap();
    // (x·w)²: 2·x·w² and 2·x²·w.
    assert_eq!(grad_of(&gradients, &x), [40.0, 126.0]);
    assert_eq!(grad_of(&gradients, &w), [100.0, 294.0]);
    assert!(shelf.fetched.load(Ordering::Relaxed) >= 1);
}
