//! Files that are refused, and files with random changes: errors, never panics.

use autograd::Var;
use data::protobuf::ProtoMessage;
use models_import::{OnnxModel, OnnxSize};
use nn::{ModuleExt, Stage};
use numcore::{DType, Tensor, rng::Philox};
use runtime_cpu::Cpu;

use crate::common::*;

/// A node of these inputs and one output, `y`, with attributes that are integers.
fn node(op: &str, domain: &str, ins: &[&str], attributes: &[(&str, i64)]) -> ProtoMessage {
    let node = ins.iter().fold(ProtoMessage::new(), |node, name| node.bytes(1, name));
    let attributes: Vec<_> =
        attributes.iter().map(|(name, x)| ProtoMessage::new().bytes(1, name).int(3, *x).int(20, 2)).collect();
    node.bytes(2, "y").bytes(3, format!("the_{op}")).bytes(4, op).bytes(7, domain).each(5, &attributes)
}

/// A file with nodes and the input `x`, of an opset.
fn file(nodes: &[ProtoMessage], opset: i64) -> Vec<u8> {
    let (x, y) = (ProtoMessage::new().bytes(1, "x"), ProtoMessage::new().bytes(1, "y"));
    let graph = ProtoMessage::new().each(1, nodes).message(11, x).message(12, y);
    ProtoMessage::new().int(1, 8).message(7, graph).message(8, ProtoMessage::new().int(2, opset)).into_bytes()
}

fn error(bytes: &[u8]) -> String {
    OnnxModel::from_bytes(bytes, &cpu()).map(drop).unwrap_err().to_string()
}

#[test]
fn all_nodes_that_are_not_supported_are_named_at_once() {
    let nodes = [
        node("Relu", "", &["x"], &[]),
        node("RoiAlign", "", &["x"], &[]),
        node("Relu", "com.example", &["x"], &[]),
        node("Elu", "", &["x"], &[("betta", 1)]),
    ];
    let why = error(&file(&nodes, 17));
    for due in [
        "3 nodes are not supported",
        "RoiAlign the_RoiAlign (ai.onnx, version 17): the operator is unknown",
        "Relu the_Relu (com.example, of no stated version): the operator is unknown",
        "Elu the_Elu (ai.onnx, version 17): the attribute `betta` is unknown",
    ] {
        assert!(why.contains(due), "{why}");
    }
    for opset in [6, 29, -1, i64::MAX] {
        let why = error(&file(&nodes[..1], opset));
        assert!(why.contains(&format!("opset {opset}, and 7 to 28 are supported")), "{why}");
    }
}

#[test]
fn broken_graphs_are_errors_that_name_the_node() {
    let why = error(&file(&[node("Relu", "", &["z"], &[])], 17));
    assert!(why.contains("`Relu the_Relu` cannot be computed: no earlier node makes its input `z`"), "{why}");
    assert!(error(&file(&[], 17)).contains("no node makes the output `y`"));
    assert!(error(b"").contains("has no graph"));
    assert!(error(b"GGUF\x03\0\0\0").contains("message of protocol buffers"));
    // More sizes than the attribute's type allows, and a value that its operator refuses, when it is run.
    let model = OnnxModel::from_bytes(&file(&[node("Softmax", "", &["x"], &[("axis", 7)])], 17), &cpu()).unwrap();
    let x = Var::new(Tensor::<Cpu>::ones(&cpu(), [2, 3], DType::F32).unwrap());
    let why = model.forward_values(std::slice::from_ref(&x)).unwrap_err().to_string();
    assert!(why.contains("Softmax the_Softmax") && why.contains("axis 7"), "{why}");
}

#[test]
fn inputs_are_checked_against_the_file() {
    let model = model("cnn");
    assert_eq!(model.inputs()[0].name, "image");
    let sizes = model.inputs()[0].sizes.as_ref().unwrap();
    assert_eq!((&sizes[0], &sizes[1]), (&OnnxSize::Any("batch".into()), &OnnxSize::Is(3)));
    let image = |dims: [usize; 4], dtype| Var::new(Tensor::<Cpu>::ones(&cpu(), dims, dtype).unwrap());
    let why = |name: &str, x: V| model.forward_named(&[(name, &x)]).map(drop).unwrap_err().to_string();
    let right = image([1, 3, 12, 12], DType::F32);
    assert!(why("picture", right.clone()).contains("no input `picture`; it has `image`"));
    assert!(why("image", image([1, 4, 12, 12], DType::F32)).contains("must be [batch, 3, 12, 12]"));
    assert!(why("image", image([1, 3, 12, 12], DType::F64)).contains("must be f32"));
    assert!(model.forward_named(&[]).unwrap_err().to_string().contains("`image` is missing"));
    assert!(model.forward_values(&[]).unwrap_err().to_string().contains("1 inputs, `image`, and 0 are given"));
    model.eval();
    model.forward_named(&[("image", &right)]).unwrap();
}

/// A number below `n`.
fn below(random: &mut Philox, n: usize) -> usize {
    random.next_u32() as usize % n.max(1)
}

#[test]
fn changed_files_are_read_or_refused() {
    const EACH: u64 = 400;
    for name in ["mlp", "cnn", "block_script", "lstm", "classifier"] {
        let (bytes, values) = (std::fs::read(path(name)).unwrap(), Values::of(name));
        let inputs: Vec<V> = values.inputs().into_iter().map(|(_, x)| x).collect();
        let mut read = 0;
        for seed in 0..EACH {
            let mut random = Philox::new(seed, 0);
            let mut changed = bytes.clone();
            for _ in 0..1 + below(&mut random, 3) {
                let at = below(&mut random, changed.len());
                match below(&mut random, 6) {
                    0 => changed.truncate(at.max(1)),
                    1 => drop(changed.drain(at..(at + 4).min(changed.len()))),
                    2 => changed[at] = 0xff,
                    3 => changed[at] = changed[at].wrapping_add(1),
                    4 => changed[at] = changed[at].wrapping_sub(1),
                    _ => changed[at] ^= 1 << below(&mut random, 8),
                }
            }
            let Ok(model) = OnnxModel::from_bytes(&changed, &cpu()) else { continue };
            read += 1;
            model.set_training(seed % 2 == 0);
            let _ = model.forward_values(&inputs);
        }
        assert!(read > EACH / 10, "{name}: {read} changed files were read");
    }
}
