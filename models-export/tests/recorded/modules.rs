//! Modules whose op calls are recorded: layers of many kinds, and the reference models.

use std::{path::Path, sync::Arc};

use autograd::Var;
use models::{Bert, BertInputs, Clip, ConvNext, Decoder, Pooling, Pretrained, ResNet, T5, Vit, Whisper};
use nn::{
    BatchNorm, Conv2d, ConvTranspose2d, Embedding, Forward, Gpt, GptConfig, Gru, Init, LayerNorm, Linear, Lstm,
    MaxPool2d, Module, ModuleExt, RecurrentConfig, RmsNorm,
};
use numcore::{
    DType, Result, Tensor,
    fused::{ConvOptions, NnOps, SdpaOptions},
    ops::{
        DistanceOps, Interpolate, InterpolateOps, Interpolation, JoinOps, MatmulOps, PointwiseOps, ReduceOps, Resize,
        ScanOps, SortOps, ViewOps, cat,
    },
    pointwise::Program,
    safetensors,
};
use runtime_cpu::Cpu;

type V = Var<Cpu>;

/// A forward pass.
pub type Pass = dyn Fn(&[V]) -> Result<Vec<V>>;

/// A module with example inputs and its forward pass.
pub struct Recorded {
    pub name: &'static str,
    pub module: Box<dyn Module<Cpu>>,
    pub inputs: Vec<(&'static str, Tensor<Cpu>)>,
    pub forward: Box<Pass>,
    /// True if the first axis of all inputs is a batch.
    pub has_batch: bool,
}

fn recorded<M: Module<Cpu> + 'static>(
    name: &'static str,
    module: M,
    inputs: Vec<(&'static str, Tensor<Cpu>)>,
    forward: impl Fn(&M, &[V]) -> Result<V> + 'static,
) -> Recorded {
    let module = Arc::new(module);
    module.eval();
    let own = module.clone();
    let forward = Box::new(move |x: &[V]| Ok(vec![forward(&own, x)?]));
    Recorded { name, module: Box::new(module), inputs, forward, has_batch: true }
}

/// A network of the shape of a U: down by a strided convolution, up by a transposed one and by interpolation.
#[derive(Module)]
#[module(runtime = Cpu)]
struct SmallUNet {
    down: Conv2d<Cpu>,
    norm: BatchNorm<Cpu>,
    up: ConvTranspose2d<Cpu>,
    out: Conv2d<Cpu>,
}

impl Forward<Cpu> for SmallUNet {
    fn forward(&self, x: &V) -> Result<V> {
        let low = self.norm.forward(&self.down.forward(x)?)?.silu()?;
        let up = self.up.forward(&low)?;
        let smooth = Interpolate::new(Interpolation::Linear);
        let near = Interpolate::new(Interpolation::Nearest);
        let size = [x.dims()[2], x.dims()[3]];
        let resized =
            low.interpolate(Resize::Size(&size), smooth)?.add(&low.interpolate(Resize::Size(&size), near)?)?;
        self.out.forward(&cat(&[x, &up, &resized], 1)?)
    }
}

/// A table that is the head's weight too, and elementwise programs of its own.
#[derive(Module)]
#[module(runtime = Cpu)]
struct TiedHead {
    table: Embedding<Cpu>,
    inner: Linear<Cpu>,
    norm: RmsNorm<Cpu>,
}

impl TiedHead {
    fn run(&self, ids: &V) -> Result<V> {
        let x = self.table.forward(ids)?;
        let x = self.norm.forward(&self.inner.forward(&x)?)?;
        // Positions, comparisons, and functions of which the format has only parts.
        let bent = Program::build("bent", 1, 1, |b, x, s| {
            let x = x[0];
            let even = (b.index() % 2).eq(0);
            let near = x.expm1() - x.abs().log1p() + (x * 3.0).trunc() + (x % 0.7);
            vec![even.select(near * s[0], x.max(-0.5).exp2() + (x.abs() + 1.0).log2())]
        });
        x.apply_program(&bent, &[], &[0.25.into()])?.matmul(&self.table.weight.var().t()?)
    }
}

/// Views, reductions, sorting and scans.
fn bends(x: &V) -> Result<V> {
    let windows = x.unfold(1, 3, 2, 1)?.mean(&[-1])?;
    let (sorted, order) = x.sort(-1, true)?;
    let flipped = x.flip(&[1])?.slice(1, 1, 3, 2)?.pad(&[(0, 0), (1, 2)], 0.0)?;
    let scaled = x.cumsum(1)?.mul(&x.amax(&[0])?)?.softmax(-1)?;
    let top = x.argmax(1)?.to_dtype(DType::F32)?.reshape([4, 1])?;
    let parts = [&windows, &sorted, &order.to_dtype(DType::F32)?, &flipped, &scaled, &top];
    let lower = x.matmul(&x.t()?)?.tril(0)?;
    let spread = x.var(&[1], 0)?.reshape([4, 1])?.add(&x.log_softmax(-1)?)?;
    let bits = x.gt(0.0)?.to_dtype(DType::F32)?;
    cat(&parts.into_iter().chain([&lower, &spread, &bits]).collect::<Vec<_>>(), 1)
}

/// Attention with heads that share keys, a window, a soft cap, a mask, and queries that see no key.
fn attends(x: &[V]) -> Result<V> {
    let mask = x[3].gt(0.0)?;
    let options = SdpaOptions { mask: Some(&mask), softcap: Some(2.0), ..Default::default() };
    let masked = x[0].attention_with(&x[1], &x[2], options)?;
    let options = SdpaOptions { window: (Some(1), Some(0)), lower_right: true, ..Default::default() };
    let near = x[0].attention_with(&x[1], &x[2], options)?;
    let causal = x[0].attention_with(&x[1], &x[2], SdpaOptions { causal: true, ..Default::default() })?;
    masked.add(&near)?.add(&causal)
}

fn normal(shape: &[usize], seed: u64) -> Tensor<Cpu> {
    Tensor::normal(&Cpu::with_threads(1), shape, DType::F32, 0.0, 1.0, seed).unwrap()
}

fn whole(shape: &[usize], below: i64) -> Tensor<Cpu> {
    let count: usize = shape.iter().product();
    let values: Vec<i64> = (0..count as i64).map(|k| (k * 7 + 3) % below).collect();
    Tensor::from_slice(&Cpu::with_threads(1), shape, &values).unwrap()
}

/// Layers and small networks.
pub fn layers() -> Vec<Recorded> {
    let init = &Init::new(&Cpu::with_threads(1), 3);
    let linear = |i, o| Linear::new(init, i, o).unwrap();
    let stride = |stride| ConvOptions { stride: [stride; 2], padding: [1; 2], ..Default::default() };
    let conv = |i, o, s| Conv2d::new(init, i, o, [3; 2], stride(s)).unwrap();
    let mlp = nn::Sequential::new().push(linear(4, 8)).push(LayerNorm::new(init, 8).unwrap()).push(linear(8, 3));
    let cnn = nn::Sequential::new()
        .push(conv(3, 6, 1))
        .push(batch_norm(init, 6))
        .push(MaxPool2d::new(2))
        .push(nn::AvgPool2d::new(2));
    let unet = SmallUNet {
        down: conv(2, 4, 2),
        norm: batch_norm(init, 4),
        up: ConvTranspose2d::new(init, 4, 3, [2; 2], ConvOptions { stride: [2; 2], ..Default::default() }).unwrap(),
        out: conv(2 + 3 + 4, 2, 1),
    };
    let tied = TiedHead {
        table: Embedding::new(init, 11, 6).unwrap(),
        inner: linear(6, 6),
        norm: RmsNorm::new(init, 6).unwrap(),
    };
    let two = RecurrentConfig { layers: 2, bidirectional: true, ..RecurrentConfig::new(3, 4) };
    let config =
        GptConfig { vocab: 17, context: 8, layers: 2, heads: 2, width: 8, tied_head: true, ..Default::default() };
    vec![
        recorded("mlp", mlp, vec![("x", normal(&[5, 4], 1))], |m, x| m.forward(&x[0])?.gelu()),
        recorded("cnn", cnn, vec![("image", normal(&[2, 3, 8, 8], 2))], |m, x| m.forward(&x[0])),
        recorded("unet", unet, vec![("image", normal(&[1, 2, 6, 8], 3))], |m, x| m.forward(&x[0])),
        recorded("tied", tied, vec![("ids", whole(&[2, 5], 11))], |m, x| m.run(&x[0])),
        recorded("lstm", Lstm::new(init, two).unwrap(), vec![("x", normal(&[2, 4, 3], 4))], |m, x| m.forward(&x[0])),
        recorded("gru", Gru::new(init, two).unwrap(), vec![("x", normal(&[2, 4, 3], 5))], |m, x| m.forward(&x[0])),
        recorded("gpt", Gpt::new(init, config).unwrap(), vec![("ids", whole(&[2, 6], 17))], |m, x| m.forward(&x[0])),
        recorded(
            "attention",
            linear(2, 2),
            vec![
                ("q", normal(&[2, 4, 5, 6], 7)),
                ("k", normal(&[2, 2, 3, 6], 8)),
                ("v", normal(&[2, 2, 3, 4], 9)),
                ("mask", normal(&[2, 1, 5, 3], 10)),
            ],
            |_, x| attends(x),
        ),
        Recorded {
            has_batch: false,
            ..recorded("bends", linear(2, 2), vec![("x", normal(&[4, 7], 6))], |_, x| bends(&x[0]))
        },
    ]
}

fn batch_norm(init: &Init<Cpu>, channels: usize) -> BatchNorm<Cpu> {
    let norm = BatchNorm::new(init, channels).unwrap();
    // Statistics other than those of a new layer.
    for _ in 0..3 {
        norm.forward(&Var::new(normal(&[4, channels, 2, 2], 7))).unwrap();
    }
    norm
}

fn pretrained<M: Pretrained<Cpu> + 'static>(
    name: &'static str,
    dtype: DType,
    inputs: &[(&'static str, &'static str)],
    forward: impl Fn(&M, &[V]) -> Result<V> + 'static,
) -> Recorded {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/references").join(name);
    let cpu = Cpu::with_threads(1);
    let values = safetensors::load(folder.join("reference.safetensors"), &cpu).unwrap();
    let value = |at: &str| values.iter().find(|(name, _)| name == at).unwrap().1.clone();
    let inputs = inputs.iter().map(|(name, at)| (*name, value(at))).collect();
    recorded(name, M::from_pretrained(folder, &Init::new(&cpu, 0).dtype(dtype)).unwrap(), inputs, forward)
}

/// The reference models, with their inputs.
pub fn references() -> Vec<Recorded> {
    let mut all = Vec::new();
    for name in ["bert_mlm", "bert_classifier", "bert_tokens"] {
        let inputs = [("input_ids", "ids"), ("attention_mask", "mask"), ("token_type_ids", "types")];
        all.push(pretrained::<Bert<Cpu>>(name, DType::F32, &inputs, |m, x| {
            m.forward_with(&x[0], &BertInputs { mask: Some(&x[1]), token_types: Some(&x[2]) })
        }));
    }
    for name in ["roberta_mlm", "distilbert_classifier"] {
        all.push(pretrained::<Bert<Cpu>>(
            name,
            DType::F32,
            &[("input_ids", "ids"), ("attention_mask", "mask")],
            |m, x| m.forward_with(&x[0], &BertInputs { mask: Some(&x[1]), token_types: None }),
        ));
    }
    let pooled = pretrained::<Bert<Cpu>>(
        "bert_classifier",
        DType::F32,
        &[("input_ids", "ids"), ("attention_mask", "mask")],
        |m, x| {
            use Pooling::{Cls, Last, Max, Mean, MeanSqrt, WeightedMean};
            let states = m.states(&x[0], &BertInputs { mask: Some(&x[1]), token_types: None })?;
            let all = [Cls, Last, Max, Mean, MeanSqrt, WeightedMean].map(|pooling| pooling.apply(&states, &x[1]));
            cat(&all.into_iter().collect::<Result<Vec<_>>>()?.iter().collect::<Vec<_>>(), 1)?.normalize(1)
        },
    );
    all.push(Recorded { name: "bert_pooled", ..pooled });
    for name in ["resnet_basic", "resnet_bottleneck", "resnet_50"] {
        all.push(pretrained::<ResNet<Cpu>>(name, DType::F32, &[("pixel_values", "pixels")], |m, x| m.forward(&x[0])));
    }
    all.push(pretrained::<ConvNext<Cpu>>("convnext", DType::F32, &[("pixel_values", "pixels")], |m, x| {
        m.forward(&x[0])
    }));
    all.push(pretrained::<Vit<Cpu>>("vit", DType::F32, &[("pixel_values", "pixels")], |m, x| m.forward(&x[0])));
    for name in ["gpt2", "llama_yarn", "mistral", "qwen3", "olmo2", "phi3", "smollm3", "gemma2", "gemma3"] {
        all.push(pretrained::<Decoder<Cpu>>(name, DType::F32, &[("input_ids", "ids")], |m, x| m.forward(&x[0])));
    }
    all.push(pretrained::<Whisper<Cpu>>(
        "whisper",
        DType::F32,
        &[("sounds", "sounds"), ("decoder_input_ids", "begun")],
        |m, x| m.decoder.logits(&x[1], &m.encode(&x[0])?, None),
    ));
    all.push(pretrained::<Clip<Cpu>>("clip", DType::F32, &[("pixel_values", "pixels")], |m, x| m.embed_images(&x[0])));
    all.push(pretrained::<Clip<Cpu>>("clip_old", DType::F32, &[("input_ids", "ids")], |m, x| m.embed_texts(&x[0])));
    // Without scaled scores, roundings of `f32` grow.
    for (name, dtype) in [("t5", DType::F32), ("t5_gated", DType::F64)] {
        let inputs = [("input_ids", "ids"), ("attention_mask", "mask"), ("decoder_input_ids", "begun")];
        all.push(pretrained::<T5<Cpu>>(name, dtype, &inputs, |m, x| {
            m.decoder()?.logits(&x[2], &m.encode(&x[0], Some(&x[1]))?, None)
        }));
    }
    all
}
