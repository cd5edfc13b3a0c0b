//! Properties of layers apart from values: shapes, modes, statistics, masks, states, and the errors of wrong sizes.

use crate::common::{V, close, cpu, f64s};
use autograd::{Var, manual_seed};
use nn::*;
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat},
};
use runtime_cpu::Cpu;

fn init() -> Init<Cpu> {
    Init::new(&cpu(), 11)
}

fn uniform(shape: &[usize], seed: u64) -> V {
    Var::new(Tensor::uniform(&cpu(), shape, DType::F32, -1.0, 1.0, seed).unwrap())
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

fn same(a: &V, b: &V) {
    close("both", &a.value().unwrap(), &b.value().unwrap(), 1e-6);
}

#[test]
fn shapes() {
    let init = &init();
    let shape = |layer: &dyn Forward<Cpu>, from: &[usize]| layer.forward(&uniform(from, 0)).unwrap().dims();
    assert_eq!(shape(&Linear::new(init, 3, 5).unwrap(), &[2, 7, 3]), [2, 7, 5]);
    assert_eq!(shape(&Linear::new(init, 3, 5).unwrap().without_bias(), &[3]), [5]);
    assert_eq!(
        shape(&Conv1d::new(init, 4, 6, 3, Conv1dOptions { stride: 2, ..Default::default() }).unwrap(), &[2, 4, 9]),
        [2, 6, 4]
    );
    assert_eq!(shape(&Conv2d::new(init, 2, 6, [3, 1], ConvOptions::default()).unwrap(), &[1, 2, 5, 5]), [1, 6, 3, 5]);
    assert_eq!(shape(&MaxPool2d::new(3).with_padding([1, 1]), &[1, 2, 7, 7]), [1, 2, 3, 3]);
    assert_eq!(shape(&AvgPool2d::new(2), &[1, 2, 7, 6]), [1, 2, 3, 3]);
    assert_eq!(shape(&AdaptiveAvgPool2d { size: [2, 3] }, &[1, 2, 7, 5]), [1, 2, 2, 3]);
    assert_eq!(shape(&MaxPool3d::new(2).with_dilation([2, 1, 1]).with_ceil_mode(), &[1, 2, 5, 4, 5]), [1, 2, 2, 2, 3]);
    assert_eq!(shape(&AvgPool1d::new(3).without_padding_counted().with_padding([1]), &[1, 2, 7]), [1, 2, 3]);
    assert_eq!(shape(&AdaptiveMaxPool3d { size: [1, 2, 3] }, &[1, 2, 4, 4, 4]), [1, 2, 1, 2, 3]);
    assert_eq!(shape(&LpPool { p: 2.0, options: PoolOptions::new([2]) }, &[1, 2, 7]), [1, 2, 3]);
    assert_eq!(
        shape(&Conv3d::new(init, 2, 4, [1, 2, 3], ConvNd::default()).unwrap(), &[1, 2, 3, 4, 5]),
        [1, 4, 3, 3, 3]
    );
    let same = Conv1d::new(init, 2, 4, 4, Conv1dOptions::default()).unwrap().with_padding(ConvPadding::Same);
    assert_eq!(shape(&same.with_padding_mode(PadMode::Circular).without_bias(), &[1, 2, 5]), [1, 4, 5]);
    let up = Conv1dOptions { stride: 2, ..Default::default() };
    let up = ConvTranspose1d::new(init, 2, 3, 3, up).unwrap().with_output_padding([1]).unwrap();
    assert_eq!(shape(&up, &[1, 2, 4]), [1, 3, 10]);
    assert_eq!(
        shape(&ConvTranspose3d::new(init, 2, 3, [2; 3], ConvNd::default()).unwrap(), &[1, 2, 1, 2, 3]),
        [1, 3, 2, 3, 4]
    );
    let upsample = Upsample { factors: vec![2.0, 1.5], options: Interpolate::new(Interpolation::Linear) };
    assert_eq!(shape(&upsample, &[1, 2, 3, 4]), [1, 2, 6, 6]);
    assert_eq!(shape(&PixelShuffle { factor: 2 }, &[1, 8, 3, 4]), [1, 2, 6, 8]);
    assert_eq!(shape(&PixelUnshuffle { factor: 2 }, &[1, 2, 6, 8]), [1, 8, 3, 4]);
    assert_eq!(shape(&Pad { pads: vec![(1, 2), (-1, 0)], mode: PadMode::Reflect }, &[1, 3, 4]), [1, 6, 3]);
    assert_eq!(shape(&Unfold { options: PoolOptions::new([2, 2]) }, &[1, 3, 4, 4]), [1, 12, 4]);
    assert_eq!(shape(&Fold { size: [4, 4], options: PoolOptions::new([2, 2]) }, &[1, 12, 4]), [1, 3, 4, 4]);
    assert_eq!(shape(&Flatten::default(), &[2, 3, 4]), [2, 12]);
    assert_eq!(shape(&Sequential::<Cpu>::new(), &[2, 3]), [2, 3]);
    assert_eq!(shape(&GroupNorm::new(init, 2, 4).unwrap(), &[2, 4, 3]), [2, 4, 3]);
    assert_eq!(shape(&MultiHeadAttention::new(init, 8, 2).unwrap().without_bias(), &[2, 5, 8]), [2, 5, 8]);
    assert_eq!(shape(&Lstm::new(init, RecurrentConfig::new(3, 4)).unwrap(), &[2, 5, 3]), [2, 5, 4]);
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    let init = &init();
    let groups = ConvOptions { groups: 4, ..Default::default() };
    assert!(
        message(Conv2d::new(init, 6, 8, [1, 1], groups))
            .contains("4 groups do not divide 6 input and 8 output channels")
    );
    let transposed = ConvTranspose2d::new(init, 2, 2, [3, 3], ConvOptions::default()).unwrap();
    assert!(message(transposed.with_output_padding([1, 0])).contains("must be less than the stride"));
    assert!(message(GroupNorm::new(init, 3, 4)).contains("3 groups do not divide 4 channels"));
    assert!(message(MultiHeadAttention::new(init, 10, 4)).contains("4 heads do not divide a width of 10"));
    assert!(message(Dropout::new(1.0)).contains("not in [0, 1)"));
    assert!(message(Embedding::new(init, 3, 2).unwrap().with_padding_idx(3)).contains("padding index 3"));
    let gru = Gru::new(init, RecurrentConfig::new(3, 4)).unwrap();
    assert!(message(gru.forward(&uniform(&[2, 5, 4], 0))).contains("must be [B, T, 3]"));
    assert!(
        message(gru.run(&uniform(&[2, 5, 3], 0), Some(&[uniform(&[1, 3, 4], 0)]))).contains("must be 1 of [1, 2, 4]")
    );
    let none = RecurrentConfig { layers: 0, ..RecurrentConfig::new(3, 4) };
    assert!(message(Rnn::new(init, none)).contains("at least one layer"));
    let gpt = Gpt::new(init, GptConfig { vocab: 5, context: 4, layers: 1, heads: 1, width: 4, ..Default::default() })
        .unwrap();
    let tokens = |shape: [usize; 2]| Var::new(Tensor::zeros(&cpu(), shape, DType::I64).unwrap());
    assert!(message(gpt.forward(&tokens([1, 5]))).contains("longer than the context of 4"));
}

/// After one batch the running statistics have moved by the momentum towards the batch's mean and unbiased variance.
#[test]
fn batch_norm_tracks_statistics() {
    let norm = BatchNorm1d::new(&init(), 3).unwrap();
    let x = uniform(&[5, 3, 2], 4);
    let y = norm.forward(&x).unwrap();
    let by_channel = |x: &V| x.transpose(0, 1).unwrap().reshape([3, 10]).unwrap();
    let (mean, var) = (by_channel(&x).mean(&[1], false).unwrap(), by_channel(&x).var(&[1], 1, false).unwrap());
    same(&norm.running_mean.var(), &mean.mul(0.1).unwrap());
    same(&norm.running_var.var(), &var.mul(0.1).unwrap().add(0.9).unwrap());
    assert_eq!(norm.num_batches_tracked.value().to_vec::<i64>().unwrap(), [1]);
    let out = by_channel(&y);
    assert!(f64s(&out.mean(&[1], false).unwrap()).iter().all(|m| m.abs() < 1e-6), "what comes out has mean 0");
    let before = f64s(&norm.running_mean.var());
    norm.eval();
    norm.forward(&x).unwrap();
    assert_eq!(f64s(&norm.running_mean.var()), before, "in use it tracks nothing");
    norm.train();
    assert!(message(norm.forward(&uniform(&[1, 3], 0))).contains("one value per channel"));
}

#[test]
fn dropout_drops_scales_and_repeats() {
    let dropout = Dropout::new(0.3).unwrap();
    let x = Var::leaf("x", Tensor::ones(&cpu(), [100_000], DType::F32).unwrap()).unwrap();
    let draw = || {
        let y = dropout.forward(&x).unwrap();
        let gradients = y.sum(&[], false).unwrap().backward().unwrap();
        (f64s(&y), gradients.of(&x).unwrap().to_f64s().unwrap())
    };
    manual_seed(5);
    let (y, slope) = draw();
    let dropped = y.iter().filter(|&&v| v == 0.0).count() as f64 / 1e5;
    assert!((dropped - 0.3).abs() < 5.0 * (0.21f64 / 1e5).sqrt(), "{dropped}");
    assert!(y.iter().all(|&v| v == 0.0 || (v - 1.0 / 0.7).abs() < 1e-6));
    assert_eq!(y, slope, "the gradient passes where the value did");
    assert_ne!(draw().0, y, "each call draws anew");
    manual_seed(5);
    assert_eq!(draw().0, y, "the same seed gives the same mask");
    dropout.mode.set_training(false);
    assert!(draw().0.iter().all(|&v| v == 1.0));
}

#[test]
fn the_padding_row_stays_zero() {
    let table = Embedding::new(&init(), 4, 3).unwrap().with_padding_idx(2).unwrap();
    let indices = Var::new(Tensor::from_slice(&cpu(), [2, 2], &[0i64, 2, 2, 3]).unwrap());
    let rows = table.forward(&indices).unwrap();
    assert_eq!(rows.dims(), [2, 2, 3]);
    assert!(f64s(&rows)[3..9].iter().all(|&x| x == 0.0), "padding is 0");
    let gradients = rows.sum(&[], false).unwrap().backward().unwrap();
    let grad = gradients.get(&table.weight.leaf()).unwrap().to_f64s().unwrap();
    assert_eq!(grad, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
}

/// Hidden keys and absent ones give the same, however they are hidden.
#[test]
fn masks_hide_keys() {
    let attention = MultiHeadAttention::new(&init(), 8, 2).unwrap();
    let x = uniform(&[2, 5, 8], 1);
    let hidden = Var::new(Tensor::from_slice(&cpu(), [2, 5], &[false, false, false, true, true].repeat(2)).unwrap());
    let padded = AttentionOptions { key_padding: Some(&hidden), ..Default::default() };
    let kept = x.narrow(1, 0, 3).unwrap();
    let short = attention.attend(&x, &kept, &kept, AttentionOptions::default()).unwrap();
    same(&attention.attend_self(&x, padded).unwrap(), &short);
    let zero = Var::new(Tensor::zeros(&cpu(), [2, 1, 1, 5], DType::F32).unwrap());
    let both = AttentionOptions { mask: Some(&zero), key_padding: Some(&hidden), ..Default::default() };
    same(&attention.attend(&x, &x, &x, both).unwrap(), &short);
    let mask = zero.masked_fill(&hidden.reshape([2, 1, 1, 5]).unwrap(), f64::NEG_INFINITY).unwrap();
    let added = AttentionOptions { mask: Some(&mask), ..Default::default() };
    same(&attention.attend_self(&x, added).unwrap(), &short);
}

#[test]
fn causal_attention_sees_no_future() {
    let block =
        Block::new(&init(), BlockConfig { width: 8, heads: 2, bias: true, dropout: 0.0, activation: Activation::Gelu })
            .unwrap();
    let (x, other) = (uniform(&[1, 5, 8], 1), uniform(&[1, 2, 8], 2));
    let changed = cat(&[&x.narrow(1, 0, 3).unwrap(), &other], 1).unwrap();
    let first = |x: &V| block.forward(x).unwrap().narrow(1, 0, 3).unwrap();
    assert_eq!(f64s(&first(&x)), f64s(&first(&changed)));
}

#[test]
fn a_tied_head_is_the_token_table() {
    let config =
        GptConfig { vocab: 7, context: 4, layers: 1, heads: 2, width: 4, tied_head: true, ..Default::default() };
    let gpt = Gpt::new(&init(), config).unwrap();
    assert!(gpt.named_parameters().iter().all(|(n, _)| !n.starts_with("head")));
    let tokens = Var::new(Tensor::from_slice(&cpu(), [1, 3], &[1i64, 2, 6]).unwrap());
    let logits = gpt.forward(&tokens).unwrap();
    assert_eq!(logits.dims(), [1, 3, 7]);
    let loss = loss::cross_entropy(&logits, &tokens).unwrap();
    let gradients = loss.backward().unwrap();
    gradients.require(&gpt.parameters().iter().map(Param::leaf).collect::<Vec<_>>()).unwrap();
}

/// Reading a sequence in two parts, with the state passed on, equals reading it at once; also with several layers.
#[test]
fn a_recurrent_layer_resumes_from_its_state() {
    fn check<C: RecurrentCell>(init: &Init<Cpu>) {
        let config = RecurrentConfig { layers: 2, ..RecurrentConfig::new(3, 4) };
        let layer = Recurrent::<Cpu, C>::new(init, config).unwrap();
        let x = uniform(&[2, 6, 3], 9);
        let whole = layer.run(&x, None).unwrap();
        let first = layer.run(&x.narrow(1, 0, 2).unwrap(), None).unwrap();
        let second = layer.run(&x.narrow(1, 2, 4).unwrap(), Some(&first.state)).unwrap();
        same(&whole.output, &cat(&[&first.output, &second.output], 1).unwrap());
        assert_eq!(whole.state.len(), C::STATES);
        whole.state.iter().zip(&second.state).for_each(|(a, b)| same(a, b));
        same(&whole.output.select(1, 5).unwrap(), &whole.state[0].select(0, 1).unwrap());
    }
    check::<RnnCell>(&init());
    check::<LstmCell>(&init());
    check::<GruCell>(&init());
    check::<GruResetFirstCell>(&init());
}

/// The formula of ONNX's `GRU` with `linear_before_reset = 0`, in loops.
#[test]
fn a_gru_that_resets_before_the_product() {
    let layer = GruResetFirst::new(&init(), RecurrentConfig::new(3, 4)).unwrap();
    let x = uniform(&[1, 3, 3], 5);
    let [w, u, b, c] = &layer.parameters().iter().map(|p| f64s(&p.var())).collect::<Vec<_>>()[..] else { panic!() };
    let values = f64s(&x);
    let mut h = [0.0; 4];
    for t in 0..3 {
        let part = |row: usize, by: &[f64; 4]| {
            let input: f64 = (0..3).map(|i| w[row * 3 + i] * values[t * 3 + i]).sum();
            input + b[row] + c[row] + (0..4).map(|j| u[row * 4 + j] * by[j]).sum::<f64>()
        };
        let gate = |row: usize| 1.0 / (1.0 + (-part(row, &h)).exp());
        let reset: [f64; 4] = std::array::from_fn(|k| gate(k) * h[k]);
        let next = std::array::from_fn(|k| {
            let z = gate(4 + k);
            (1.0 - z) * part(8 + k, &reset).tanh() + z * h[k]
        });
        h = next;
    }
    let got = f64s(&layer.run(&x, None).unwrap().state[0]);
    assert!(got.iter().zip(h).all(|(g, w)| (g - w).abs() < 1e-6), "{got:?}, expected {h:?}");
}

/// A layer that reads backwards alone is one that reads the reversed sequence, reversed.
#[test]
fn a_layer_that_reads_backwards() {
    let (one, other) = (RecurrentConfig { reverse: true, ..RecurrentConfig::new(3, 4) }, RecurrentConfig::new(3, 4));
    let (backward, forward) = (Lstm::new(&init(), one).unwrap(), Lstm::new(&init(), other).unwrap());
    assert!(backward.named_parameters().iter().all(|(n, _)| n.ends_with("_l0_reverse")));
    let x = uniform(&[2, 5, 3], 6);
    let (a, b) = (backward.run(&x, None).unwrap(), forward.run(&x.flip(&[1]).unwrap(), None).unwrap());
    same(&a.output, &b.output.flip(&[1]).unwrap());
    same(&a.state[1], &b.state[1]);
    let both = RecurrentConfig { reverse: true, bidirectional: true, ..RecurrentConfig::new(3, 4) };
    assert!(message(Lstm::new(&init(), both)).contains("`reverse`"));
}

/// The backward direction of a bidirectional layer is the forward direction on the reversed sequence.
#[test]
fn a_bidirectional_layer_reads_both_ways() {
    let config = RecurrentConfig { bidirectional: true, layers: 2, dropout: 0.5, ..RecurrentConfig::new(3, 4) };
    let layer = Gru::new(&init(), config).unwrap();
    let names: Vec<String> = layer.named_parameters().into_iter().map(|(n, _)| n).collect();
    assert_eq!(names.len(), 16);
    assert_eq!(
        names[4..9],
        ["weight_ih_l0_reverse", "weight_hh_l0_reverse", "bias_ih_l0_reverse", "bias_hh_l0_reverse", "weight_ih_l1"]
    );
    layer.eval();
    let x = uniform(&[2, 5, 3], 3);
    let out = layer.run(&x, None).unwrap();
    assert_eq!(out.output.dims(), [2, 5, 8]);
    assert_eq!(out.state[0].dims(), [4, 2, 4]);
    same(&out.output.select(1, 0).unwrap().narrow(1, 4, 4).unwrap(), &out.state[0].select(0, 3).unwrap());

    let one = Gru::new(&init(), RecurrentConfig { bidirectional: true, ..RecurrentConfig::new(3, 4) }).unwrap();
    let forward = Gru::new(&init(), RecurrentConfig::new(3, 4)).unwrap();
    let reversed =
        one.state_dict().unwrap().into_iter().filter_map(|(n, t)| Some((n.strip_suffix("_reverse")?.to_string(), t)));
    forward.load_state_dict(reversed.collect(), true).unwrap();
    let backward = forward.forward(&x.flip(&[1]).unwrap()).unwrap().flip(&[1]).unwrap();
    same(&one.forward(&x).unwrap().narrow(2, 4, 4).unwrap(), &backward);
}

/// `h' = tanh(W x + b + U h + c)`, one step at a time.
#[test]
fn the_plain_recurrent_layer_by_its_formula() {
    use numcore::ops::MatmulOps;
    let layer = Rnn::new(&init(), RecurrentConfig::new(3, 4)).unwrap();
    let [w, u, b, c]: [V; 4] = layer.parameters().iter().map(Param::var).collect::<Vec<_>>().try_into().unwrap();
    let x = uniform(&[2, 3, 3], 6);
    let mut h = Var::new(Tensor::zeros(&cpu(), [2, 4], DType::F32).unwrap());
    let out = layer.forward(&x).unwrap();
    for t in 0..3 {
        let input = x.select(1, t).unwrap().linear(&w, Some(&b)).unwrap();
        h = input.add(&h.linear(&u, Some(&c)).unwrap()).unwrap().tanh().unwrap();
        same(&out.select(1, t).unwrap(), &h);
    }
}

#[test]
fn activations_apply_the_method_of_their_name() {
    let x = uniform(&[20], 8).mul(4.0).unwrap();
    let check =
        |layer: &dyn Forward<Cpu>, want: Result<V>| assert_eq!(f64s(&layer.forward(&x).unwrap()), f64s(&want.unwrap()));
    use numcore::fused::NnOps;
    check(&Relu, x.relu());
    check(&Gelu, x.gelu());
    check(&Silu, x.silu());
    check(&LeakyRelu { slope: 0.1 }, x.leaky_relu(0.1));
    check(&Elu { alpha: 0.5 }, x.elu(0.5));
    check(&LogSoftmax { axis: -1 }, x.log_softmax(-1));
    check(&Identity, Ok(x.clone()));
}

/// Weights and biases start within the bounds that PyTorch's have, and no closer to zero than chance allows.
#[test]
fn first_values_have_their_bounds() {
    let reach = |p: &Param<Cpu>| p.value().unwrap().abs().unwrap().amax(&[], false).unwrap().item().unwrap();
    let within =
        |p: &Param<Cpu>, bound: f64| assert!(reach(p) <= bound && reach(p) > 0.9 * bound, "{}, not {bound}", reach(p));
    let init = &init();
    let linear = Linear::new(init, 400, 200).unwrap();
    within(&linear.weight, 0.05);
    within(linear.bias.as_ref().unwrap(), 0.05);
    let conv = Conv2d::new(init, 8, 300, [5, 5], ConvOptions { groups: 2, ..Default::default() }).unwrap();
    within(&conv.weight, 0.1);
    within(conv.bias.as_ref().unwrap(), 0.1);
    let gru = Gru::new(init, RecurrentConfig::new(3, 100)).unwrap();
    gru.parameters().iter().for_each(|p| within(p, 0.1));
    let attention = MultiHeadAttention::new(init, 60, 2).unwrap();
    within(&attention.in_proj_weight, (6.0f64 / 240.0).sqrt());
    assert_eq!(reach(attention.in_proj_bias.as_ref().unwrap()), 0.0);
    assert_eq!(reach(attention.out_proj.bias.as_ref().unwrap()), 0.0);
}

#[test]
fn a_transposed_weight_computes_the_same() {
    let (linear, x) = (Linear::new(&init(), 5, 3).unwrap(), uniform(&[2, 4, 5], 3));
    let transposed = TransposedLinear::new(&init(), 5, 3).unwrap();
    transposed.weight.set(linear.weight.value().unwrap().t().unwrap().contiguous().unwrap()).unwrap();
    transposed.bias.as_ref().unwrap().set(linear.bias.as_ref().unwrap().value().unwrap()).unwrap();
    same(&transposed.forward(&x).unwrap(), &linear.forward(&x).unwrap());
    assert_eq!(transposed.weight.shape().dims(), [5, 3]);
    assert!(TransposedLinear::new(&init(), 5, 3).unwrap().without_bias().bias.is_none());
}

#[test]
fn rotary_tables_are_rope_at_any_positions() {
    use numcore::fused::{NnOps, RopeOptions};
    let x = uniform(&[2, 3, 5, 6], 4);
    let positions = Var::new(Tensor::from_slice(&cpu(), [2, 5], &[3i64, 4, 5, 6, 7, 0, 1, 0, 1, 2]).unwrap());
    let tables = Rotary::new(100.0, 4).tables(&positions, DType::F32).unwrap();
    let options = RopeOptions { base: 100.0, positions: Some(&positions), dim: Some(4), ..Default::default() };
    same(&tables.rotate(&x).unwrap(), &x.rope_with(options).unwrap());
    let range = Var::new(Tensor::arange(&cpu(), 2i64, 1i64, 5, DType::I64).unwrap());
    let tables = Rotary::new(100.0, 6).tables(&range, DType::F32).unwrap();
    same(&tables.rotate(&x).unwrap(), &x.rope(100.0, 2).unwrap());
    assert!(Rotary::new(10.0, 4).tables(&uniform(&[1, 1, 1], 0), DType::F32).is_err());
}

#[test]
fn grouped_queries_are_repeated_keys() {
    let config = GroupedQueryConfig {
        width: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        fused: false,
        bias: true,
        output_bias: false,
        head_norm: None,
        window: None,
    };
    let grouped = GroupedQueryAttention::new(&init(), config).unwrap();
    let full = GroupedQueryAttention::new(&init(), GroupedQueryConfig { kv_heads: 4, ..config }).unwrap();
    for ((name, a), (_, b)) in grouped.named_parameters().iter().zip(full.named_parameters()) {
        let value = a.value().unwrap();
        let heads = |x: &Tensor<Cpu>| {
            let parts: Vec<_> = [0, 3].map(|at| x.narrow(0, at, 3).unwrap()).into();
            cat(&[&parts[0], &parts[0], &parts[1], &parts[1]], 0).unwrap()
        };
        b.set(if value.shape() == &b.shape() { value } else { heads(&value) })
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let (x, residual) = (uniform(&[2, 5, 8], 6), uniform(&[2, 5, 8], 7));
    let out =
        |layer: &GroupedQueryAttention<Cpu>| layer.attend(layer.project(&x, None).unwrap(), None, &residual).unwrap();
    same(&out(&grouped), &out(&full));
    for (wrong, due) in [
        (GroupedQueryConfig { kv_heads: 3, ..config }, "3 heads of keys do not divide 4"),
        (GroupedQueryConfig { kv_heads: 0, ..config }, "0 heads of keys"),
        (GroupedQueryConfig { fused: true, ..config }, "one projection"),
        (GroupedQueryConfig { window: Some(0), ..config }, "window of 0"),
        (GroupedQueryConfig { head_dim: 0, ..config }, "at least 1 wide"),
    ] {
        let error = message(GroupedQueryAttention::new(&init(), wrong));
        assert!(error.contains(due), "{error}");
    }
}

/// A row that is frozen gets no gradient and keeps its value.
#[test]
fn a_frozen_row_keeps_its_value() {
    let table = Embedding::new(&init(), 4, 2).unwrap();
    let before = table.weight.value().unwrap();
    let table = table.with_frozen_row(2).unwrap();
    same(&Var::new(table.weight.value().unwrap()), &Var::new(before));
    let indices = Var::new(Tensor::from_slice(&cpu(), [3], &[2i64, 1, 2]).unwrap());
    let loss = table.forward(&indices).unwrap().sum(&[], false).unwrap();
    let grads = loss.backward().unwrap();
    assert_eq!(grads.get(&table.weight.leaf()).unwrap().to_f64s().unwrap(), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    assert!(message(Embedding::new(&init(), 4, 2).unwrap().with_frozen_row(4)).contains("padding index 4"));
}

/// An adapter that doubles the output.
#[derive(Module)]
#[module(crate = "::nn")]
struct Doubled<R: numcore::Runtime> {
    scale: Param<R>,
}

impl<R: numcore::Runtime> Adapter<R> for Doubled<R> {
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        layer.plain(x)?.mul(&self.scale.var())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[test]
fn an_adapter_stands_in_for_a_layer_of_any_model() {
    let config = GptConfig { vocab: 5, context: 4, layers: 2, heads: 1, width: 4, ..Default::default() };
    let model = Gpt::new(&init(), config).unwrap();
    let names = |model: &Gpt<Cpu>| model.named_parameters().into_iter().map(|(n, _)| n).collect::<Vec<_>>();
    let (before, mut slots) = (names(&model), Vec::new());
    walk(&model, |name, entry| {
        if let ModuleEntry::Adapter(slot) = entry {
            slots.push((name.to_string(), slot.clone()));
        }
    });
    assert_eq!(slots.len(), 9);
    let slot = slots.iter().find(|(name, _)| name == "blocks.1.fc2").unwrap().1.clone();
    let scale = Param::new(Tensor::full(&cpu(), [1], DType::F32, 2.0).unwrap()).unwrap();
    let fc2 = &model.blocks[1].fc2;
    let (x, residual) = (uniform(&[1, 3, 16], 3), uniform(&[1, 3, 4], 8));
    let (plain, onto) = (fc2.forward(&x).unwrap(), fc2.forward_onto(&x, &residual).unwrap());
    assert!(slot.replace(Some(std::sync::Arc::new(Doubled { scale }))).is_none());
    same(&fc2.forward(&x).unwrap(), &plain.mul(2.0).unwrap());
    same(&fc2.forward_onto(&x, &residual).unwrap(), &onto.add(&plain).unwrap());
    let added: Vec<String> = names(&model).into_iter().filter(|n| !before.contains(n)).collect();
    assert_eq!(added, ["blocks.1.fc2.scale"]);
    assert!(slot.replace(None).unwrap().as_any().is::<Doubled<Cpu>>());
    assert_eq!(names(&model), before);
}
