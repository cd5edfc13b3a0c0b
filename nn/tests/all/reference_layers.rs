//! Layers and the CTC loss against PyTorch's values and gradients.

use autograd::{Var, grad, hvp, manual_seed};
use nn::{
    loss::{CtcOptions, Reduction, ctc},
    *,
};
use numcore::{
    DType, Result, Tensor,
    fused::{ConvOptions, NnOps},
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps, cat},
};
use runtime_cpu::Cpu;

use crate::common::{V, cpu, f64s, made};

fn init() -> Init<Cpu> {
    Init::new(&cpu(), 0).dtype(DType::F64)
}

fn indices(of: &[i64]) -> V {
    Var::new(Tensor::from_slice(&cpu(), [of.len()], of).unwrap())
}

/// Gives parameter `k` of a layer the values of input `k + 1`.
fn filled<L: Module<Cpu>>(layer: L) -> L {
    for (k, p) in layer.parameters().iter().enumerate() {
        p.set(made(k + 1, p.shape().dims()).value().unwrap()).unwrap();
    }
    layer
}

/// The reference values, and those that no test has asked for yet.
struct References(serde_json::Map<String, serde_json::Value>);

impl References {
    fn read() -> Self {
        References(serde_json::from_str(include_str!("reference_layers.json")).unwrap())
    }

    /// Checks an output, and the gradients of its sum with the weights of input 9.
    fn check(&mut self, name: &str, y: Result<V>, inputs: &[&V], parameters: &[Param<Cpu>]) {
        let want = self.0.remove(name).unwrap_or_else(|| panic!("no reference values for {name}"));
        let of = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
        let close = |what: &str, got: &[f64], want: &[f64]| {
            let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(
                got.len() == want.len() && worst < 1e-11,
                "{name}: {what} is off by {worst}: {got:?}, not {want:?}"
            );
        };
        let y = y.unwrap();
        close("the output", &f64s(&y), &of(&want["out"]));
        let loss = y.mul(&made(9, y.value().unwrap().dims()).detach()).unwrap().sum_all().unwrap();
        let vars: Vec<V> = parameters.iter().map(Param::var).collect();
        let leaves: Vec<&V> = inputs.iter().copied().chain(&vars).collect();
        for (k, got) in grad(&[&loss], &leaves).unwrap().iter().enumerate() {
            close(&format!("gradient {k}"), &f64s(got.as_ref().unwrap()), &of(&want["gradients"][k]));
        }
    }

    fn layer(&mut self, name: &str, layer: impl Forward<Cpu>, x: &V) {
        let layer = filled(layer);
        self.check(name, layer.forward(x), &[x], &layer.parameters());
    }
}

#[test]
fn layers_are_pytorchs() {
    let mut all = References::read();
    all.0.retain(|name, _| !name.starts_with("ctc"));
    let image = made(0, &[2, 3, 4, 5]);
    all.layer("instance_norm", InstanceNorm::new(3), &image);
    all.layer("instance_norm_affine", InstanceNorm::affine(&init(), 3).unwrap(), &image);
    all.layer("batch_norm_plain", BatchNorm::new(&init(), 3).unwrap().without_affine(), &image);
    let layer = filled(ConditionalBatchNorm::new(&init(), 3, 4).unwrap());
    all.check("conditional", layer.forward_with(&image, &indices(&[2, 0])), &[&image], &layer.parameters());

    let (index, offsets) = (indices(&[1, 4, 2, 2, 0, 3, 1]), [0, 3, 3, 4]);
    for (mode, name) in [(BagMode::Sum, "sum"), (BagMode::Mean, "mean"), (BagMode::Max, "max")] {
        let bag = filled(EmbeddingBag::new(&init(), 5, 3, mode).unwrap());
        all.check(&format!("bag_{name}"), bag.forward_bags(&index, &offsets, None), &[], &bag.parameters());
        let bag = filled(bag.with_padding_idx(2).unwrap());
        all.check(&format!("bag_{name}_padded"), bag.forward_bags(&index, &offsets, None), &[], &bag.parameters());
    }
    let bag = filled(EmbeddingBag::new(&init(), 5, 3, BagMode::Sum).unwrap());
    let weights = made(0, &[7]);
    all.check("bag_weighted", bag.forward_bags(&index, &offsets, Some(&weights)), &[&weights], &bag.parameters());

    let (x, z) = (made(0, &[2, 5, 3]), made(5, &[2, 5, 4]));
    let layer = filled(Bilinear::new(&init(), [3, 4], 2).unwrap());
    all.check("bilinear", layer.forward(&x, &z), &[&x, &z], &layer.parameters());
    all.layer("squeeze_excitation", SqueezeExcitation::new(&init(), 3, 2).unwrap(), &image);

    let linear = || Linear::new(&init(), 3, 4).unwrap();
    let conv = || Conv2d::new(&init(), 3, 2, [3, 3], ConvOptions::default()).unwrap();
    let rows = made(0, &[5, 3]);
    all.layer("weight_norm_linear", WeightNorm::new(linear()).unwrap(), &rows);
    all.layer("weight_norm_conv", WeightNorm::new(conv()).unwrap(), &image);
    let transposed = ConvTranspose2d::new(&init(), 3, 2, [3, 3], ConvOptions::default()).unwrap();
    spectral(&mut all, "spectral_norm_linear", SpectralNorm::new(&init(), linear()).unwrap(), &rows);
    spectral(&mut all, "spectral_norm_conv", SpectralNorm::new(&init(), conv()).unwrap(), &image);
    spectral(&mut all, "spectral_norm_transposed", SpectralNorm::along(&init(), transposed, 1).unwrap(), &image);

    recurrent::<RnnCell>(&mut all, "rnn_lengths");
    recurrent::<LstmCell>(&mut all, "lstm_lengths");
    recurrent::<GruCell>(&mut all, "gru_lengths");
    assert!(all.0.is_empty(), "not compared: {:?}", all.0.keys());
}

fn spectral<L: Forward<Cpu>>(all: &mut References, name: &str, norm: SpectralNorm<Cpu, L>, x: &V) {
    let mut norm = filled(norm);
    norm.iterations = 2;
    for (k, buffer) in [(5, &norm.weight_u), (6, &norm.weight_v)] {
        buffer.set(made(k, buffer.spec().shape.dims()).value().unwrap()).unwrap();
        buffer.set(buffer.value().div(&buffer.value().norm_all().unwrap()).unwrap()).unwrap();
    }
    all.check(name, norm.forward(x), &[x], &norm.parameters());
    norm.eval();
    let before = norm.weight_u.value().to_f64s().unwrap();
    all.check(&format!("{name}_in_use"), norm.forward(x), &[x], &norm.parameters());
    assert_eq!(norm.weight_u.value().to_f64s().unwrap(), before, "in use the vectors stay");
}

fn recurrent<C: RecurrentCell>(all: &mut References, name: &str) {
    let config = RecurrentConfig { layers: 2, bidirectional: true, ..RecurrentConfig::new(3, 2) };
    let layer: Recurrent<Cpu, C> = filled(Recurrent::new(&init(), config).unwrap());
    let x = made(0, &[3, 4, 3]);
    let read = layer.run_lengths(&x, &[2, 4, 1], None).unwrap();
    let parts = [&read.output].into_iter().chain(&read.state).map(|y| y.flatten(0, -1).unwrap()).collect::<Vec<_>>();
    let y = cat(&parts.iter().collect::<Vec<_>>(), 0);
    all.check(name, y, &[&x], &layer.parameters());
    // Values after the end have no effect, whatever they are.
    let ends = Var::new(
        Tensor::from_slice(&cpu(), [3, 4, 1], &[2, 4, 1].map(|len| [0, 1, 2, 3].map(|t| t < len)).concat()).unwrap(),
    );
    let padded = x.where_cond(&ends, f64::NAN).unwrap();
    let slopes = grad(&[&layer.run_lengths(&padded, &[2, 4, 1], None).unwrap().output.sum_all().unwrap()], &[&x]);
    assert!(f64s(slopes.unwrap()[0].as_ref().unwrap()).iter().all(|g| g.is_finite()));
    // An empty sequence keeps the state that it began with.
    let start: Vec<V> = (0..C::STATES).map(|k| made(3 + k, &[4, 3, 2])).collect();
    let read = layer.run_lengths(&x, &[0, 4, 4], Some(&start)).unwrap();
    for (end, start) in read.state.iter().zip(&start) {
        assert_eq!(f64s(&end.select(1, 0).unwrap()), f64s(&start.select(1, 0).unwrap()));
    }
    assert!(f64s(&read.output.select(0, 0).unwrap()).iter().all(|&h| h == 0.0));
    let error = layer.run_lengths(&x, &[5, 1, 1], None).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("0..=4") && error.contains("[5, 1, 1]"), "{error}");
}

#[test]
fn ctc_is_pytorchs() {
    let mut all = References::read();
    all.0.retain(|name, _| name.starts_with("ctc"));
    let logits = made(0, &[4, 7, 5]);
    let labels: [&[usize]; 4] = [&[1, 2, 2], &[3], &[], &[4, 1, 4, 4]];
    let log_probs = logits.log_softmax(-1).unwrap();
    for (name, reduction) in [("none", Reduction::None), ("sum", Reduction::Sum), ("mean", Reduction::Mean)] {
        for blank in [0, 2] {
            let other: Vec<Vec<usize>> =
                labels.iter().map(|l| l.iter().map(|&l| if l == blank { 0 } else { l }).collect()).collect();
            let labels: Vec<&[usize]> = other.iter().map(|l| &l[..]).collect();
            let options = CtcOptions { blank, reduction, ..Default::default() };
            let loss = ctc(&log_probs, &[7, 3, 5, 6], &labels, options);
            all.check(&format!("ctc_{name}_{blank}"), loss, &[&logits], &[]);
        }
    }
    let options = CtcOptions { zero_infinity: true, reduction: Reduction::None, ..Default::default() };
    all.check("ctc_short", ctc(&log_probs, &[7, 3, 5, 4], &labels, options), &[&logits], &[]);
    assert!(all.0.is_empty(), "not compared: {:?}", all.0.keys());

    let none = CtcOptions { reduction: Reduction::None, ..Default::default() };
    let losses = ctc(&log_probs, &[0, 0, 0, 7], &labels, none).unwrap();
    assert_eq!(f64s(&losses)[..3], [f64::INFINITY, f64::INFINITY, 0.0]);
    // A class that is impossible gives finite gradients where another alignment is possible.
    let certain =
        log_probs.add(&indices(&[0, 0, 1, 0, 0]).eq(1.0).unwrap().to_dtype(DType::F64).unwrap().mul(-1e300).unwrap());
    let loss = ctc(&certain.unwrap(), &[7; 4], &[&[1], &[3], &[], &[4]], CtcOptions::default()).unwrap();
    assert!(f64s(grad(&[&loss], &[&logits]).unwrap()[0].as_ref().unwrap()).iter().all(|g| g.is_finite()));
    let second =
        hvp(|x| ctc(&x[0].log_softmax(-1)?, &[7, 3, 5, 6], &labels, CtcOptions::default()), &[&logits], &[&logits]);
    assert!(f64s(&second.unwrap()[0]).iter().all(|h| h.is_finite()));
    let broken = log_probs.mul(f64::NAN).unwrap();
    assert!(f64s(&ctc(&broken, &[7; 4], &labels, options).unwrap()).iter().all(|loss| loss.is_nan()));
    // The loss of half precision is computed in f32.
    let half = ctc(&log_probs.to_dtype(DType::BF16).unwrap(), &[7, 3, 5, 6], &labels, none).unwrap();
    let rounded = log_probs.to_dtype(DType::BF16).unwrap().to_dtype(DType::F64).unwrap();
    let wide = ctc(&rounded, &[7, 3, 5, 6], &labels, none).unwrap();
    assert_eq!(half.dtype(), DType::F32);
    for (half, wide) in f64s(&half).iter().zip(f64s(&wide)) {
        assert!((half - wide).abs() <= 1e-6 * wide.abs(), "{half}, not {wide}");
    }
    let says = |result: Result<V>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("ctc") && error.contains(words), "{error}");
    };
    says(ctc(&log_probs, &[7; 3], &labels, none), "got 3 and 4");
    says(ctc(&log_probs, &[8; 4], &labels, none), "an example has 8");
    says(ctc(&log_probs, &[7; 4], &[&[0], &[], &[], &[]], none), "which is the blank");
    says(ctc(&log_probs, &[7; 4], &[&[5], &[], &[], &[]], none), "has 5 classes");
}

#[test]
fn larger_parts_are_dropped_as_one() {
    manual_seed(7);
    let x = Var::new(Tensor::<Cpu>::ones(&cpu(), [8, 6, 5], DType::F32).unwrap());
    for (unit, groups) in [(DropUnit::Channel, 48), (DropUnit::Example, 8)] {
        let dropout = Dropout::new(0.5).unwrap().of(unit);
        let y = f64s(&dropout.forward(&x).unwrap());
        let firsts: Vec<f64> = y.chunks(240 / groups).map(|part| part[0]).collect();
        assert!(y.chunks(240 / groups).all(|part| part.iter().all(|&v| v == part[0])), "{unit:?}: {y:?}");
        assert!(firsts.contains(&0.0) && firsts.contains(&2.0), "{unit:?}: {firsts:?}");
        ModuleExt::<Cpu>::eval(&dropout);
        assert_eq!(f64s(&dropout.forward(&x).unwrap()), f64s(&x));
    }
    let scalar = x.sum_all().unwrap();
    for unit in [DropUnit::Channel, DropUnit::Example] {
        let error = Dropout::new(0.5).unwrap().of(unit).forward(&scalar).unwrap_err().to_string();
        assert!(error.contains("dropout"), "{error}");
    }
}

#[test]
fn positions_are_sines_and_cosines() {
    let table = Embedding::sinusoidal(&init(), 6, 5).unwrap();
    assert!(!table.weight.requires_grad());
    let y = f64s(&table.forward(&indices(&[0, 3])).unwrap());
    assert_eq!(y[..5], [0.0, 1.0, 0.0, 1.0, 0.0]);
    let second = 3.0 * 10000f64.powf(-0.4);
    for (got, want) in y[5..].iter().zip([3f64.sin(), 3f64.cos(), second.sin(), second.cos()]) {
        assert!((got - want).abs() < 1e-15, "{y:?}");
    }
}

#[test]
fn misuse_is_told() {
    let says = |result: Result<V>, words: &[&str]| {
        let error = result.unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    let (rows, image) = (made(0, &[5, 3]), made(0, &[2, 3, 4, 5]));
    says(InstanceNorm::new(3).forward(&rows), &["instance_norm", "[5, 3]"]);
    says(InstanceNorm::new(4).forward(&image), &["[N, 4, ..]", "[2, 3, 4, 5]"]);
    let layer = ConditionalBatchNorm::new(&init(), 3, 4).unwrap();
    says(layer.forward_with(&image, &indices(&[1])), &["conditional_batch_norm", "[1]"]);
    let bag = EmbeddingBag::new(&init(), 5, 3, BagMode::Mean).unwrap();
    says(bag.forward_bags(&indices(&[1, 2]), &[1, 2], None), &["begin with 0"]);
    says(bag.forward_bags(&indices(&[1, 2]), &[0, 3], None), &["embedding_bag", "[0, 3]"]);
    says(bag.forward_bags(&indices(&[1, 2]), &[0], Some(&made(1, &[2]))), &["BagMode::Sum"]);
    says(bag.forward(&indices(&[1, 2]), None), &["[N, L]"]);
    for mode in [BagMode::Sum, BagMode::Mean, BagMode::Max] {
        let bag = EmbeddingBag::new(&init(), 5, 3, mode).unwrap();
        assert_eq!(f64s(&bag.forward_bags(&indices(&[]), &[0, 0], None).unwrap()), [0.0; 6]);
    }
    let layer = Bilinear::new(&init(), [3, 4], 2).unwrap();
    says(layer.forward(&rows, &made(1, &[4, 4])), &["bilinear", "[5, 3]", "[4, 4]"]);
    let error = WeightNorm::<Cpu, _>::new(Identity).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("weight_norm"), "{error}");
    let error = SpectralNorm::new(&init(), LayerNorm::new(&init(), 3).unwrap()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("two axes") && error.contains("[3]"), "{error}");
}
