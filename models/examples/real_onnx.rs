//! ONNX files of real models: those of silero's voice activity are read and computed, and MiniLM's embeddings are
//! written, for onnxruntime to compute.
//!
//! It reads the folder of `conformance/against/real_models.py`, and `conformance/against/real_onnx.py` what it writes:
//! `cargo run --release -p weftgrad-models --features text --example real_onnx -- FOLDER`

use std::path::PathBuf;

use autograd::{Var, no_grad};
use models::SentenceEncoder;
use models_export::{OnnxOptions, save_onnx};
use models_import::OnnxModel;
use nn::{Init, ModuleExt};
use numcore::{DType, Error, Result, Tensor, safetensors};
use runtime_cpu::Cpu;

/// The tokens of the longest text.
const LONGEST: usize = 256;

fn main() -> Result<()> {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        return Err(Error::argument("real_onnx", "which folder has the models?"));
    };
    let cpu = Cpu::with_threads(2);
    let all = safetensors::load(folder.join("silero.safetensors"), &cpu)?;
    for name in ["silero_vad_16k_sequence", "silero_vad_16k_op15"] {
        let model = OnnxModel::load(folder.join(format!("{name}.onnx")), &cpu)?;
        model.eval();
        let of = |kind: &str, port: &str| {
            let found = all.iter().find(|(own, _)| *own == format!("{name}.{kind}.{port}"));
            found.map(|(_, x)| x.clone()).ok_or_else(|| Error::format(name, format!("no value of `{port}`")))
        };
        let inputs = model.inputs().iter().map(|port| Ok((&*port.name, Var::new(of("in", &port.name)?))));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let inputs: Vec<_> = inputs.iter().map(|(name, x)| (*name, x)).collect();
        for (port, y) in no_grad(|| model.forward_named(&inputs))? {
            let (ours, theirs) = (y.value()?.to_f64s()?, of("out", &port)?.to_f64s()?);
            let apart = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let holds = ours.len() == theirs.len() && apart <= 1e-5;
            println!(
                "{} {name}: `{port}` is within 1e-5 of onnxruntime's: {apart:.1e}",
                if holds { "ok " } else { "NO " }
            );
            if !holds {
                return Err(Error::state("real_onnx", format!("`{port}` of {name} is {apart:.1e} off")));
            }
        }
    }
    let encoder = SentenceEncoder::from_pretrained(folder.join("minilm"), &Init::new(&cpu, 0))?;
    encoder.eval();
    let tokens = Tensor::full(&cpu, [1, LONGEST], DType::I64, 101)?;
    let inputs = [("tokens", &tokens), ("mask", &tokens)];
    let embed = |x: &[Var<Cpu>]| Ok(vec![encoder.embed_padded(&x[0], &x[1])?]);
    let options = OnnxOptions { any_batch: true, ..OnnxOptions::default() };
    save_onnx(&encoder, folder.join("minilm.onnx"), &inputs, &["embeddings"], embed, &options)
}
