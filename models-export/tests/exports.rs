//! Files of other programs' formats, against those that their own writers make, and what is refused.

#[allow(dead_code, reason = "most of it is for the tests of `models`")]
#[path = "../../models/tests/all/common.rs"]
mod common;

use std::fs;

use common::*;
use models::{Decoder, DecoderConfig, Family, Lora, LoraConfig, Pretrained, RopeConfig, RopeScaling, Vit};
use models_export::{GgufOptions, GgufWeights, OnnxOptions, save_gguf, save_onnx_decoder, save_onnx_vit};
use nn::{Activation, ModuleExt};
use numcore::{DType, Tensor};

fn golden(name: &str) -> Vec<u8> {
    fs::read(reference("gguf").join(name)).unwrap()
}

fn gguf(model: &Decoder<runtime_cpu::Cpu>, options: &GgufOptions) -> Result<Vec<u8>, String> {
    let folder = Scratch::new();
    let path = folder.0.join("model.gguf");
    save_gguf(model, &path, options).map_err(|e| e.to_string())?;
    Ok(fs::read(path).unwrap())
}

/// Where two files differ first, in place of thousands of numbers.
#[track_caller]
fn same_bytes(got: &[u8], due: &[u8]) {
    let at = got.iter().zip(due).position(|(g, d)| g != d);
    let text = |bytes: &[u8], at: usize| {
        String::from_utf8_lossy(&bytes[at.saturating_sub(40)..bytes.len().min(at + 40)]).into_owned()
    };
    if let Some(at) = at {
        panic!("differ at byte {at}: {:?}, due {:?}", text(got, at), text(due, at));
    }
    assert_eq!(got.len(), due.len());
}

/// Queries and keys in llama.cpp's order, Llama 3's stretched positions, norms in `f32`.
#[test]
fn a_llama_is_what_llama_cpps_writer_writes() {
    same_bytes(&gguf(&decoder("llama"), &GgufOptions::default()).unwrap(), &golden("llama-f16.gguf"));
}

/// A GPT-2 of zeros, with five rows more than the tokenizer has tokens.
fn zeros() -> Decoder<runtime_cpu::Cpu> {
    let config = DecoderConfig {
        family: Family::Gpt2,
        vocab: 345,
        width: 4,
        layers: 1,
        heads: 2,
        kv_heads: 2,
        head_dim: 2,
        hidden: 8,
        context: 8,
        norm_eps: 1e-5,
        activation: Activation::GeluTanh,
        rope: None,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        windows: vec![None],
        options: Default::default(),
        mixtures: None,
        tied: true,
        padding: None,
        fields: Default::default(),
    };
    let model = Decoder::new(&init(), config).unwrap();
    for p in model.parameters() {
        p.set(Tensor::zeros(&cpu(), p.shape(), DType::F32).unwrap()).unwrap();
    }
    model
}

#[test]
fn a_tokenizer_is_what_llama_cpps_writer_writes() {
    let options = GgufOptions {
        weights: GgufWeights::F32,
        name: Some("tiny".into()),
        tokenizer: Some(reference("chat")),
        ..Default::default()
    };
    same_bytes(&gguf(&zeros(), &options).unwrap(), &golden("tokenizer.gguf"));
}

/// Blocks of eight bits as the data of a file ends with them: the last tensor is the head.
#[test]
fn blocks_are_those_of_the_format() {
    let (values, due) = (golden("blocks.f32"), golden("blocks.q8_0"));
    let values: Vec<f32> = values.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let mut config = zeros().config().clone();
    (config.vocab, config.width, config.head_dim, config.tied) = (5, 64, 32, false);
    let model = Decoder::new(&init(), config).unwrap();
    let head = model.parts.end().unwrap().projection.weight();
    head.set(Tensor::from_slice(&cpu(), [5, 64], &values).unwrap()).unwrap();
    let file = gguf(&model, &GgufOptions { weights: GgufWeights::Q8_0, ..Default::default() }).unwrap();
    let padded = due.len().next_multiple_of(32);
    same_bytes(&file[file.len() - padded..][..due.len()], &due);
}

#[test]
fn what_llama_cpp_would_compute_otherwise_is_refused() {
    let model = decoder("mistral");
    let error = gguf(&model, &GgufOptions::default()).unwrap_err();
    assert!(error.contains("sees 5 tokens") && error.contains("GgufOptions::context"), "{error}");
    assert!(gguf(&model, &GgufOptions { context: Some(5), ..Default::default() }).is_ok());
    let error = gguf(&decoder("llama"), &GgufOptions { context: Some(65), ..Default::default() }).unwrap_err();
    assert!(error.contains("65"), "{error}");
    let error = gguf(&decoder("gpt2"), &GgufOptions { context: Some(5), ..Default::default() }).unwrap_err();
    assert!(error.contains("all 64 learned positions"), "{error}");
    // Qwen's second layer has a window, and rows of 12 are no blocks of 32: they are f16.
    let model = decoder("qwen2");
    let options = |weights| GgufOptions { weights, context: Some(4), ..Default::default() };
    let [blocks, half] = [GgufWeights::Q8_0, GgufWeights::F16].map(|w| gguf(&model, &options(w)).unwrap());
    assert_eq!(blocks.len(), half.len());
    // A tokenizer whose way of splitting has no name there.
    let folder = Scratch::copy_of("chat");
    let path = folder.0.join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"use_regex\":true", "\"use_regex\":false")).unwrap();
    let options = GgufOptions { tokenizer: Some(folder.0.clone()), ..Default::default() };
    let error = gguf(&zeros(), &options).unwrap_err();
    assert!(error.contains("pre_tokenizer") && error.contains("GPT-2"), "{error}");
    let error = gguf(&decoder("gpt2"), &GgufOptions { tokenizer: Some(reference("chat")), ..Default::default() });
    assert!(error.unwrap_err().contains("none of the model's 43"));
}

#[test]
fn positions_that_depend_on_the_length_of_a_text_are_refused() {
    let scaling = RopeScaling::LongRope { short: vec![1.0; 3], long: vec![2.0; 3], original: 16.0, attention: 1.5 };
    let config = decoder("llama").config().clone();
    let rope = Some(RopeConfig { theta: 500.0, part: 1.0, scaling });
    let model = Decoder::new(&init(), DecoderConfig { rope, ..config }).unwrap();
    let folder = Scratch::new();
    for error in [
        save_gguf(&model, folder.0.join("a.gguf"), &GgufOptions::default()).unwrap_err(),
        save_onnx_decoder(&model, folder.0.join("a.onnx"), &OnnxOptions::default()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("longrope"), "{error}");
    }
}

#[test]
fn adapters_have_no_place_in_exported_files() {
    let model = decoder("llama");
    let lora = Lora::new(&model, &init(), LoraConfig::default()).unwrap();
    let folder = Scratch::new();
    for error in [
        save_gguf(&model, folder.0.join("a.gguf"), &GgufOptions::default()).unwrap_err(),
        save_onnx_decoder(&model, folder.0.join("a.onnx"), &OnnxOptions::default()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("merge"), "{error}");
    }
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    lora.remove().unwrap();
    save_gguf(&model, folder.0.join("a.gguf"), &GgufOptions::default()).unwrap();
}

/// The long stage `formats` computes these graphs; here their weights are found at the ends of what lies beside them.
#[test]
fn a_graph_has_its_weights_beside_it() {
    let folder = Scratch::new();
    let path = folder.0.join("model.onnx");
    let model = decoder("qwen3");
    save_onnx_decoder(&model, &path, &OnnxOptions::default()).unwrap();
    let (graph, data) = (fs::read(&path).unwrap(), fs::read(folder.0.join("model.onnx.data")).unwrap());
    let has = |what: &str| graph.windows(what.len()).any(|part| part == what.as_bytes());
    assert!(has("model.onnx.data") && has("model.layers.1.self_attn.q_norm.weight") && has("Softmax"));
    let embedding = model.parts.start().unwrap().tokens.weight.value().unwrap().to_bytes().unwrap();
    assert_eq!(data[..embedding.len()], embedding);
    // Weights of other ranks: all is gathered, nothing written.
    let nothing = folder.0.join("none.onnx");
    save_onnx_decoder(&model, &nothing, &OnnxOptions { writes: false, ..Default::default() }).unwrap();
    assert!(!nothing.exists());
    save_onnx_vit(&Vit::from_pretrained(reference("vit"), &init()).unwrap(), &path, &OnnxOptions::default()).unwrap();
    assert_ne!(fs::read(&path).unwrap(), graph);
    let error = save_onnx_decoder(&model, folder.0.join(".."), &OnnxOptions::default()).unwrap_err().to_string();
    assert!(error.contains("does not name a file"), "{error}");
}

#[test]
fn experts_and_families_with_parts_of_their_own_are_not_exported() {
    let path = std::env::temp_dir().join(format!("weftgrad-never-{}", std::process::id()));
    for (name, due) in [
        ("mixtral", "experts of `mixtral`"),
        ("gpt_oss", "experts of `gpt_oss`"),
        ("olmo2", "`olmo2` is not written"),
        ("phi3", "`phi3` is not written"),
        ("smollm3", "`smollm3` is not written"),
        ("gemma2", "`gemma2` is not written"),
        ("gemma3", "`gemma3_text` is not written"),
    ] {
        let model = decoder(name);
        let gguf = save_gguf(&model, &path, &Default::default()).map(drop).unwrap_err().to_string();
        let onnx = save_onnx_decoder(&model, &path, &Default::default()).map(drop).unwrap_err().to_string();
        assert!(gguf.contains(due) && onnx.contains(due), "{gguf}\n{onnx}");
    }
}
