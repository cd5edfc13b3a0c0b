//! Gradients of single examples against a backward pass for each of them.

use autograd::{Var, backward, per_example_gradients};
use nn::{loss::CrossEntropyOptions, *};
use numcore::{
    DType, Result, Tensor,
    fused::{AttentionProgram, NnOps, Reduction},
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

use crate::common::cpu;

type V = Var<Cpu>;

const EXAMPLES: usize = 3;

fn init() -> Init<Cpu> {
    Init::new(&cpu(), 9).dtype(DType::F64)
}

fn drawn(shape: &[usize], seed: u64) -> V {
    Var::new(Tensor::uniform(&cpu(), shape, DType::F64, -1.0, 1.0, seed).unwrap())
}

/// Compares the gradients of all examples with those of batches of one.
fn check(of: &str, model: &impl Module<Cpu>, losses: impl Fn(usize, usize) -> Result<V>) {
    let all = per_example_gradients(&losses(0, EXAMPLES).unwrap()).unwrap();
    for (name, parameter) in model.named_parameters() {
        let apart = all.get(&parameter.leaf()).unwrap_or_else(|| panic!("{of}: no gradients of {name}"));
        assert_eq!(apart.dims(), [&[EXAMPLES], &parameter.shape()[..]].concat(), "{of} {name}");
        for example in 0..EXAMPLES {
            let alone = backward(&losses(example, 1).unwrap()).unwrap();
            let want = alone.get(&parameter.leaf()).unwrap().to_f64s().unwrap();
            let got = apart.narrow(0, example, 1).unwrap().to_f64s().unwrap();
            let near = got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-11);
            assert!(near, "{of}: {name} of example {example}: {got:?}, expected {want:?}");
        }
    }
}

#[test]
fn layers_of_a_language_model() {
    for tied_head in [true, false] {
        let config = GptConfig { vocab: 7, context: 4, layers: 2, heads: 2, width: 6, tied_head, ..Default::default() };
        let model = Gpt::new(&init(), config).unwrap();
        let tokens: Vec<i64> = (0..12).map(|i| i * 5 % 7).collect();
        let tokens = Var::new(Tensor::from_slice(&cpu(), [EXAMPLES, 4], &tokens).unwrap());
        let each = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
        check("gpt", &model, |first, count| {
            let tokens = tokens.narrow(0, first, count)?;
            model.forward(&tokens)?.cross_entropy_with(&tokens, each)?.sum(&[1])
        });
    }
}

#[test]
fn convolutions_and_norms_of_groups() {
    let options = ConvOptions { padding: [1, 1], ..Default::default() };
    let conv = |i, o| Conv2d::new(&init(), i, o, [3, 3], options).unwrap();
    let model = Sequential::new().push(conv(2, 4)).push(GroupNorm::new(&init(), 2, 4).unwrap()).push(Silu);
    let model = model.push(conv(4, 2)).push(Flatten::default()).push(Linear::new(&init(), 32, 2).unwrap());
    let x = drawn(&[EXAMPLES, 2, 4, 4], 2);
    check("cnn", &model, |first, count| model.forward(&x.narrow(0, first, count)?)?.square()?.sum(&[1]));
}

#[test]
fn recurrent_layers() {
    let model = Lstm::new(&init(), RecurrentConfig { layers: 2, ..RecurrentConfig::new(3, 4) }).unwrap();
    let x = drawn(&[EXAMPLES, 5, 3], 3);
    check("lstm", &model, |first, count| model.run(&x.narrow(0, first, count)?, None)?.output.square()?.sum(&[1, 2]));
}

#[test]
fn parameters_seen_by_views() {
    let w = Var::leaf("w", drawn(&[4, 3], 1).value().unwrap()).unwrap();
    let x = drawn(&[EXAMPLES, 2, 3], 2);
    let losses = |first: usize, count: usize| -> Result<V> {
        let x = x.narrow(0, first, count)?;
        let part = x.matmul(&w.narrow(0, 1, 3)?.t()?)?.square()?.sum(&[1, 2])?;
        let row = x.mul(&w.narrow(0, 0, 1)?.reshape([3])?.flip(&[0])?)?.sum(&[1, 2])?;
        let wide = x.mul(&w.narrow(0, 3, 1)?.broadcast_to([1, 1, 3])?)?.square()?.sum(&[1, 2])?;
        part.add(&row)?.add(&wide)
    };
    let all = per_example_gradients(&losses(0, EXAMPLES).unwrap()).unwrap();
    let apart = all.of(&w).unwrap();
    assert_eq!(apart.dims(), [EXAMPLES, 4, 3]);
    for example in 0..EXAMPLES {
        let want = backward(&losses(example, 1).unwrap()).unwrap().of(&w).unwrap().to_f64s().unwrap();
        let got = apart.narrow(0, example, 1).unwrap().to_f64s().unwrap();
        assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-12), "{got:?}, expected {want:?}");
    }
}

/// The program reads the number of the example, which a batch of one begins to count at.
#[test]
fn arguments_of_attention_by_programs() {
    let leaf = |name: &str, shape: &[usize], seed| Var::leaf(name, drawn(shape, seed).value().unwrap()).unwrap();
    let (slopes, bias) = (leaf("slopes", &[2, 1, 1], 11), leaf("bias", &[4, 5], 12));
    let qkv = [(4, 3, 13), (5, 3, 14), (5, 2, 15)].map(|(rows, width, seed)| drawn(&[EXAMPLES, 2, rows, width], seed));
    let program = AttentionProgram::over(2).mask(|at, _| at.key.le(at.query + 1)).score(|s, at, args| {
        (s * args[0] + args[1]).tanh() * (at.batch + 1).cast_like(s) + args[0] * (at.key - at.query).cast_like(s)
    });
    let losses = |first: usize, count: usize| {
        let [q, k, v] = qkv.each_ref().map(|x| x.narrow(0, first, count).unwrap());
        let y = program.clone().shifted(first, 0, 0, 0).attend(&q, &k, &v, &[&slopes, &bias]).unwrap();
        y.square().unwrap().sum(&[1, 2, 3]).unwrap()
    };
    let all = per_example_gradients(&losses(0, EXAMPLES)).unwrap();
    for leaf in [&slopes, &bias] {
        let apart = all.of(leaf).unwrap();
        assert_eq!(apart.dims(), [&[EXAMPLES], &leaf.dims()[..]].concat());
        for example in 0..EXAMPLES {
            let want = backward(&losses(example, 1)).unwrap().of(leaf).unwrap().to_f64s().unwrap();
            let got = apart.narrow(0, example, 1).unwrap().to_f64s().unwrap();
            assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-12), "{example}: {got:?}, expected {want:?}");
        }
    }
}

#[test]
fn a_batch_of_one_has_the_gradients_of_its_example() {
    let position = Var::leaf("position", drawn(&[1, 2, 3], 1).value().unwrap()).unwrap();
    for examples in [1, 2] {
        let x = drawn(&[examples, 2, 3], 2);
        let losses = x.add(&position).unwrap().square().unwrap().sum(&[1, 2]).unwrap();
        let apart = per_example_gradients(&losses).unwrap().of(&position).unwrap().clone();
        assert_eq!(apart.dims(), [examples, 1, 2, 3]);
        let want = Var::new(apart.sum(&[0]).unwrap());
        let whole = losses.sum_all().unwrap().backward().unwrap().of(&position).unwrap().to_f64s().unwrap();
        let got = want.value().unwrap().to_f64s().unwrap();
        assert!(got.iter().zip(&whole).all(|(g, w)| (g - w).abs() < 1e-12), "{got:?} {whole:?}");
    }
}

#[test]
fn examples_that_are_mixed_or_elsewhere_are_found() {
    let says = |result: Result<V>, words: &[&str]| {
        let error = per_example_gradients(&result.unwrap()).err().expect("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    let x = drawn(&[EXAMPLES, 4], 4);
    let linear = Linear::new(&init(), 4, 4).unwrap();
    linear.named_parameters();
    let norm = BatchNorm1d::new(&init(), 4).unwrap();
    says(
        linear.forward(&x).and_then(|x| norm.forward(&x)?.pow(3.0)?.sum(&[1])),
        &["weight", "no gradients of single examples", "batch norm"],
    );
    // The sequence is on the first axis, and has as many elements as there are examples.
    let turned = drawn(&[EXAMPLES, EXAMPLES, 4], 5);
    says(linear.forward(&turned).and_then(|x| x.square()?.sum(&[0, 2])), &["weight", "first axis"]);
    says(
        linear.forward(&drawn(&[EXAMPLES + 1, 4], 6)).and_then(|x| x.square()?.sum_all()?.broadcast_to([EXAMPLES])),
        &["a multiple of 3 examples"],
    );
    says(linear.weight.var().square().and_then(|w| x.matmul(&w)?.sum(&[1])), &["weight", "no sum over the rows"]);
    says(linear.forward(&x), &["a vector of losses"]);
    says(Ok(drawn(&[EXAMPLES], 7)), &["frozen, detached"]);
}
