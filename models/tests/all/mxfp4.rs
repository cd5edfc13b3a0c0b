//! GPT-OSS with experts in MXFP4, against transformers' dequantisation; pieces of such weights; files that do not fit.

use models::{Decoder, Pretrained};
use nn::{Forward, ModuleExt};
use numcore::{DType, Tensor, placement::TensorPlacement, safetensors};
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::common::*;

const DOWN: &str = "model.layers.0.mlp.experts.down_proj";

fn bytes(model: &Decoder<Cpu>, name: &str) -> Vec<u8> {
    let named = model.named_parameters();
    let parameter = &named.iter().find(|(own, _)| own == &format!("layers.0.mlp.experts.{name}")).unwrap().1;
    parameter.value().unwrap().to_bytes().unwrap()
}

/// A copy of the folder with other tensors.
fn with(change: impl FnOnce(&mut Vec<(String, Tensor<Cpu>)>)) -> Scratch {
    let folder = Scratch::copy_of("mxfp4");
    let path = folder.0.join("model.safetensors");
    let mut tensors = safetensors::load(&path, &cpu()).unwrap();
    change(&mut tensors);
    safetensors::save(&path, &tensors, &Default::default()).unwrap();
    folder
}

fn error(folder: &Scratch) -> String {
    Decoder::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string()
}

#[test]
fn experts_are_dequantised_as_by_transformers() {
    let due = Reference::read("mxfp4");
    let narrow = Decoder::from_pretrained(reference("mxfp4"), &init().dtype(DType::BF16)).unwrap();
    for name in ["gate_up_proj", "down_proj"] {
        assert_eq!(bytes(&narrow, name), due.tensor(name).to_bytes().unwrap(), "{name}");
    }
    let wide = Decoder::from_pretrained(reference("mxfp4"), &init().dtype(DType::F64)).unwrap();
    let logits = wide.forward(&due.var("ids")).unwrap().value().unwrap();
    close("logits", &logits, &due.tensor("logits"), 2e-5);
    // Every scale with every element: infinite ones, and those below normal numbers.
    let scales = due.tensor("every_scale");
    let folder = with(|tensors| {
        let own = tensors.iter_mut().find(|(name, _)| name == &format!("{DOWN}_scales")).unwrap();
        own.1 = scales.clone();
    });
    let every = Decoder::from_pretrained(&folder.0, &init().dtype(DType::BF16)).unwrap();
    assert_eq!(bytes(&every, "down_proj"), due.tensor("every").to_bytes().unwrap());
}

/// Columns within blocks, rows and experts.
#[test]
#[expect(clippy::single_range_in_vec_init, reason = "a list of ranges")]
fn pieces_are_read_alone_and_are_those_of_the_whole() {
    let whole = decoder("mxfp4");
    let lazy = Decoder::from_pretrained(reference("mxfp4"), &init().lazily()).unwrap();
    let named = whole.named_parameters();
    for name in ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"] {
        let of = |all: &[(String, nn::Param<Cpu>)]| all.iter().find(|(own, _)| own == name).unwrap().1.clone();
        let (own, due) = (of(&lazy.named_parameters()), of(&named).value().unwrap());
        let [experts, columns, rows] = own.shape()[..] else { panic!("{name}") };
        for ranges in [
            [vec![0..experts], vec![0..columns], vec![1..rows - 3]],
            [vec![1..2], vec![columns / 2..columns], vec![0..rows]],
            [vec![0..1, 2..3], vec![3..5, 7..8, columns - 1..columns], vec![2..3, 40..64]],
            [vec![2..3], vec![30..32], vec![0..0]],
        ] {
            let piece = TensorPlacement::new(own.shape(), ranges.to_vec()).unwrap();
            let due = piece.take(&due).unwrap().to_bytes().unwrap();
            assert_eq!(own.leaf().piece(&piece).unwrap().to_bytes().unwrap(), due, "{name} {piece:?}");
        }
    }
}

#[test]
fn a_saved_copy_is_not_quantised() {
    let (model, scratch) = (Decoder::from_pretrained(reference("mxfp4"), &init().lazily()).unwrap(), Scratch::new());
    model.save_pretrained(&scratch.0).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(scratch.0.join("config.json")).unwrap()).unwrap();
    assert_eq!(config.get("quantization_config"), None);
    let again = Decoder::from_pretrained(&scratch.0, &init()).unwrap();
    assert_eq!(bytes(&again, "gate_up_proj"), bytes(&decoder("mxfp4"), "gate_up_proj"));
}

#[test]
fn what_is_not_known_of_the_form_is_an_error() {
    let plain = Scratch::copy_of("mxfp4").with_config(|fields| drop(fields.remove("quantization_config")));
    assert!(error(&plain).contains("down_proj_blocks"), "{}", error(&plain));
    let other = Scratch::copy_of("mxfp4").with_config(|fields| {
        drop(fields["quantization_config"].as_object_mut().unwrap().insert("group".into(), 16.into()))
    });
    assert!(error(&other).contains("`group` is not known here"), "{}", error(&other));
    let lone = with(|tensors| tensors.retain(|(name, _)| name != &format!("{DOWN}_scales")));
    assert!(error(&lone).contains("layers.0.mlp.experts.down_proj (in files"), "{}", error(&lone));
    let short = with(|tensors| {
        let own = tensors.iter_mut().find(|(name, _)| name == &format!("{DOWN}_scales")).unwrap();
        own.1 = Tensor::zeros(&cpu(), [3, 64, 2], DType::U8).unwrap();
    });
    assert!(
        error(&short).contains("its elements are u8 [3, 64, 1, 16] and its scales u8 [3, 64, 2]"),
        "{}",
        error(&short)
    );
}
