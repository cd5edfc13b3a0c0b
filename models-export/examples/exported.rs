//! Writes every reference model as GGUF and ONNX files, and recorded modules with their values, for other programs to
//! read in the test command's stage `formats`.
//!
//! `cargo run -p weftgrad-models-export --example exported -- FOLDER`

#[path = "../tests/recorded/modules.rs"]
mod modules;

use std::path::{Path, PathBuf};

use autograd::Var;
use models::{Decoder, Pretrained, Vit};
use models_export::{GgufOptions, GgufWeights, OnnxOptions, save_gguf, save_onnx, save_onnx_decoder, save_onnx_vit};
use nn::Init;
use numcore::{
    Error, Result, Tensor,
    ops::{ViewOps, cat},
    safetensors,
};
use runtime_cpu::Cpu;

fn main() -> Result<()> {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        return Err(Error::argument("exported", "which folder is to be written to?"));
    };
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
    let (references, init) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/references"), Init::new(&Cpu::new(), 0));
    for (name, context) in [
        ("gpt2", None),
        ("llama", None),
        ("llama_yarn", None),
        ("mistral", Some(5)),
        ("qwen2", Some(4)),
        ("qwen3", None),
    ] {
        let model = Decoder::from_pretrained(references.join(name), &init)?;
        for (kind, weights) in [("f32", GgufWeights::F32), ("f16", GgufWeights::F16), ("bf16", GgufWeights::BF16)] {
            let options = GgufOptions { weights, context, ..GgufOptions::default() };
            save_gguf(&model, folder.join(format!("{name}-{kind}.gguf")), &options)?;
        }
        save_onnx_decoder(&model, folder.join(format!("{name}.onnx")), &OnnxOptions::default())?;
    }
    let vit = Vit::from_pretrained(references.join("vit"), &init)?;
    save_onnx_vit(&vit, folder.join("vit.onnx"), &OnnxOptions::default())?;
    save_recorded(&folder.join("recorded"))
}

/// Writes recorded modules, each with other inputs than those of the recording and their outputs.
fn save_recorded(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    for modules::Recorded { name, module, inputs, forward, has_batch } in
        modules::layers().into_iter().chain(modules::references())
    {
        let named: Vec<_> = inputs.iter().map(|(name, x)| (*name, x)).collect();
        let options = OnnxOptions { any_batch: has_batch, ..OnnxOptions::default() };
        save_onnx(&module, folder.join(format!("{name}.onnx")), &named, &["y"], &forward, &options)?;
        let other = |(name, x): &(&str, Tensor<Cpu>)| {
            let x = if has_batch { cat(&[x; 4], 0)?.narrow(0, 1, 3)? } else { x.clone() };
            Ok((name.to_string(), x.flip(&[-1])?.contiguous()?))
        };
        let mut values = inputs.iter().map(other).collect::<Result<Vec<_>>>()?;
        let given: Vec<_> = values.iter().map(|(_, x)| Var::new(x.clone())).collect();
        values.push(("y".into(), forward(&given)?[0].value()?.contiguous()?));
        safetensors::save(folder.join(format!("{name}.safetensors")), &values, &Default::default())?;
    }
    Ok(())
}
