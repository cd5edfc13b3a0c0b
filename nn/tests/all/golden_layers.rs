//! Layers against PyTorch's values and gradients.

use crate::common::{Case, Goldens, V, close, cpu};
use autograd::Var;
use nn::*;
use numcore::ops::ViewOps;
use runtime_cpu::Cpu;

/// Loads inputs `1..` of a case into the parameters of a layer, in their order, and checks its output and every
/// gradient.
fn check_layer(case: &Case, layer: &impl Forward<Cpu>) {
    let x = case.input(0);
    let parameters = layer.parameters();
    for (i, p) in parameters.iter().enumerate() {
        p.set(case.get(&format!("in{}", i + 1))).unwrap();
    }
    let vars: Vec<V> = parameters.iter().map(Param::var).collect();
    let mut leaves = vec![(0, &x)];
    leaves.extend(vars.iter().enumerate().map(|(i, v)| (i + 1, v)));
    case.check(&layer.forward(&x).unwrap(), &leaves);
}

fn dims(case: &Case, i: usize) -> Vec<usize> {
    case.get(&format!("in{i}")).dims().to_vec()
}

#[test]
fn norms() {
    let rt = cpu();
    let (init, goldens) = (Init::new(&rt, 0), Goldens::read(&rt, "nn"));
    for case in goldens.of("layer_norm") {
        let mut layer = LayerNorm::new(&init, 8).unwrap();
        layer.eps = case.number("eps");
        check_layer(&case, &layer);
    }
    for case in goldens.of("rms_norm") {
        let mut layer = RmsNorm::new(&init, 8).unwrap();
        layer.eps = Some(case.number("eps"));
        check_layer(&case, &layer);
    }
    for case in goldens.of("group_norm") {
        check_layer(&case, &GroupNorm::new(&init, case.count("groups"), 8).unwrap());
    }
    for case in goldens.of("batch_norm_train") {
        check_layer(&case, &BatchNorm2d::new(&init, 8).unwrap());
    }
}

#[test]
fn batch_norm_in_use() {
    let rt = cpu();
    for case in Goldens::read(&rt, "nn").of("batch_norm_eval") {
        let layer = BatchNorm2d::new(&Init::new(&rt, 0), 8).unwrap();
        let names = ["running_mean", "running_var", "weight", "bias"];
        let state = names.iter().enumerate().map(|(i, n)| (n.to_string(), case.get(&format!("in{}", i + 1))));
        layer.load_partial_state_dict(state.collect()).unwrap();
        layer.eval();
        let out = layer.forward(&Var::new(case.get("in0"))).unwrap();
        close(case.id, &out.value().unwrap(), &case.get("out0"), 1e-5);
        assert_eq!(layer.num_batches_tracked.value().item().unwrap(), 0.0);
    }
}

#[test]
fn convolutions() {
    let rt = cpu();
    let (init, goldens) = (Init::new(&rt, 0), Goldens::read(&rt, "nn"));
    for case in goldens.of("conv1d") {
        let (w, groups) = (dims(&case, 1), case.count("groups"));
        let options = Conv1dOptions {
            stride: case.count("stride"),
            padding: case.count("padding"),
            dilation: case.count("dilation"),
            groups,
        };
        check_layer(&case, &Conv1d::new(&init, w[1] * groups, w[0], w[2], options).unwrap());
    }
    for case in goldens.of("conv2d") {
        let (w, groups) = (dims(&case, 1), case.count("groups"));
        let options = ConvOptions {
            stride: [case.count("stride"); 2],
            padding: [case.count("padding"); 2],
            dilation: [case.count("dilation"); 2],
            groups,
        };
        check_layer(&case, &Conv2d::new(&init, w[1] * groups, w[0], [w[2], w[3]], options).unwrap());
    }
    for case in goldens.of("conv_transpose2d") {
        let w = dims(&case, 1);
        let options = ConvOptions {
            stride: [case.count("stride"); 2],
            padding: [case.count("padding"); 2],
            ..Default::default()
        };
        let layer = ConvTranspose2d::new(&init, w[0], w[1], [w[2], w[3]], options).unwrap();
        check_layer(&case, &layer.with_output_padding([case.count("output_padding"); 2]).unwrap());
    }
}

#[test]
fn pools() {
    let rt = cpu();
    let goldens = Goldens::read(&rt, "nn");
    for case in goldens.of("max_pool2d") {
        check_layer(&case, &MaxPool2d::new(case.count("kernel")).with_stride([case.count("stride"); 2]));
    }
    for case in goldens.of("avg_pool2d") {
        check_layer(&case, &AvgPool2d::new(case.count("kernel")).with_stride([case.count("stride"); 2]));
    }
    for case in goldens.of("adaptive_avg_pool2d") {
        check_layer(&case, &AdaptiveAvgPool2d { size: [case.count("size"); 2] });
    }
}

#[test]
fn recurrent_layers() {
    let rt = cpu();
    let (init, goldens) = (Init::new(&rt, 0), Goldens::read(&rt, "nn"));
    let config = RecurrentConfig::new(5, 6);
    let names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"];
    for case in goldens.of("lstm") {
        let layer = Lstm::new(&init, config).unwrap();
        assert!(layer.named_parameters().iter().map(|(n, _)| n).eq(&names), "parameters are named as PyTorch's");
        check_layer(&case, &layer);
    }
    for case in goldens.of("gru") {
        let layer = Gru::new(&init, config).unwrap();
        assert!(layer.named_parameters().iter().map(|(n, _)| n).eq(&names));
        check_layer(&case, &layer);
    }
}

/// With the projections the identity, the layer is attention itself.
#[test]
fn attention_with_several_heads() {
    let rt = cpu();
    for case in Goldens::read(&rt, "nn").of("attention") {
        if case.count("heads") != case.count("kv_heads") {
            continue;
        }
        let &[b, h, t, d] = &dims(&case, 0)[..] else { panic!("{} has four axes", case.id) };
        let layer = MultiHeadAttention::new(&Init::new(&rt, 0), h * d, h).unwrap();
        let eye: Vec<f32> = (0..h * d * h * d).map(|i| if i % (h * d + 1) == 0 { 1.0 } else { 0.0 }).collect();
        let eye = numcore::Tensor::from_slice(&rt, [h * d, h * d], &eye).unwrap();
        layer.in_proj_weight.set(numcore::ops::cat(&[&eye, &eye, &eye], 0).unwrap()).unwrap();
        layer.out_proj.weight.set(eye).unwrap();
        let flat = |i: usize| {
            let x: V = case.input(i).transpose(1, 2).unwrap();
            x.reshape([b, t, h * d]).unwrap()
        };
        let options = AttentionOptions { causal: case.attr("causal").as_bool().unwrap(), ..Default::default() };
        let out = layer.attend(&flat(0), &flat(1), &flat(2), options).unwrap();
        let heads = out.reshape([b, t, h, d]).unwrap().transpose(1, 2).unwrap();
        close(case.id, &heads.value().unwrap(), &case.get("out0"), 1e-5);
    }
}
