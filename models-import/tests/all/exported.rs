//! Models that this project writes, read back.

#[allow(dead_code, reason = "most of it is for the tests of `models`")]
#[path = "../../../models/tests/all/common.rs"]
pub mod models_common;

use models::{Pretrained, Vit};
use models_export::{OnnxOptions, save_onnx_decoder, save_onnx_vit};
use models_import::OnnxModel;
use nn::{Forward, ModuleExt};
use numcore::ops::ViewOps;

use self::models_common::{Reference, Scratch, close, cpu, decoder, init, reference};

#[test]
fn decoders_come_back_with_their_logits() {
    let folder = Scratch::new();
    for name in ["gpt2", "llama", "llama_yarn", "mistral", "qwen2", "qwen3"] {
        let (model, path) = (decoder(name), folder.0.join("model.onnx"));
        save_onnx_decoder(&model, &path, &OnnxOptions::default()).unwrap();
        let read = OnnxModel::load(&path, &cpu()).unwrap();
        let ids = Reference::read(name).var("ids");
        for len in [ids.dims()[1], 3] {
            let ids = ids.narrow(1, 0, len).unwrap();
            let logits = |y: numcore::Result<models_common::V>| y.unwrap().value().unwrap();
            close(name, &logits(read.forward(&ids)), &logits(model.forward(&ids)), 2e-5);
        }
        // The file has the names of Hugging Face's.
        let norm = |own: &str| own == "model.norm.weight" || own.ends_with("ln_f.weight");
        assert!(read.named_parameters().iter().any(|(own, _)| norm(own)), "{name}");
    }
}

#[test]
fn a_vision_transformer_comes_back_with_its_logits() {
    let (folder, model) = (Scratch::new(), Vit::from_pretrained(reference("vit"), &init()).unwrap());
    let path = folder.0.join("vit.onnx");
    save_onnx_vit(&model, &path, &OnnxOptions::default()).unwrap();
    let read = OnnxModel::load(&path, &cpu()).unwrap();
    let pixels = Reference::read("vit").var("pixels");
    let due = model.forward(&pixels).unwrap().value().unwrap();
    close("vit", &read.forward(&pixels).unwrap().value().unwrap(), &due, 2e-5);
}

#[test]
fn weights_beside_a_file_must_be_in_its_folder_and_whole() {
    let (folder, path) = (Scratch::new(), |folder: &Scratch| folder.0.join("model.onnx"));
    save_onnx_decoder(&decoder("qwen3"), path(&folder), &OnnxOptions::default()).unwrap();
    let (bytes, data) = (std::fs::read(path(&folder)).unwrap(), folder.0.join("model.onnx.data"));
    let error = || OnnxModel::load(path(&folder), &cpu()).map(drop).unwrap_err().to_string();
    let renamed = |to: &str| {
        let mut bytes = bytes.clone();
        for at in 0..bytes.len() - to.len() {
            if bytes[at..].starts_with(b"model.onnx.data") {
                bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            }
        }
        std::fs::write(path(&folder), bytes).unwrap();
    };
    for outside in ["../../../passwd", "/etc/passwd/abc", "a/../../passwdd"] {
        renamed(outside);
        assert!(error().contains("outside of the model's folder"), "{}", error());
    }
    renamed("model.onnx.data");
    std::fs::write(&data, &std::fs::read(&data).unwrap()[..100]).unwrap();
    assert!(error().contains("which has 100"), "{}", error());
    std::fs::remove_file(&data).unwrap();
    assert!(error().contains("model.onnx.data"), "{}", error());
    let alone = OnnxModel::from_bytes(&bytes, &cpu()).map(drop).unwrap_err().to_string();
    assert!(alone.contains("load the model by its path"), "{alone}");
}
