//! The cross-entropy of a linear layer's outputs against the layer and the loss one after the other.

use crate::common::{V, close, cpu, f64s};
use autograd::{Backward, Gradients, Var, autocast, backward, differentiable_grad};
use nn::{
    Forward, Gpt, GptConfig, Init, ModuleExt,
    loss::{self, CrossEntropyOptions, Reduction},
    parallel::VocabularyLoss,
};
use numcore::{
    DType, ErrorKind, MemoryCategory, NullRuntime, Result, Runtime, Tensor,
    fused::LinearCrossEntropy,
    ops::{Apply, Bits, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

const SUM: CrossEntropyOptions =
    CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, reduction: Reduction::Sum };

/// Rows `[N, C]`, a matrix `[V, C]` and a bias as leaves, and classes, of which every third is ignored.
struct Operands {
    x: V,
    w: V,
    b: V,
    y: V,
}

impl Operands {
    fn new([n, c, v]: [usize; 3], dtype: DType) -> Operands {
        let rt = cpu();
        let leaf = |name: &str, dims: &[usize], seed| {
            V::leaf(name, Tensor::normal(&rt, dims, DType::F64, 0.0, 1.0, seed).unwrap().to_dtype(dtype).unwrap())
                .unwrap()
        };
        let classes: Vec<i64> = (0..n).map(|i| if i % 3 == 1 { -100 } else { (i * 7 % v) as i64 }).collect();
        Operands {
            x: leaf("x", &[n, c], 1),
            w: leaf("w", &[v, c], 2),
            b: leaf("b", &[v], 3),
            y: V::new(Tensor::from_slice(&rt, [n], &classes).unwrap()),
        }
    }

    /// The sum of the losses, in chunks.
    fn chunked(&self, chunk: usize, label_smoothing: f64) -> Result<V> {
        V::apply1(
            LinearCrossEntropy { label_smoothing, chunk: Some(chunk), ..op() },
            &[&self.x, &self.w, &self.b, &self.y],
        )
    }

    fn composed(&self, options: CrossEntropyOptions) -> Result<V> {
        loss::cross_entropy_with(&self.x.linear(&self.w, Some(&self.b))?, &self.y, options)
    }

    fn gradients(&self, loss: &V) -> Vec<Tensor<Cpu>> {
        let gradients = backward(loss).unwrap();
        [&self.x, &self.w, &self.b].map(|v| gradients.get(v.as_leaf().unwrap()).unwrap().clone()).to_vec()
    }
}

#[test]
fn it_is_the_layer_and_the_loss() {
    for (n, v) in [(1, 1), (5, 7), (12, 33)] {
        let o = Operands::new([n, 4, v], DType::F64);
        for (reduction, label_smoothing) in
            [(Reduction::Mean, 0.0), (Reduction::Sum, 0.1), (Reduction::None, 0.0), (Reduction::None, 0.2)]
        {
            let options = CrossEntropyOptions { reduction, label_smoothing, ..SUM };
            let want = o.composed(options).unwrap();
            let got = loss::linear_cross_entropy_with(&o.x, &o.w, Some(&o.b), &o.y, options).unwrap();
            close("loss", &got.value().unwrap(), &want.value().unwrap(), 1e-13);
            let [got, want] = [got, want].map(|l| l.mul(&l.detach()).unwrap().sum_all().unwrap());
            for (a, b) in o.gradients(&got).iter().zip(&o.gradients(&want)) {
                close("gradient", a, b, 1e-12);
            }
        }
        for chunk in [1, 2, 5, 8, 64] {
            let want = o.composed(CrossEntropyOptions { label_smoothing: 0.1, ..SUM }).unwrap();
            let got = o.chunked(chunk, 0.1).unwrap();
            close("sum", &got.value().unwrap(), &want.value().unwrap(), 1e-13);
            for (a, b) in o.gradients(&got.mul(0.3).unwrap()).iter().zip(&o.gradients(&want.mul(0.3).unwrap())) {
                close("gradient in chunks", a, b, 1e-12);
            }
        }
    }
}

#[test]
fn where_all_rows_are_ignored_the_mean_is_none_and_gradients_are_zero() {
    let o = Operands::new([4, 3, 5], DType::F32);
    let y = V::new(Tensor::full(&cpu(), [4], DType::I64, -100i64).unwrap());
    let loss = loss::linear_cross_entropy_with(&o.x, &o.w, Some(&o.b), &y, CrossEntropyOptions::default()).unwrap();
    assert!(loss.item().unwrap().is_nan());
    assert!(o.gradients(&loss).iter().all(|g| g.to_f64s().unwrap().iter().all(|v| *v == 0.0)));
}

/// Only what is asked for is computed, and frozen operands get nothing.
#[test]
fn gradients_of_some_operands() {
    let o = Operands::new([6, 3, 5], DType::F64);
    let want = o.gradients(&o.composed(SUM).unwrap());
    for k in 0..3 {
        let of = |i: usize, v: &V| if i == k { v.clone() } else { v.detach() };
        let p = Operands { x: of(0, &o.x), w: of(1, &o.w), b: of(2, &o.b), y: o.y.clone() };
        let gradients = backward(&p.chunked(4, 0.0).unwrap()).unwrap();
        assert_eq!(gradients.len(), 1);
        let leaf = [&o.x, &o.w, &o.b][k].as_leaf().unwrap().clone();
        close("gradient", gradients.get(&leaf).unwrap(), &want[k], 1e-12);
    }
}

/// A table that embeds tokens and projects to logits, with a gradient from both.
#[test]
fn a_tied_table_gets_both_gradients() {
    let rt = cpu();
    let config =
        GptConfig { vocab: 13, context: 6, layers: 1, heads: 2, width: 8, tied_head: true, ..Default::default() };
    for tied_head in [true, false] {
        let model = Gpt::new(&Init::new(&rt, 3).dtype(DType::F64), GptConfig { tied_head, ..config }).unwrap();
        let tokens: Vec<i64> = (0..12).map(|i| i * 5 % 13).collect();
        let x = V::new(Tensor::from_slice(&rt, [2, 6], &tokens).unwrap());
        let want = loss::cross_entropy(&model.forward(&x).unwrap(), &x).unwrap();
        let got = model.next_token_loss(&x, &x, &VocabularyLoss::default()).unwrap();
        close("loss", &got.value().unwrap(), &want.value().unwrap(), 1e-13);
        let (got, want) = (backward(&got).unwrap(), backward(&want).unwrap());
        for (name, p) in model.named_parameters() {
            close(&name, got.get(&p.leaf()).unwrap(), want.get(&p.leaf()).unwrap(), 1e-10);
        }
    }
}

/// Second derivatives, and gradients of weights that are put off.
#[test]
fn gradients_of_gradients_and_deferred_ones() {
    let o = Operands::new([5, 3, 4], DType::F64);
    let leaves = [&o.x, &o.w, &o.b];
    let squares = |loss: &V| {
        let first = differentiable_grad(&[loss], &leaves).unwrap();
        let squares = first.into_iter().map(|g| g.unwrap().square().unwrap().sum_all().unwrap());
        squares.reduce(|a, b| a.add(&b).unwrap()).unwrap()
    };
    let (got, want) =
        (squares(&o.chunked(2, 0.1).unwrap()), o.composed(CrossEntropyOptions { label_smoothing: 0.1, ..SUM }));
    for (a, b) in o.gradients(&got).iter().zip(&o.gradients(&squares(&want.unwrap()))) {
        close("second", a, b, 1e-11);
    }

    let loss = o.chunked(2, 0.0).unwrap();
    let want = o.gradients(&o.composed(SUM).unwrap());
    let mut gradients = Gradients::new();
    let seed = V::new(Tensor::ones(&cpu(), [1; 0], DType::F64).unwrap());
    let mut hook = Collect(&mut gradients);
    let deferred = Backward::from(&loss, &seed).unwrap().inputs_only(&[&o.x], &mut hook).unwrap();
    assert_eq!(deferred.len(), 2);
    deferred.run(&mut hook).unwrap();
    for (v, want) in leaves.iter().zip(&want) {
        close("deferred", gradients.get(v.as_leaf().unwrap()).unwrap(), want, 1e-12);
    }
}

struct Collect<'a>(&'a mut Gradients<Cpu>);

impl autograd::BackwardHook<Cpu> for Collect<'_> {
    fn on_leaf_grad_ready(
        &mut self,
        leaf: &std::sync::Arc<autograd::Leaf<Cpu>>,
        gradient: autograd::LeafGrad<Cpu>,
    ) -> Result<()> {
        let autograd::LeafGrad::Own(gradient) = gradient else { panic!("no slot was lent") };
        self.0.set(leaf, gradient)
    }
}

/// Sums over chunks are kept in `f32`: a chunk for each row gives what one chunk gives, but for one rounding.
#[test]
fn half_precision_gradients_are_rounded_once() {
    for half in [DType::BF16, DType::F16] {
        let o = Operands::new([192, 4, 6], half);
        let wide = Operands {
            x: V::leaf("x", o.x.value().unwrap().to_dtype(DType::F32).unwrap()).unwrap(),
            w: V::leaf("w", o.w.value().unwrap().to_dtype(DType::F32).unwrap()).unwrap(),
            b: V::leaf("b", o.b.value().unwrap().to_dtype(DType::F32).unwrap()).unwrap(),
            y: o.y.clone(),
        };
        let want = wide.gradients(&wide.composed(SUM).unwrap());
        let rounding = half.epsilon();
        for chunk in [1, 64, 256] {
            let loss = o.chunked(chunk, 0.0).unwrap();
            let rows =
                V::apply1(LinearCrossEntropy { chunk: Some(chunk), summed: false, ..op() }, &[&o.x, &o.w, &o.b, &o.y])
                    .unwrap();
            assert_eq!((loss.dtype(), rows.dtype()), (DType::F32, DType::F32));
            let of_rows = o.gradients(&rows.sum_all().unwrap());
            for (got, want) in o.gradients(&loss).iter().chain(&of_rows).zip(want.iter().cycle()) {
                assert_eq!(got.dtype(), half);
                let (got, want) = (got.to_f64s().unwrap(), want.to_f64s().unwrap());
                let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                let off = got.iter().zip(&want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
                // Logits and their gradient are rounded too, each by itself.
                assert!(off < 1.5 * rounding * scale, "{half} chunk {chunk}: {off} of {scale}");
            }
        }
    }
}

/// Mixed precision: halves are multiplied, the loss is `f32`, and so are gradients of `f32` parameters.
#[test]
fn mixed_precision() {
    let o = Operands::new([9, 4, 6], DType::F32);
    let (got, want) = autocast(DType::BF16, || Ok((o.chunked(4, 0.0)?, o.composed(SUM)?))).unwrap();
    assert_eq!((got.dtype(), want.dtype()), (DType::F32, DType::F32));
    close("loss", &got.value().unwrap(), &want.value().unwrap(), 1e-6);
    for (a, b) in o.gradients(&got).iter().zip(&o.gradients(&want)) {
        assert_eq!(a.dtype(), DType::F32);
        close("gradient", a, b, 1e-2);
    }
}

/// Neither forward nor backward has all logits in memory, which alone are 16 MiB here, nor do losses of rows.
#[test]
fn logits_are_never_whole() {
    let o = Operands::new([1024, 4, 4096], DType::F32);
    let rt = o.x.value().unwrap().runtime().clone();
    let peak = |step: &dyn Fn()| {
        let before = rt.memory().of(MemoryCategory::Activations).live;
        rt.reset_peak();
        step();
        rt.memory().of(MemoryCategory::Activations).peak - before
    };
    let of_sum = peak(&|| drop(backward(&o.chunked(32, 0.0).unwrap()).unwrap()));
    let of_rows = peak(&|| {
        let op = LinearCrossEntropy { summed: false, chunk: Some(32), ..op() };
        let losses = V::apply1(op, &[&o.x, &o.w, &o.b, &o.y]).unwrap();
        drop(backward(&losses.sum_all().unwrap()).unwrap());
    });
    let composed = peak(&|| drop(backward(&o.composed(SUM).unwrap()).unwrap()));
    assert!(of_sum < 2 << 20 && of_rows < 2 << 20, "{of_sum} and {of_rows} bytes");
    assert!(composed > 16 << 20);
}

fn op() -> LinearCrossEntropy {
    LinearCrossEntropy {
        ignore_index: -100,
        label_smoothing: 0.0,
        bias: true,
        summed: true,
        chunk: Some(8),
        gradients: Bits::NONE,
    }
}

#[test]
fn chunks_follow_from_sizes() {
    let rows = |vocabulary, dtype| LinearCrossEntropy::chunk_of(128 << 20, vocabulary, dtype);
    assert_eq!([rows(50_257, DType::BF16), rows(50_257, DType::F32), rows(128_256, DType::BF16)], [1024, 512, 512]);
    assert_eq!([rows(1 << 30, DType::F64), rows(0, DType::F32)], [1, 1 << 27]);
}

#[test]
fn operands_that_do_not_fit_are_errors() {
    let o = Operands::new([4, 3, 5], DType::F32);
    let says = |got: Result<V>, what: &str| {
        let error = got.unwrap_err().to_string();
        assert!(error.contains("linear_cross_entropy") && error.contains(what), "{error}");
    };
    says(loss::linear_cross_entropy(&o.x, &o.x, &o.w), "classes [..]");
    says(loss::linear_cross_entropy(&o.x, &o.w.t().unwrap(), &o.y), "x has 3 features, the weight takes 5");
    says(
        loss::linear_cross_entropy_with(&o.x, &o.w, Some(&o.x), &o.y, CrossEntropyOptions::default()),
        "needs a bias [5]",
    );
    says(loss::linear_cross_entropy(&o.x, &o.w.to_dtype(DType::F64).unwrap(), &o.y), "one floating dtype");
    // A view of everything is as good as what it views.
    let (x, w) = (o.x.t().unwrap().mul(1.0).unwrap().t().unwrap(), o.w.narrow(0, 0, 5).unwrap());
    let seen = loss::linear_cross_entropy(&x, &w, &o.y).unwrap();
    assert_eq!(f64s(&seen), f64s(&loss::linear_cross_entropy(&o.x, &o.w, &o.y).unwrap()));
}

/// A class that there is none of is found in its chunk of rows, and named by its place in the caller's classes.
#[test]
fn a_class_out_of_range_is_named_by_its_row() {
    let o = Operands::new([6, 3, 5], DType::F32);
    let says = |got: Result<V>, what: &str| {
        let error = got.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Index { index: Some(5), size: Some(5), .. }), "{error}");
        assert!(error.to_string().starts_with(what), "{error}");
    };
    let classes = |shape: &[usize]| V::new(Tensor::from_slice(&cpu(), shape, &[0i64, -100, 4, 3, 5, 5]).unwrap());
    let op = |chunk, summed| LinearCrossEntropy { chunk: Some(chunk), summed, ..op() };
    for (chunk, summed) in [(1, true), (4, true), (4, false), (6, true)] {
        let got = V::apply1(op(chunk, summed), &[&o.x, &o.w, &o.b, &classes(&[6])]);
        says(got, "linear_cross_entropy: index 5 at position [4] of the index [6]");
    }
    let x = o.x.reshape([2, 3, 3]).unwrap();
    let got = loss::linear_cross_entropy(&x, &o.w, &classes(&[2, 3]));
    says(got, "linear_cross_entropy: index 5 at position [1, 1] of the index [2, 3]");
    let got = loss::cross_entropy(&x.linear(&o.w, None).unwrap(), &classes(&[2, 3]));
    says(got, "cross_entropy: index 5 at position [1, 1] of the index [2, 3]");
}

/// Gradients come with the sum, those that are asked for: backward has no logits to compute.
#[test]
fn gradients_are_kept_with_the_sum() {
    let rt = NullRuntime::new();
    let leaf = |name: &str, dims: &[usize]| Var::leaf(name, Tensor::zeros(&rt, dims, DType::F32).unwrap()).unwrap();
    let (x, w, b) = (leaf("x", &[32, 4]), leaf("w", &[16, 4]), leaf("b", &[16]));
    let y = Var::new(Tensor::zeros(&rt, [32], DType::I64).unwrap());
    let kept = |ins: [&Var<NullRuntime>; 3]| {
        let before = rt.memory().total.live;
        let _loss = Var::apply1(op(), &[ins[0], ins[1], ins[2], &y]).unwrap();
        (rt.memory().total.live - before) / 4
    };
    let (fx, fw, fb) = (x.detach(), w.detach(), b.detach());
    let all = [[&x, &w, &b], [&x, &fw, &fb], [&fx, &w, &fb], [&fx, &fw, &b], [&fx, &fw, &fb]].map(kept);
    assert_eq!(all, [1 + 128 + 64 + 16, 1 + 128, 1 + 64, 1 + 16, 1]);
}

/// The rows of a chunk follow from the vocabulary: of logits of 256 MiB half are in memory.
#[test]
fn large_vocabularies_come_in_chunks() {
    let o = Operands::new([64, 1, 1 << 20], DType::F32);
    let rt = o.x.value().unwrap().runtime().clone();
    rt.reset_peak();
    let before = rt.memory().of(MemoryCategory::Activations).live;
    loss::linear_cross_entropy(&o.x.detach(), &o.w.detach(), &o.y).unwrap();
    let peak = rt.memory().of(MemoryCategory::Activations).peak - before;
    assert!(peak < 160 << 20, "{peak} bytes");
}

/// Logits are activations, whatever `x` is.
#[test]
fn memory_of_logits_is_booked_as_activations() {
    let rt = cpu().with_category(MemoryCategory::Optimizer);
    let x = V::new(Tensor::zeros(&rt, [1024, 4], DType::F32).unwrap());
    let o = Operands { x, ..Operands::new([1024, 4, 256], DType::F32) };
    rt.reset_peak();
    o.chunked(64, 0.0).unwrap();
    let peak = rt.memory().of(MemoryCategory::Optimizer).peak;
    assert!(peak < 64 * 256 * 4, "{peak} bytes");
}

/// The mean is over the rows that count, whichever class is ignored.
#[test]
fn another_class_is_ignored() {
    let o = Operands::new([7, 3, 5], DType::F64);
    let y = V::new(Tensor::from_slice(&cpu(), [7], &[0i64, 3, 3, 1, 3, 4, 2]).unwrap());
    let options = CrossEntropyOptions { ignore_index: 3, reduction: Reduction::Mean, ..SUM };
    let got = loss::linear_cross_entropy_with(&o.x, &o.w, Some(&o.b), &y, options).unwrap();
    let want = Operands { y, ..o }.composed(options).unwrap();
    close("loss", &got.value().unwrap(), &want.value().unwrap(), 1e-13);
}
