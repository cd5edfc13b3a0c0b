//! Shapes of outputs, sizes that do not fit, first values, and activations by name.

use autograd::Var;
use nn::*;
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, ReduceOps},
};
use runtime_cpu::Cpu;

use super::{init, message, uniform};
use crate::common::{V, cpu, f64s};

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
    assert!(message(Dropout::new(1.0)).contains("must be in [0, 1)"));
    assert!(message(Embedding::new(init, 3, 2).unwrap().with_padding_idx(3)).contains("padding index is 3"));
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
    let reach = |p: &Param<Cpu>| p.value().unwrap().abs().unwrap().amax_all().unwrap().item().unwrap();
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
