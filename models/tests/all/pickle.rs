//! PyTorch's files, against the safetensors that they were made of; files that want more than tensors, changed bytes.

use std::fs;

use models::{Decoder, Pretrained};
use nn::ModuleExt;
use numcore::{DType, ops::PointwiseOps, placement::TensorPlacement, rng::Philox};
use runtime_cpu::Cpu;

use crate::common::*;

fn golden(name: &str) -> Vec<u8> {
    fs::read(reference("pickle").join(name)).unwrap()
}

/// A folder with the configuration of a model and these weights.
fn folder(model: &str, bytes: &[u8]) -> Scratch {
    let scratch = Scratch::copy_of_file(model, &["config.json"]);
    fs::write(scratch.0.join("pytorch_model.bin"), bytes).unwrap();
    scratch
}

fn load(bytes: &[u8]) -> numcore::Result<Decoder<Cpu>> {
    Decoder::from_pretrained(&folder("gpt2", bytes).0, &init())
}

/// Views, parameters, shared storages, other strides, buffers, a tied head.
#[test]
fn a_file_is_the_model_of_safetensors() {
    let folder = folder("gpt2", &golden("gpt2.bin"));
    let (own, due) = (Decoder::from_pretrained(&folder.0, &init()).unwrap(), decoder("gpt2"));
    for ((name, own), (_, due)) in own.state_dict().unwrap().iter().zip(&due.state_dict().unwrap()) {
        assert_eq!(own.to_bytes().unwrap(), due.to_bytes().unwrap(), "{name}");
    }
    let lazy = Decoder::from_pretrained(&folder.0, &init().lazily()).unwrap();
    for ((name, own), (_, due)) in lazy.named_parameters().iter().zip(&due.named_parameters()) {
        let shape = own.shape();
        let ranges = shape.iter().map(|&n| [1..2, 4..n - 1].to_vec()).collect();
        let piece = TensorPlacement::new(shape, ranges).unwrap();
        let due = piece.take(&due.value().unwrap()).unwrap().to_bytes().unwrap();
        assert_eq!(own.leaf().piece(&piece).unwrap().to_bytes().unwrap(), due, "{name}");
    }
}

#[test]
fn several_files_have_an_index() {
    let scratch = Scratch::copy_of_file("llama", &["config.json"]);
    for name in ["llama-1.bin", "llama-2.bin"] {
        fs::write(scratch.0.join(name), golden(name)).unwrap();
    }
    fs::write(scratch.0.join("pytorch_model.bin.index.json"), golden("llama.index.json")).unwrap();
    let (own, due) = (Decoder::from_pretrained(&scratch.0, &init()).unwrap(), decoder("llama"));
    for ((name, own), (_, due)) in own.state_dict().unwrap().iter().zip(&due.state_dict().unwrap()) {
        let stored = if name.contains("norm") { DType::BF16 } else { DType::F32 };
        let due = due.to_dtype(stored).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(own.to_bytes().unwrap(), due.to_bytes().unwrap(), "{name}");
    }
    // Safetensors go first.
    fs::copy(reference("llama").join("model.safetensors"), scratch.0.join("model.safetensors")).unwrap();
    let first = Decoder::from_pretrained(&scratch.0, &init()).unwrap().state_dict().unwrap();
    for ((name, own), (_, due)) in first.iter().zip(&due.state_dict().unwrap()) {
        assert_eq!(own.to_bytes().unwrap(), due.to_bytes().unwrap(), "{name}");
    }
}

#[test]
fn what_is_no_tensor_is_an_error_with_its_name() {
    let whole = golden("gpt2.bin");
    let replaced = |from: &[u8], to: &[u8]| {
        assert_eq!(from.len(), to.len());
        let mut bytes = whole.clone();
        let places: Vec<_> = (0..bytes.len() - from.len()).filter(|&i| bytes[i..].starts_with(from)).collect();
        places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
        bytes
    };
    for (bytes, due) in [
        (golden("evil.bin"), "asks for `posix.system`: tensors alone are read, and no code is run"),
        (golden("before_1.6.bin"), "PyTorch before 1.6 wrote another format"),
        (golden("checkpoint.bin"), "`epoch` is no tensor"),
        (whole[..whole.len() / 2].to_vec(), "is no ZIP archive"),
        (Vec::new(), "is no ZIP archive"),
        (replaced(b"/data.pkl", b"/data.pkx"), "has no `data.pkl`"),
        (replaced(b"data/0", b"data/x"), "is in storage `0`"),
    ] {
        let error = load(&bytes).unwrap_err().to_string();
        assert!(error.contains(due) && error.contains("pytorch_model.bin"), "{error}, due {due}");
    }
}

/// Opens and reads files with changed bytes: each is read, or an error.
#[test]
fn changed_bytes_are_errors_or_other_values() {
    let count = std::env::var("WEFTGRAD_TEST_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let whole = golden("gpt2.bin");
    // The pickle is the first entry; the directory is at the end.
    let pickle = whole.windows(12).position(|w| w == b"gpt2/.format").unwrap_or(4000).min(4000);
    let mut philox = Philox::new(12, 0);
    let mut below = |n: usize| philox.next_u64() as usize % n;
    let mut read = 0;
    for _ in 0..count {
        let mut bytes = whole.clone();
        for _ in 0..1 + below(3) {
            let at = match below(3) {
                0 => bytes.len() - 1 - below(2500),
                1 => below(bytes.len()),
                _ => below(pickle),
            };
            let values = [below(256) as u8, 0, 255, bytes[at] ^ 1 << below(8)];
            bytes[at] = values[below(4)];
        }
        read += usize::from(load(&bytes).is_ok());
    }
    assert!(read > 0 && read < count, "{read} of {count} were read");
}
