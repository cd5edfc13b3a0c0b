//! Decoders of GGUF files, against the folders that llama.cpp's writer took them from; pieces and stages of them.

use std::fs;

use data::gguf::{GgufFile, GgufValue, put_text};
use distributed::{
    comm::{Communicator, Ranks},
    train::TrainStep,
    zero::{UnitOf, ZeroOptions, ZeroStage},
};
use models::{Bert, Decoder, DecoderConfig, GenerationOptions, Pretrained, SaveOptions};
use nn::{Forward, Init, ModuleExt, Stage};
use numcore::{DType, ops::PointwiseOps, placement::TensorPlacement, safetensors};
use optim::SgdConfig;
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::common::*;

fn path() -> std::path::PathBuf {
    reference("gguf/llama-f16.gguf")
}

/// A copy of the file with one more key.
fn with(key: &str, value: GgufValue) -> Vec<u8> {
    let mut bytes = fs::read(path()).unwrap();
    let mut pairs = Vec::new();
    put_text(&mut pairs, key);
    value.put(&mut pairs);
    // A last pair keeps the alignment of what follows.
    put_text(&mut pairs, "pad");
    let pad = (pairs.len() + 12).next_multiple_of(32) - pairs.len() - 12;
    GgufValue::Text(" ".repeat(pad)).put(&mut pairs);
    let count = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) + 2;
    bytes[16..24].copy_from_slice(&count.to_le_bytes());
    bytes.splice(24..24, pairs);
    bytes
}

/// A copy of a file with all occurrences of a text replaced by one of the same length.
fn replaced(mut bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let places: Vec<_> = (0..bytes.len() - from.len()).filter(|&i| bytes[i..].starts_with(from.as_bytes())).collect();
    assert!(!places.is_empty(), "no {from}");
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to.as_bytes()));
    bytes
}

fn load(bytes: &[u8]) -> numcore::Result<Decoder<Cpu>> {
    let folder = Scratch::new();
    let path = folder.0.join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Decoder::from_pretrained(path, &init())
}

/// Matrices to the bit after rounding to `f16`, in the order of rows of Hugging Face; sizes and Llama 3's scaling.
#[test]
fn a_llama_of_llama_cpps_writer_is_the_folders() {
    let (own, due) = (Decoder::from_pretrained(path(), &init()).unwrap(), decoder("llama"));
    for ((name, own), (_, due)) in own.state_dict().unwrap().iter().zip(&due.state_dict().unwrap()) {
        let due = if due.dims().len() == 2 { due.to_dtype(DType::F16).unwrap() } else { due.clone() };
        let due = due.to_dtype(DType::F32).unwrap();
        assert_eq!(own.to_bytes().unwrap(), due.to_bytes().unwrap(), "{name}");
    }
    let (a, b) = (own.config(), due.config());
    assert_eq!((a.norm_eps, a.tied, a.context, a.head_dim), (b.norm_eps, b.tied, b.context, b.head_dim));
    assert_eq!(a.rope, b.rope);
    let ids = Reference::read("llama").var("ids");
    let logits = |model: &Decoder<Cpu>| model.forward(&ids).unwrap().value().unwrap();
    close("logits", &logits(&own), &logits(&due), 2e-2);
    // A folder that is saved of it is the same model.
    let folder = Scratch::new();
    own.save_pretrained(&folder.0).unwrap();
    let again = Decoder::from_pretrained(&folder.0, &init()).unwrap();
    assert_eq!(logits(&again).to_bytes().unwrap(), logits(&own).to_bytes().unwrap());
}

/// A family's file, and the folder that it was made of with the options that llama.cpp has.
fn family(name: &str) -> (Decoder<Cpu>, Decoder<Cpu>) {
    let own = Decoder::from_pretrained(reference("gguf").join(name).with_extension("gguf"), &init()).unwrap();
    let folder = Scratch::copy_of(name).with_config(|fields| match name {
        "gemma2" | "gemma3" => drop(fields.insert("query_pre_attn_scalar".into(), 6.into())),
        "phi3" | "mixtral" => drop(fields.insert("sliding_window".into(), Value::Null)),
        "qwen3_moe" => drop(fields.insert("decoder_sparse_step".into(), 1.into())),
        "gpt_oss" => {
            ["swiglu_alpha", "swiglu_limit"].iter().for_each(|field| drop(fields.remove(*field)));
        }
        "smollm3" => {
            ["no_rope_layers", "layer_types", "sliding_window"].iter().for_each(|field| drop(fields.remove(*field)));
            fields.insert("use_sliding_window".into(), false.into());
            fields.insert("num_hidden_layers".into(), 4.into());
        }
        _ => {}
    });
    // Layers that are copies of others.
    if let Some((of, to)) = [("smollm3", ("layers.0.", "layers.3.")), ("qwen3_moe", ("layers.1.", "layers.0."))]
        .into_iter()
        .find_map(|(of, copies)| (of == name).then_some(copies))
    {
        let path = folder.0.join("model.safetensors");
        let mut tensors = safetensors::load(&path, &cpu()).unwrap();
        tensors.retain(|(name, _)| !name.contains(to));
        let copied = tensors.iter().filter(|(name, _)| name.contains(of));
        let copies: Vec<_> = copied.map(|(name, x)| (name.replace(of, to), x.clone())).collect();
        tensors.extend(copies);
        safetensors::save(&path, &tensors, &Default::default()).unwrap();
    }
    (own, Decoder::from_pretrained(&folder.0, &init()).unwrap())
}

/// Names, keys, norms with 1 added, the order of rows, and divisors of frequencies.
#[test]
fn families_of_llama_cpps_writer_are_the_folders() {
    let dense = ["gemma2", "gemma3", "phi3", "phi3_long", "olmo2", "smollm3"];
    for name in dense.into_iter().chain(["gpt_oss", "mxfp4", "qwen3_moe", "mixtral"]) {
        let (own, due) = family(name);
        let config = DecoderConfig { fields: due.config().fields.clone(), ..own.config().clone() };
        assert_eq!(config, *due.config(), "{name}");
        for ((name, own), (_, due)) in own.state_dict().unwrap().iter().zip(&due.state_dict().unwrap()) {
            close(name, own, due, 2e-7);
        }
        let ids = Reference::read(name).var("ids");
        let logits = |model: &Decoder<Cpu>| model.forward(&ids).unwrap().value().unwrap();
        close(name, &logits(&own), &logits(&due), 1e-5);
        let saved = Scratch::new();
        own.save_pretrained(&saved.0).unwrap();
        let again = Decoder::from_pretrained(&saved.0, &init()).unwrap();
        assert_eq!(logits(&again).to_bytes().unwrap(), logits(&own).to_bytes().unwrap(), "{name}");
    }
}

/// Experts whose columns are rows in files, of two tensors in turn, in `f32` and in MXFP4; and those whose rows are of
/// two tensors.
#[test]
fn pieces_of_experts_are_those_of_the_whole() {
    for name in ["gpt_oss", "mxfp4", "qwen3_moe"] {
        let path = reference("gguf").join(name).with_extension("gguf");
        let whole = Decoder::from_pretrained(&path, &init()).unwrap();
        let lazy = Decoder::from_pretrained(&path, &init().lazily()).unwrap();
        for ((name, own), (_, due)) in lazy.named_parameters().iter().zip(&whole.named_parameters()) {
            let shape = own.shape();
            if !name.contains("experts") {
                continue;
            }
            let last = shape[shape.rank() - 1];
            for (experts, columns) in [(0..3, 1..last), (1..2, 2..last - 1), (2..3, 3..4), (0..1, 2..2)] {
                let middle = [2..5, 6..7].to_vec();
                let ranges = [[experts].to_vec(), middle, [columns].to_vec()];
                let ranges = if shape.rank() == 3 { ranges.to_vec() } else { [&ranges[..1], &ranges[2..]].concat() };
                let piece = TensorPlacement::new(shape, ranges).unwrap();
                let due = piece.take(&due.value().unwrap()).unwrap().to_bytes().unwrap();
                assert_eq!(own.leaf().piece(&piece).unwrap().to_bytes().unwrap(), due, "{name} {piece:?}");
            }
        }
    }
}

#[test]
fn pieces_are_read_alone_and_are_those_of_the_whole() {
    let whole = Decoder::from_pretrained(path(), &init()).unwrap();
    let lazy = Decoder::from_pretrained(path(), &init().lazily()).unwrap();
    for ((name, own), (_, due)) in lazy.named_parameters().iter().zip(&whole.named_parameters()) {
        let shape = own.shape();
        let rows = shape[0];
        for ranges in [&[(0, rows)][..], &[(1, rows - 2)], &[(0, 1), (rows - 3, rows)]] {
            let columns = [(1, 2), (4, 7)];
            let all = [ranges, &columns].into_iter().take(shape.rank());
            let all = all.map(|ranges| ranges.iter().map(|&(from, to)| from..to).collect()).collect();
            let piece = TensorPlacement::new(shape, all).unwrap();
            let due = piece.take(&due.value().unwrap()).unwrap().to_bytes().unwrap();
            assert_eq!(own.leaf().piece(&piece).unwrap().to_bytes().unwrap(), due, "{name} {piece:?}");
        }
    }
}

#[test]
fn stages_compute_what_the_whole_does() {
    let ids = Reference::read("llama").var("ids");
    let whole = Decoder::from_pretrained(path(), &init()).unwrap().forward(&ids).unwrap();
    let stages = Decoder::from_pretrained(path(), &init().lazily()).unwrap().split(2).unwrap();
    let mut values = vec![ids];
    for stage in stages {
        values = stage.forward_values(&values).unwrap();
    }
    assert_eq!(values[0].value().unwrap().to_bytes().unwrap(), whole.value().unwrap().to_bytes().unwrap());
}

#[test]
fn ranks_with_shards_save_what_one_rank_does() {
    let saved = Scratch::new();
    let program = |comm: distributed::comm::Comm<Cpu>| {
        let model = Decoder::from_pretrained(path(), &Init::new(comm.runtime(), 0).lazily())?;
        let options = ZeroOptions { stage: ZeroStage::Parameters, units: UnitOf::layers(), ..Default::default() };
        let _step = TrainStep::builder(&comm, &model).optimizer(SgdConfig::default()).zero(options).build()?;
        model.save_pretrained_with(&saved.0, &SaveOptions { writes: comm.rank() == 0, ..Default::default() })
    };
    Ranks::new(2).run(|_| Ok(Cpu::with_threads(1)), program).unwrap();
    let one = Scratch::new();
    Decoder::from_pretrained(path(), &init()).unwrap().save_pretrained(&one.0).unwrap();
    same_tensors(&weight_files(&saved.0), &weight_files(&one.0));
}

#[test]
fn a_key_that_is_not_computed_is_an_error() {
    let number = |n: u32| GgufValue::U32(n);
    let text = |t: &str| GgufValue::Text(t.into());
    let file = || fs::read(path()).unwrap();
    for (bytes, due) in [
        (with("llama.attention.new_option", number(1)), "`llama.attention.new_option` is not known"),
        (with("llama.expert_count", number(8)), "`llama.expert_used_count` is missing"),
        (with("llama.attention.sliding_window_pattern", number(2)), "is not known here"),
        (with("llama.attention.causal", GgufValue::Bool(false)), "causal` is false"),
        (with("llama.attention.sliding_window", number(5)), "is 5, less than the context of 64"),
        (with("llama.rope.scaling.type", text("longrope")), "longrope"),
        (with("llama.rope.scaling.type", text("linear")), "None; linear and yarn"),
        (with("llama.rope.scale_linear", GgufValue::F32(2.0)), "`rope_freqs.weight` is beside another"),
        (with("llama.rope.scaling.attn_factor", GgufValue::F32(1.2)), "not computed here without yarn"),
        (with("llama.rope.scaling.factor", GgufValue::F32(f32::NAN)), "is not a finite floating-point number"),
        (
            replaced(file(), "llama.attention.layer_norm_rms_epsilon", "llama.attention.layer_norm_rms_epsilom"),
            "epsilon` is missing",
        ),
        (with("llama.attention.clamp_kqv", GgufValue::F32(3.0)), "is 3"),
        (with("tokenizer.ggml.eos_token_id", text("2")), "is not a count"),
        (replaced(file(), "general.architecture", "general.architectura"), "`general.architecture` is missing"),
        (replaced(file(), "llama.block_count", "llama.block_couny"), "block_count` is missing"),
        (replaced(file(), "llama.embedding_length", "llama.embedding_lengte"), "embedding_length` is missing"),
        (replaced(file(), "llama.rope.freq_base", "llama.rope.freq_basf"), "freq_basf` is not known"),
        (replaced(file(), "blk.1.attn_q.weight", "blk.1.attn_x.weight"), "blk.1.attn_x.weight"),
    ] {
        let error = load(&bytes).unwrap_err().to_string();
        assert!(error.contains(due), "{error}, due {due}");
    }
    for (key, value) in [
        ("llama.expert_count", number(0)),
        ("llama.expert_used_count", number(0)),
        ("llama.attention.sliding_window", number(64)),
        ("llama.rope.scaling.finetuned", GgufValue::Bool(false)),
        ("general.anything", text("at all")),
    ] {
        assert!(load(&with(key, value)).is_ok(), "{key}");
    }
    let error = Bert::from_pretrained(path(), &init()).unwrap_err().to_string();
    assert!(error.contains("model_type"), "{error}");
}

/// Divisors of frequencies that no scaling of Llama 3 gives.
#[test]
fn other_divisors_are_an_error() {
    let mut bytes = fs::read(path()).unwrap();
    let due = [1f32, 0.0, 8.0];
    let file = GgufFile::open(path()).unwrap();
    let mut divisors = [0; 12];
    file.read("rope_freqs.weight", 0, &mut divisors).unwrap();
    let at = bytes.windows(12).position(|w| w == divisors).unwrap();
    for (i, x) in due.into_iter().enumerate() {
        bytes[at + 4 * i..][..4].copy_from_slice(&x.to_le_bytes());
    }
    let error = load(&bytes).unwrap_err().to_string();
    assert!(error.contains("not those of Llama 3"), "{error}");
}

#[test]
fn a_text_ends_with_the_files_token() {
    let folder = Scratch::new();
    let path = folder.0.join("model.gguf");
    fs::write(&path, with("tokenizer.ggml.eos_token_id", GgufValue::U32(7))).unwrap();
    let options = GenerationOptions::of_folder(&path).unwrap();
    assert_eq!(options, GenerationOptions { eos_token_ids: vec![7], ..Default::default() });
}

#[cfg(feature = "text")]
#[test]
fn a_chat_template_is_the_files() {
    use models::{ChatTemplate, Conversation};
    let talk = Conversation::new().with("user", "Hi").with("assistant", "Yes");
    let text = |template: ChatTemplate| template.render(&talk, true).unwrap();
    let (own, due) = (reference("gguf/tokenizer.gguf"), reference("chat"));
    assert_eq!(text(ChatTemplate::of_folder(own).unwrap()), text(ChatTemplate::of_folder(due).unwrap()));
    let error = ChatTemplate::of_folder(path()).map(drop).unwrap_err().to_string();
    assert!(error.contains("chat_template"), "{error}");
}
