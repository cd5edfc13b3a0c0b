//! Gradients accumulate in memory the hook gives: through views, over micro-batches, without a copy.

use std::sync::Arc;

use crate::common::{self, constant, cpu, leaf, of};
use autograd::{BackwardHook, Leaf, LeafGrad, Var, backward_with_hooks};
use numcore::{
    DType, Flat, FlatLayout, Result, Tensor, TensorMut,
    fused::{ConvOptions, NnOps},
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps, cat},
};
use runtime_cpu::Cpu;

/// A bucket: one range for each leaf.
struct Bucket {
    flat: Flat<Cpu>,
    leaves: Vec<Arc<Leaf<Cpu>>>,
    ready: Vec<String>,
    own: usize,
}

impl Bucket {
    fn of(rt: &Cpu, vars: &[&Var<Cpu>]) -> Bucket {
        let leaves: Vec<_> = vars.iter().map(|v| of(v)).collect();
        let layout = FlatLayout::new(DType::F64, leaves.iter().map(|l| (l.name().to_string(), l.spec().shape)));
        Bucket { flat: Flat::zeros(rt, layout).unwrap(), leaves, ready: Vec::new(), own: 0 }
    }

    fn position(&self, leaf: &Arc<Leaf<Cpu>>) -> Option<usize> {
        self.leaves.iter().position(|l| Arc::ptr_eq(l, leaf))
    }

    fn grad(&self, i: usize) -> Vec<f64> {
        self.flat.tensor(i).unwrap().to_f64s().unwrap()
    }
}

impl BackwardHook<Cpu> for Bucket {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<Cpu>>) -> Result<Option<TensorMut<Cpu>>> {
        self.position(leaf).map(|i| self.flat.lend(i)).transpose()
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<Cpu>>, grad: LeafGrad<Cpu>) -> Result<()> {
        self.ready.push(leaf.name().to_string());
        match grad {
            LeafGrad::Slot(slot) => self.flat.restore(slot),
            LeafGrad::Own(_) => {
                self.own += 1;
                Ok(())
            }
        }
    }
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-12 * y.abs().max(1.0))
}

#[test]
fn a_matrix_used_transposed_is_written_through_its_view() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let x = constant(&rt, [1, 3], &[1.0, 10.0, 100.0]);
    let mut bucket = Bucket::of(&rt, &[&w]);
    let y = x.matmul(&w.t().unwrap()).unwrap();
    let g = constant(&rt, [1, 2], &[1.0, 2.0]);
    autograd::Backward::from(&y, &g).unwrap().run(&mut bucket).unwrap();
    assert_eq!(bucket.grad(0), [1.0, 10.0, 100.0, 2.0, 20.0, 200.0]);
    assert_eq!((bucket.ready.len(), bucket.own), (1, 0));
}

#[test]
fn slots_add_up_over_micro_batches_and_start_anew_after_a_reset() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2], &[3.0, 5.0]);
    let mut bucket = Bucket::of(&rt, &[&w]);
    for scale in [1.0, 10.0, 100.0] {
        backward_with_hooks(&w.square().unwrap().sum_all().unwrap().mul(scale).unwrap(), &mut bucket).unwrap();
    }
    assert_eq!(bucket.grad(0), [666.0, 1110.0]);
    bucket.flat.reset();
    backward_with_hooks(&w.sum_all().unwrap(), &mut bucket).unwrap();
    assert_eq!(bucket.grad(0), [1.0, 1.0]);
    assert_eq!(bucket.ready, ["w"; 4]);
}

/// The first writer overwrites the old content of a slot.
#[test]
fn nothing_old_is_left_in_a_slot() {
    let rt = cpu();
    let w = leaf(&rt, "w", [4], &[1.0, 2.0, 3.0, 4.0]);
    let mut bucket = Bucket::of(&rt, &[&w]);
    backward_with_hooks(&w.mul(7.0).unwrap().sum_all().unwrap(), &mut bucket).unwrap();
    bucket.flat.reset();
    // Only a part is written: the rest is zero, not 7.
    backward_with_hooks(&w.narrow(0, 1, 2).unwrap().sum_all().unwrap(), &mut bucket).unwrap();
    assert_eq!(bucket.grad(0), [0.0, 1.0, 1.0, 0.0]);
    // Two parts, one of them twice.
    bucket.flat.reset();
    let parts = [w.narrow(0, 0, 2).unwrap(), w.narrow(0, 3, 1).unwrap(), w.narrow(0, 0, 1).unwrap()];
    let y = cat(&parts.iter().collect::<Vec<_>>(), 0).unwrap().mul(&constant(&rt, [4], &[1.0, 2.0, 3.0, 4.0])).unwrap();
    backward_with_hooks(&y.sum_all().unwrap(), &mut bucket).unwrap();
    assert_eq!(bucket.grad(0), [5.0, 2.0, 0.0, 3.0]);
}

/// The gradients of every family written through a transposed view are those of a dense leaf.
#[test]
fn every_family_writes_through_views() {
    type Build = fn(&Var<Cpu>) -> Result<Var<Cpu>>;
    let families: &[(&str, Build)] = &[
        ("pointwise", |w| w.exp()?.mul(w)),
        ("reduce", |w| w.mul(&w.sum_keepdim(&[0])?)),
        ("broadcast", |w| w.unsqueeze(0)?.broadcast_to([2, 4, 4])?.mul(3.0)),
        ("matmul left", |w| w.matmul(&w.detach_copy()?)),
        ("matmul right", |w| w.detach_copy()?.matmul(w)),
        ("gather", |w| w.gather(1, &indices(w, [4, 4])?)),
        ("embedding", |w| w.embedding(&indices(w, [16])?)),
        ("scatter_add", |w| w.scatter_add(0, &indices(w, [4, 4])?, &w.mul(2.0)?)),
        ("cat", |w| cat(&[w, &w.mul(2.0)?, w], 1)),
        ("cumsum", |w| numcore::ops::ScanOps::cumsum(w, 1)),
        ("cumprod", |w| numcore::ops::ScanOps::cumprod(w, 0)),
        ("sort", |w| Ok(numcore::ops::SortOps::sort(w, 0, true)?.0)),
        ("unfold", |w| w.unfold(0, 2, 1, 1)),
        ("flip of narrow", |w| w.narrow(1, 1, 2)?.flip(&[0, 1])),
        ("softmax", |w| w.softmax(-1)),
        ("log_softmax of the other axis", |w| w.log_softmax(0)),
        ("layer_norm", |w| w.layer_norm(Some(&w.select(0, 1)?), Some(&w.select(1, 2)?), 1e-5)),
        ("rms_norm", |w| w.rms_norm(Some(&w.select(1, 3)?), 1e-5)),
        ("cross_entropy", |w| w.cross_entropy(&indices(w, [4])?)),
        ("attention", |w| {
            let q = w.unsqueeze(0)?.unsqueeze(0)?;
            q.causal_attention(&q, &q)
        }),
        ("conv weight", |w| {
            let kernel = w.reshape([2, 2, 2, 2])?;
            constant(&cpu(), [1, 2, 3, 3], &[0.5; 18]).conv2d(&kernel, None, ConvOptions::default())
        }),
        ("conv input", |w| {
            let x = w.reshape([1, 1, 4, 4])?;
            x.conv2d(&constant(&cpu(), [1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]), None, ConvOptions::default())
        }),
        ("max_pool", |w| w.reshape([1, 1, 4, 4])?.max_pool2d([2, 2], [1, 1], [0, 0])),
    ];
    for (name, build) in families {
        let rt = cpu();
        let data: Vec<f64> = (0..16).map(|i| ((i * 7 + 3) % 16) as f64 / 8.0 - 0.9).collect();
        let dense = leaf(&rt, "dense", [4, 4], &data);
        let stored = dense.value().unwrap().t().unwrap().contiguous().unwrap();
        let other = Var::leaf("other", stored).unwrap();
        let run = |leaf: &Var<Cpu>, seen: &Var<Cpu>| {
            let mut bucket = Bucket::of(&rt, &[leaf]);
            let y = build(seen).unwrap();
            let weights: Vec<f64> = (0..y.value().unwrap().shape().numel()).map(|i| 1.0 + (i % 5) as f64).collect();
            let loss = y.mul(&constant(&rt, *y.value().unwrap().shape(), &weights)).unwrap().sum_all().unwrap();
            backward_with_hooks(&loss, &mut bucket).unwrap();
            assert_eq!((bucket.ready.len(), bucket.own), (1, 0), "{name}");
            bucket.flat.tensor(0).unwrap()
        };
        let expected = run(&dense, &dense).to_f64s().unwrap();
        let through = run(&other, &other.t().unwrap()).t().unwrap().to_f64s().unwrap();
        assert!(close(&through, &expected), "{name}: {through:?}, expected {expected:?}");
    }
}

/// The value as a constant.
trait DetachCopy: Sized {
    fn detach_copy(&self) -> Result<Self>;
}

impl DetachCopy for Var<Cpu> {
    fn detach_copy(&self) -> Result<Self> {
        Ok(Var::new(self.value()?.mul(2.0)?))
    }
}

fn indices(like: &Var<Cpu>, shape: impl Into<numcore::Shape>) -> Result<Var<Cpu>> {
    let shape = shape.into();
    let ids: Vec<i64> = (0..shape.numel()).map(|i| (i * 5 % 7 % 4) as i64).collect();
    Ok(Var::new(Tensor::from_slice(numcore::ops::Apply::runtime(like), shape, &ids)?))
}

#[test]
fn a_slot_of_the_wrong_shape_is_an_error_that_names_the_leaf() {
    struct Wrong(Cpu);
    impl BackwardHook<Cpu> for Wrong {
        fn grad_slot(&mut self, _: &Arc<Leaf<Cpu>>) -> Result<Option<TensorMut<Cpu>>> {
            TensorMut::alloc(&self.0, [3].into(), DType::F64).map(Some)
        }
        fn on_leaf_grad_ready(&mut self, _: &Arc<Leaf<Cpu>>, _: LeafGrad<Cpu>) -> Result<()> {
            Ok(())
        }
    }
    let rt = cpu();
    let w = leaf(&rt, "encoder.weight", [2], &[1.0, 2.0]);
    let error = backward_with_hooks(&w.sum_all().unwrap(), &mut Wrong(rt.clone())).unwrap_err();
    assert!(error.to_string().contains("encoder.weight"), "{error}");
}

/// A backward pass over slots allocates no memory for gradients of leaves in the steady state.
#[test]
fn gradients_in_slots_are_not_allocated() {
    let rt = cpu();
    let w = leaf(&rt, "w", [1 << 16], &vec![0.5; 1 << 16]);
    let mut bucket = Bucket::of(&rt, &[&w]);
    let loss = w.sum_all().unwrap();
    rt_reset(&rt);
    let before = numcore::Runtime::memory(&rt).total;
    backward_with_hooks(&loss, &mut bucket).unwrap();
    let grown = numcore::Runtime::memory(&rt).total.peak - before.live;
    assert!(grown < 1 << 12, "{grown} bytes");
}

fn rt_reset(rt: &Cpu) {
    numcore::Runtime::reset_peak(rt);
}

/// Splits of an intermediate: their gradients become the whole's without zeros or sums, and an unused part has no
/// gradient.
#[test]
fn pieces_give_the_gradient_of_the_whole_in_one_go() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2, 6], &(1..=12).map(f64::from).collect::<Vec<_>>());
    let parts = x.mul(2.0).unwrap().chunk(1, 3).unwrap();
    let loss = parts[0].mul(&parts[2]).unwrap().sum_all().unwrap();
    let expected = [20.0, 24.0, 0.0, 0.0, 4.0, 8.0, 44.0, 48.0, 0.0, 0.0, 28.0, 32.0];
    assert_eq!(common::grad_of(&autograd::backward(&loss).unwrap(), &x), expected);

    let null = numcore::NullRuntime::new();
    let launches = |piece: fn(&Var<numcore::NullRuntime>) -> Result<Var<numcore::NullRuntime>>| {
        let parts = common::blank(&null, "x", [2, 6]).exp().unwrap().chunk(1, 3).unwrap();
        let parts = parts.iter().map(piece).collect::<Result<Vec<_>>>().unwrap();
        let loss = cat(&[&parts[2], &parts[0], &parts[1]], 1).unwrap().sum_all().unwrap();
        let before = null.launches();
        drop(autograd::backward(&loss).unwrap());
        null.launches() - before
    };
    // The seed; gradients of three parts; three copies into the gradient of `exp`, whose gradient is one more.
    assert_eq!(launches(|x| x.sin()), 8);
    // Parts of one memory, here slices of the seed, are concatenated without a copy.
    assert_eq!(launches(|x| Ok(x.clone())), 2);
}

/// A norm of `h` added to `h` itself, its parameters used twice: with the fused op, or by primitives.
fn normed(fused: bool, [x, w, b]: [&Var<Cpu>; 3]) -> Result<Var<Cpu>> {
    let norm = |h: &Var<Cpu>| -> Result<Var<Cpu>> {
        if fused {
            return h.layer_norm(Some(w), Some(b), 1e-5);
        }
        let centered = h.sub(&h.mean_keepdim(&[-1])?)?;
        let variance = centered.square()?.mean_keepdim(&[-1])?;
        centered.mul(&variance.add(1e-5)?.rsqrt()?)?.mul(w)?.add(b)
    };
    let h = x.mul(2.0)?;
    let y = norm(&h)?.add(&h)?;
    norm(&y)?.add(&y)
}

/// The outputs of one op call are gradients of several values: each is accumulated into the memory of its own gradient.
#[test]
fn a_call_gives_several_gradients_where_they_are_gathered() {
    let rt = cpu();
    let numbers = |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed) % 13) as f64 / 6.0 - 1.0).collect::<Vec<_>>();
    let leaves = [("x", [3, 4].as_slice(), 1), ("w", &[4], 2), ("b", &[4], 3)];
    let run = |fused: bool, batches: usize| {
        let [x, w, b] = leaves.map(|(name, shape, seed)| {
            leaf(&rt, name, numcore::Shape::new(shape).unwrap(), &numbers(shape.iter().product(), seed))
        });
        let mut bucket = Bucket::of(&rt, &[&x, &w, &b]);
        for _ in 0..batches {
            let y = normed(fused, [&x, &w, &b]).unwrap();
            autograd::Backward::from(&y, &constant(&rt, [3, 4], &numbers(12, 5))).unwrap().run(&mut bucket).unwrap();
        }
        assert_eq!((bucket.ready.len(), bucket.own), (3 * batches, 0));
        (0..3).map(|i| bucket.grad(i)).collect::<Vec<_>>()
    };
    for batches in [1, 3] {
        let (fused, expected) = (run(true, batches), run(false, batches));
        assert!(fused.iter().zip(&expected).all(|(a, b)| close(a, b)), "{batches}: {fused:?}, expected {expected:?}");
    }
}

/// Gradients are written straight into their memory: nothing is copied.
#[test]
fn several_gradients_of_leaves_are_one_launch() {
    let null = numcore::NullRuntime::new();
    let [x, w, b] = [("x", &[2usize, 6][..]), ("w", &[6]), ("b", &[6])]
        .map(|(name, shape)| common::blank(&null, name, numcore::Shape::new(shape).unwrap()));
    let y = x.layer_norm(Some(&w), Some(&b), 1e-5).unwrap();
    let g = Var::new(Tensor::zeros(&null, [2, 6], DType::F32).unwrap());
    let before = null.launches();
    let mut gradients = autograd::Gradients::new();
    autograd::Backward::from(&y, &g).unwrap().run(&mut gradients).unwrap();
    assert_eq!((null.launches() - before, gradients.len()), (1, 3));
}
