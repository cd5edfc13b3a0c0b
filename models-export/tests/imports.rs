//! GGUF files that are written and read again: every family, to the bit.

#[allow(dead_code, reason = "most of it is for the tests of `models`")]
#[path = "../../models/tests/all/common.rs"]
mod common;

use std::fs;

use common::*;
use models::{Decoder, DecoderConfig, Family, Pretrained};
use models_export::{GgufOptions, GgufWeights, save_gguf};
use nn::{Forward, ModuleExt};
use numcore::{
    DType,
    ops::{PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

const ALL: [GgufWeights; 4] = [GgufWeights::F32, GgufWeights::F16, GgufWeights::BF16, GgufWeights::Q8_0];

/// The context within all windows, which llama.cpp does not compute.
const CONTEXT: usize = 4;

fn written(model: &Decoder<Cpu>, weights: GgufWeights, folder: &Scratch) -> std::path::PathBuf {
    let path = folder.0.join("model.gguf");
    let context = model.config().windows.iter().flatten().min().map(|_| CONTEXT);
    save_gguf(model, &path, &GgufOptions { weights, context, ..Default::default() }).unwrap();
    path
}

#[test]
fn every_family_is_read_as_it_was_written() {
    for name in ["gpt2", "llama", "llama_yarn", "mistral", "qwen2", "qwen3"] {
        let model = decoder(name);
        for weights in ALL {
            let folder = Scratch::new();
            let path = written(&model, weights, &folder);
            let read = Decoder::from_pretrained(&path, &init()).unwrap();
            // Rows of 12 are no blocks.
            let dtype = match weights {
                GgufWeights::F32 => DType::F32,
                GgufWeights::BF16 => DType::BF16,
                GgufWeights::F16 | GgufWeights::Q8_0 => DType::F16,
            };
            for ((name, own), (_, due)) in read.state_dict().unwrap().iter().zip(&model.state_dict().unwrap()) {
                let is_matrix = due.dims().len() == 2 && name != "embed_positions.weight";
                let due = due.to_dtype(if is_matrix { dtype } else { DType::F32 }).unwrap();
                let due = due.to_dtype(DType::F32).unwrap().to_bytes().unwrap();
                assert_eq!(own.to_bytes().unwrap(), due, "{name} as {weights:?}");
            }
            let (own, due) = (read.config(), model.config());
            assert_eq!((own.norm_eps, own.tied, own.head_dim), (due.norm_eps, due.tied, due.head_dim), "{name}");
            if weights == GgufWeights::F32 {
                let ids = Reference::read(name).var("ids").narrow(1, 0, CONTEXT).unwrap();
                let logits = |model: &Decoder<Cpu>| model.forward(&ids).unwrap().value().unwrap();
                close(name, &logits(&read), &logits(&model), 1e-6);
            }
            // Written again it is the same file.
            let (again, first) = (Scratch::new(), fs::read(&path).unwrap());
            assert!(fs::read(written(&read, weights, &again)).unwrap() == first, "{name} as {weights:?}");
        }
    }
}

/// Queries and keys of blocks, whose rows are reordered.
#[test]
fn blocks_are_read_as_they_were_written() {
    let config = DecoderConfig {
        family: Family::Llama,
        vocab: 40,
        width: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        hidden: 96,
        windows: vec![None; 2],
        options: Default::default(),
        ..decoder("llama").config().clone()
    };
    let folder = Scratch::new();
    let model = Decoder::new(&init(), config).unwrap();
    let path = written(&model, GgufWeights::Q8_0, &folder);
    let read = Decoder::from_pretrained(&path, &init()).unwrap();
    for ((name, own), (_, due)) in read.state_dict().unwrap().iter().zip(&model.state_dict().unwrap()) {
        // Half a step of the largest scale.
        let most = due.to_f64s().unwrap().into_iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        close(name, own, due, most / 127.0 * 0.51);
    }
    let again = Scratch::new();
    assert!(fs::read(written(&read, GgufWeights::Q8_0, &again)).unwrap() == fs::read(&path).unwrap());
}
