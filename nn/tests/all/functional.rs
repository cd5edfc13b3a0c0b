//! Models as functions of their parameters: tangents of six models against gradients, and calls with other parameters.

use autograd::{Var, differentiable_grad, grad, hvp, jvp};
use nn::{
    moe::{MixtureOfExperts, MoeConfig},
    *,
};
use numcore::{
    DType, Result, Tensor,
    fused::ConvOptions,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

use crate::common::{cpu, f64s};

type V = Var<Cpu>;

fn init() -> Init<Cpu> {
    Init::new(&cpu(), 5).dtype(DType::F64)
}

fn drawn(shape: &[usize], seed: u64) -> V {
    Var::new(Tensor::uniform(&cpu(), shape, DType::F64, -1.0, 1.0, seed).unwrap())
}

/// Compares, along one direction in all parameters, the tangent of a loss with its gradients, and the product of its
/// Hessian with the gradient of that tangent.
fn check(of: &str, model: &impl Module<Cpu>, loss: impl Fn() -> Result<V>) {
    let named = model.named_parameters();
    let values: Vec<V> = named.iter().map(|(_, p)| p.var()).collect();
    let values: Vec<&V> = values.iter().collect();
    let along: Vec<V> = (0u64..).zip(&named).map(|(k, (_, p))| drawn(&p.shape(), 100 + k)).collect();
    let along: Vec<&V> = along.iter().collect();
    let with = |given: &[V]| {
        let given: Vec<_> = named.iter().zip(given).map(|((name, _), v)| (name, v.clone())).collect();
        functional_call(model, &given, &loss)
    };
    let (value, tangent) = jvp(with, &values, &along).unwrap();
    let plain = loss().unwrap();
    let near = |what: &str, got: f64, want: f64, size: f64| {
        assert!((got - want).abs() <= 1e-10 * (1.0 + size), "{of}: {what} is {got}, expected {want}");
    };
    near("the value", value.item().unwrap(), plain.item().unwrap(), 1.0);
    let gradients = differentiable_grad(&[&plain], &values).unwrap();
    let products =
        gradients.iter().zip(&along).filter_map(|(g, d)| Some(g.as_ref()?.mul(*d).and_then(|p| p.sum_all())));
    let product = products.map(Result::unwrap).reduce(|a, b| a.add(&b).unwrap()).expect("a parameter with a gradient");
    near("the tangent", tangent.item().unwrap(), product.item().unwrap(), product.item().unwrap().abs());

    let by_tangents = hvp(with, &values, &along).unwrap();
    let by_gradients = grad(&[&product], &values).unwrap();
    for (((name, p), got), want) in named.iter().zip(&by_tangents).zip(&by_gradients) {
        let want = want.as_ref().map_or_else(|| vec![0.0; p.shape().numel()], f64s);
        let size = want.iter().fold(0.0f64, |m, w| m.max(w.abs()));
        f64s(got).iter().zip(&want).for_each(|(g, w)| near(&format!("the product for {name}"), *g, *w, size));
    }
}

#[test]
fn a_multilayer_perceptron() {
    let linear = |i, o| Linear::new(&init(), i, o).unwrap();
    let model = Sequential::new().push(linear(4, 6)).push(Tanh).push(linear(6, 6)).push(Gelu).push(linear(6, 3));
    let x = drawn(&[5, 4], 1);
    check("mlp", &model, || model.forward(&x)?.square()?.mean_all());
}

#[test]
fn a_convolutional_network() {
    let padded = ConvOptions { padding: [1, 1], ..Default::default() };
    let conv = |i, o| Conv2d::new(&init(), i, o, [3, 3], padded).unwrap();
    let model = Sequential::new().push(conv(2, 4)).push(BatchNorm2d::new(&init(), 4).unwrap()).push(Silu);
    let model = model.push(MaxPool2d::new(2)).push(conv(4, 3)).push(Tanh).push(Flatten::default());
    let x = drawn(&[3, 2, 6, 6], 2);
    check("cnn", &model, || model.forward(&x)?.square()?.sum_all());
}

#[test]
fn a_recurrent_network() {
    let config = RecurrentConfig { layers: 2, bidirectional: true, ..RecurrentConfig::new(3, 4) };
    let model = Lstm::new(&init(), config).unwrap();
    let x = drawn(&[2, 5, 3], 3);
    check("lstm", &model, || model.run(&x, None)?.output.square()?.sum_all());
}

#[test]
fn a_language_model() {
    let config =
        GptConfig { vocab: 11, context: 6, layers: 2, heads: 2, width: 8, tied_head: true, ..Default::default() };
    let model = Gpt::new(&init(), config).unwrap();
    let tokens: Vec<i64> = (0..12).map(|i| i * 5 % 11).collect();
    let tokens = Var::new(Tensor::from_slice(&cpu(), [2, 6], &tokens).unwrap());
    check("gpt", &model, || model.next_token_loss(&tokens, &tokens, &Default::default()));
}

#[test]
fn an_encoder() {
    let config = EncoderBlockConfig {
        width: 8,
        heads: 2,
        hidden: 12,
        activation: Activation::Gelu,
        pre_norm: false,
        qkv_bias: true,
        eps: 1e-5,
        dropout: 0.0,
    };
    let model = EncoderBlock::new(&init(), config).unwrap();
    let x = drawn(&[2, 5, 8], 4);
    check("encoder", &model, || model.forward(&x)?.pow(3.0)?.sum_all());
}

#[test]
fn a_mixture_of_experts() {
    let model = MixtureOfExperts::new(&init(), MoeConfig::new(6, 5, 4, 2)).unwrap();
    let x = drawn(&[7, 6], 6);
    check("experts", &model, || {
        let out = model.forward_routed(&x)?;
        out.y.square()?.sum_all()?.add(&out.routing.balance_loss()?)
    });
}

#[test]
fn parameters_that_are_not_named_are_the_models_own() {
    let model = Linear::new(&init(), 2, 2).unwrap();
    let (x, bias) = (drawn(&[1, 2], 7), drawn(&[2], 8));
    let own = f64s(&model.forward(&x).unwrap());
    let moved = functional_call(&model, &[("bias", bias.clone())], || model.forward(&x)).unwrap();
    let plain = x.matmul(&model.weight.var().t().unwrap()).unwrap();
    assert_eq!(f64s(&moved), f64s(&plain.add(&bias).unwrap()));
    assert_eq!(f64s(&model.forward(&x).unwrap()), own, "afterwards the model is as before");
    // The innermost call counts, and a failed one ends too.
    let inner = drawn(&[2], 9);
    let nested = functional_call(&model, &[("bias", bias)], || {
        let failed = functional_call(&model, &[("bias", inner.clone())], || x.add(&drawn(&[3], 1)));
        assert!(failed.is_err());
        functional_call(&model, &[("bias", inner.clone())], || model.forward(&x))
    });
    assert_eq!(f64s(&nested.unwrap()), f64s(&plain.add(&inner).unwrap()));
}

#[test]
fn a_call_with_unknown_parameters_is_an_error() {
    let model = Linear::new(&init(), 2, 2).unwrap();
    let call = |name: &str, value: V| functional_call(&model, &[(name, value)], || Ok(())).unwrap_err().to_string();
    let error = call("scale", drawn(&[2], 1));
    assert!(error.contains("scale") && error.contains("no parameter of this model"), "{error}");
    let error = call("bias", drawn(&[3], 1));
    assert!(error.contains("bias") && error.contains("[2]") && error.contains("[3]"), "{error}");
}
