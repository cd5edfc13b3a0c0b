//! Graphs of a few nodes, as exporters and optimizers of graphs write them, against formulas.

use autograd::Var;
use data::protobuf::ProtoMessage;
use models_import::OnnxModel;
use nn::{ModuleExt, Stage};
use numcore::{DType, Tensor};
use runtime_cpu::Cpu;

use crate::common::*;

fn node(op: &str, ins: &[&str], outs: &[&str], attributes: &[(&str, &[i64])]) -> ProtoMessage {
    let node = ins.iter().fold(ProtoMessage::new(), |node, name| node.bytes(1, name));
    let node = outs.iter().fold(node, |node, name| node.bytes(2, name)).bytes(4, op);
    let attribute = |(name, values): &(&str, &[i64])| {
        let attribute = ProtoMessage::new().bytes(1, name).int(20, 7);
        values.iter().fold(attribute, |attribute, value| attribute.int(8, *value))
    };
    node.each(5, &attributes.iter().map(attribute).collect::<Vec<_>>())
}

/// An initializer: its name, the format's number of its type, its sizes and its bytes.
fn initializer(name: &str, kind: i64, dims: &[i64], bytes: &[u8]) -> ProtoMessage {
    let tensor = dims.iter().fold(ProtoMessage::new(), |tensor, d| tensor.int(1, *d));
    tensor.int(2, kind).bytes(8, name).bytes(9, bytes)
}

fn floats(name: &str, values: &[f32]) -> ProtoMessage {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    initializer(name, 1, &[values.len() as i64], &bytes)
}

fn integers(name: &str, values: &[i64]) -> ProtoMessage {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    initializer(name, 7, &[values.len() as i64], &bytes)
}

/// A model of nodes and initializers with the input `x` and the output `y`.
fn built(opset: i64, nodes: &[ProtoMessage], initializers: &[ProtoMessage]) -> OnnxModel<Cpu> {
    let (x, y) = (ProtoMessage::new().bytes(1, "x"), ProtoMessage::new().bytes(1, "y"));
    let graph = ProtoMessage::new().each(1, nodes).each(5, initializers).message(11, x).message(12, y);
    let file = ProtoMessage::new().int(1, 8).message(7, graph).message(8, ProtoMessage::new().int(2, opset));
    OnnxModel::from_bytes(&file.into_bytes(), &cpu()).unwrap()
}

fn run(model: &OnnxModel<Cpu>, x: Tensor<Cpu>) -> Tensor<Cpu> {
    model.forward_values(&[Var::new(x)]).unwrap().remove(0).value().unwrap()
}

fn numbers(x: &Tensor<Cpu>) -> Vec<f64> {
    x.to_f64s().unwrap()
}

/// The names of parameters, and of buffers with their values.
fn held(model: &OnnxModel<Cpu>) -> (Vec<String>, Vec<(String, Vec<f64>)>) {
    let parameters = model.named_parameters().into_iter().map(|(name, _)| name).collect();
    (parameters, model.named_buffers().into_iter().map(|(name, buffer)| (name, numbers(&buffer.value()))).collect())
}

/// Two channels, whose means are 2 and 20, and variances 1 and 100.
fn batch() -> Tensor<Cpu> {
    Tensor::from_slice(&cpu(), [2, 2], &[1.0f32, 10.0, 3.0, 30.0]).unwrap()
}

#[test]
fn statistics_that_identity_names_are_buffers() {
    // An export of a fresh model writes the running mean as the bias, which is zero too, and the variance as the weight.
    let nodes = [
        node("Identity", &["bias"], &["mean"], &[]),
        node("Identity", &["weight"], &["variance"], &[]),
        node("BatchNormalization", &["x", "weight", "bias", "mean", "variance"], &["y"], &[]),
    ];
    let model = built(17, &nodes, &[floats("weight", &[1.0, 1.0]), floats("bias", &[0.0, 0.0])]);
    run(&model, batch());
    let due = vec![("mean".to_owned(), vec![0.2, 2.0]), ("variance".to_owned(), vec![1.0, 10.9])];
    let (parameters, buffers) = held(&model);
    assert_eq!(parameters, ["weight", "bias"]);
    for ((name, got), (due_name, due)) in buffers.iter().zip(&due) {
        assert_eq!(name, due_name);
        got.iter().zip(due).for_each(|(got, due)| assert!((got - due).abs() < 1e-5, "{name}: {got}"));
    }
    assert_eq!(buffers.len(), 2);
    // Training of the bias leaves the statistics alone.
    model.named_parameters()[1].1.set(Tensor::ones(&cpu(), [2], DType::F32).unwrap()).unwrap();
    assert_eq!(held(&model).1, buffers);
}

#[test]
fn weights_that_identity_names_are_trained_apart() {
    let nodes = [
        node("Identity", &["a"], &["b"], &[]),
        node("Identity", &["b"], &["c"], &[]),
        node("Mul", &["x", "a"], &["h"], &[]),
        node("Add", &["h", "c"], &["y"], &[]),
    ];
    let model = built(17, &nodes, &[floats("a", &[2.0, 3.0])]);
    assert_eq!(held(&model), (vec!["a".to_owned(), "c".to_owned()], vec![]));
    model.named_parameters()[0].1.set(Tensor::zeros(&cpu(), [2], DType::F32).unwrap()).unwrap();
    assert_eq!(numbers(&run(&model, batch())), [2.0, 3.0, 2.0, 3.0]);
}

#[test]
fn batch_norms_that_share_statistics_have_buffers_of_their_own() {
    let nodes = [
        node("BatchNormalization", &["x", "one", "zero", "zero", "one"], &["h"], &[]),
        node("Mul", &["h", "three"], &["i"], &[]),
        node("BatchNormalization", &["i", "one", "zero", "both", "both"], &["j"], &[]),
        node("BatchNormalization", &["j", "one", "zero", "both", "one"], &["y"], &[]),
    ];
    let tensors = [("one", [1.0; 2]), ("zero", [0.0; 2]), ("three", [3.0; 2]), ("both", [1.0; 2])];
    let model = built(17, &nodes, &tensors.map(|(name, values)| floats(name, &values)));
    run(&model, batch());
    let (parameters, buffers) = held(&model);
    assert_eq!(parameters, ["one", "zero", "three"]);
    let names: Vec<&str> = buffers.iter().map(|(name, _)| name.as_str()).collect();
    let due = ["both", "h.running_mean", "h.running_var", "j.running_var", "y.running_mean", "y.running_var"];
    assert_eq!(names, due);
    // The first norm sees the batch; the second sees means of 0 and variances of 9, of a scale of 3.
    for (name, due) in [("h.running_mean", 0.2), ("both", 0.9), ("j.running_var", 1.8), ("y.running_mean", 0.9)] {
        let (_, got) = buffers.iter().find(|(own, _)| own == name).unwrap();
        assert!((got[0] - due).abs() < 1e-4, "{name}: {got:?}");
    }
}

#[test]
fn old_batch_norms_may_name_the_statistics_of_the_batch() {
    let nodes = [node("BatchNormalization", &["x", "one", "zero", "mean", "variance"], &["n", "", "", "y", "v"], &[])];
    let tensors = [("one", [1.0; 2]), ("zero", [0.0; 2]), ("mean", [5.0; 2]), ("variance", [1.0; 2])];
    let model = built(9, &nodes, &tensors.map(|(name, values)| floats(name, &values)));
    assert_eq!(numbers(&run(&model, batch())), [2.0, 20.0]);
    model.eval();
    assert_eq!(numbers(&run(&model, batch())), [4.7, 6.5].map(|v: f32| f64::from(v)));
}

#[test]
fn shapes_are_filled_with_values_of_any_type() {
    let half = |kind, bytes: &[u8]| {
        let value = ProtoMessage::new().bytes(1, "value").message(5, initializer("", kind, &[1], bytes)).int(20, 4);
        let fill = node("ConstantOfShape", &["sizes"], &["y"], &[]).message(5, value);
        run(&built(17, &[fill], &[integers("sizes", &[2])]), batch())
    };
    let cases: [(i64, &[u8], DType, f64); 5] = [
        (10, &[0x00, 0x3c], DType::F16, 1.0),
        (16, &[0x80, 0x3f], DType::BF16, 1.0),
        (11, &2.5f64.to_le_bytes(), DType::F64, 2.5),
        (2, &[7], DType::U8, 7.0),
        (12, &[9, 0, 0, 0], DType::U32, 9.0),
    ];
    for (kind, bytes, dtype, due) in cases {
        let y = half(kind, bytes);
        assert_eq!((y.dtype(), numbers(&y)), (dtype, vec![due; 2]));
    }
}

#[test]
fn slices_of_empty_lists_are_no_panics() {
    let tensors = [integers("list", &[1, 2, 3]), integers("from", &[1]), integers("to", &[3]), integers("none", &[])];
    for ins in [["list", "from", "to", "", "none"], ["list", "from", "to", "none", ""]] {
        let model = built(17, &[node("Slice", &ins, &["y"], &[])], &tensors);
        let _ = model.forward_values(&[Var::new(batch())]);
    }
    let model = built(17, &[node("Slice", &["list", "from", "to"], &["y"], &[])], &tensors);
    assert_eq!(numbers(&run(&model, batch())), [2.0, 3.0]);
}

#[test]
fn suppression_of_any_number_of_boxes() {
    let scores = initializer("scores", 1, &[1, 1, 2], &[0.5f32, 0.75].map(f32::to_le_bytes).concat());
    let ins = ["x", "scores", "most", "overlap"];
    let model = built(
        17,
        &[node("NonMaxSuppression", &ins, &["y"], &[])],
        &[scores, integers("most", &[i64::MAX]), floats("overlap", &[0.5])],
    );
    let boxes = Tensor::from_slice(&cpu(), [1, 2, 4], &[0.0f32, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]).unwrap();
    assert_eq!(numbers(&run(&model, boxes)), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn positions_of_maxima_are_those_of_the_value_without_its_pads() {
    // Two rows above and none below; the maxima are the corners of 3 rows and 3 columns.
    let attributes: [(&str, &[i64]); 3] = [("kernel_shape", &[3, 2]), ("pads", &[2, 1, 0, 0]), ("strides", &[2, 2])];
    let model = built(17, &[node("MaxPool", &["x"], &["values", "y"], &attributes)], &[]);
    let values = [9.0f32, 1.0, 8.0, 1.0, 0.0, 1.0, 7.0, 1.0, 6.0];
    let x = [values, values].concat();
    let places = run(&model, Tensor::from_slice(&cpu(), [1, 2, 3, 3], &x).unwrap());
    assert_eq!(numbers(&places), [0.0, 2.0, 0.0, 2.0, 9.0, 11.0, 9.0, 11.0]);
}

#[test]
fn scales_of_rows_and_channels_lie_along_them() {
    let bytes = |name: &str, dims: &[i64], values: &[u8]| initializer(name, 2, dims, values);
    let tensors = [
        floats("one", &[1.0]),
        bytes("zero", &[1], &[0]),
        floats("scales", &[1.0, 2.0]),
        bytes("zeros", &[2], &[1, 2]),
        bytes("weight", &[2, 1, 1, 1], &[3, 4]),
        bytes("matrix", &[2, 3], &[1, 2, 3, 4, 5, 6]),
        bytes("eye", &[3, 3], &[1, 0, 0, 0, 1, 0, 0, 0, 1]),
    ];
    let x = |dims: &[usize], values: &[u8]| Tensor::from_slice(&cpu(), dims, values).unwrap();
    let conv = node("QLinearConv", &["x", "one", "zero", "weight", "scales", "zeros", "one", "zero"], &["y"], &[]);
    // (3 - 1) · 1 and (4 - 2) · 2, of each channel.
    assert_eq!(numbers(&run(&built(17, &[conv], &tensors), x(&[1, 1, 1, 2], &[1, 5]))), [2.0, 10.0, 4.0, 20.0]);
    let ins = ["x", "scales", "zeros", "eye", "one", "zero", "one", "zero"];
    let matmul = node("QLinearMatMul", &ins, &["y"], &[]);
    let rows = x(&[2, 3], &[1, 2, 3, 4, 5, 6]);
    assert_eq!(numbers(&run(&built(17, &[matmul], &tensors), rows.clone())), [0.0, 1.0, 2.0, 4.0, 6.0, 8.0]);
    let integer = node("MatMulInteger", &["x", "eye", "zeros"], &["y"], &[]);
    let y = run(&built(17, &[integer], &tensors), rows);
    assert_eq!((y.dtype(), numbers(&y)), (DType::I32, vec![0.0, 1.0, 2.0, 2.0, 3.0, 4.0]));
}

#[test]
fn sums_and_products_of_integers_keep_their_type() {
    let x = Tensor::from_slice(&cpu(), [2, 2], &[1i32, 2, -3, 4]).unwrap();
    let of = |node: ProtoMessage| {
        let y = run(&built(17, &[node], &[]), x.clone());
        (y.dtype(), numbers(&y))
    };
    for (op, due) in [("ReduceSum", 4.0), ("ReduceL1", 10.0), ("ReduceSumSquare", 30.0), ("ReduceProd", -24.0)] {
        assert_eq!(of(node(op, &["x"], &["y"], &[])), (DType::I32, vec![due]), "{op}");
    }
    assert_eq!(of(node("MatMul", &["x", "x"], &["y"], &[])), (DType::I32, vec![-5.0, 10.0, -15.0, 10.0]));
}

#[test]
fn sizes_are_scaled_in_f32() {
    let ins = ["x", "", "scales"];
    let model = built(13, &[node("Resize", &ins, &["y"], &[])], &[floats("scales", &[5.0 / 3.0, 1.0 / 3.0])]);
    let x = Tensor::from_slice(&cpu(), [6, 3], &[0.0f32; 18]).unwrap();
    assert_eq!(run(&model, x).dims(), [10, 1]);
}

#[test]
fn old_group_norms_have_scales_of_groups() {
    let group = |name: &str| {
        let groups = ProtoMessage::new().bytes(1, "num_groups").int(3, 2).int(20, 2);
        node("GroupNormalization", &["x", name, name], &["y"], &[]).message(5, groups)
    };
    let x = Tensor::normal(&cpu(), [2, 4, 3], DType::F32, 0.0, 1.0, 5).unwrap();
    let old = built(18, &[group("groups")], &[floats("groups", &[2.0, 3.0])]);
    let new = built(21, &[group("channels")], &[floats("channels", &[2.0, 2.0, 3.0, 3.0])]);
    assert_eq!(numbers(&run(&old, x.clone())), numbers(&run(&new, x)));
}
