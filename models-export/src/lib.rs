//! Models in the formats of other programs: GGUF for llama.cpp ([`save_gguf`]), and ONNX for many runtimes
//! ([`save_onnx_decoder`], [`save_onnx_vit`], and [`save_onnx`] for any module).
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod gguf;
mod onnx;

pub use gguf::{GgufOptions, GgufWeights, save_gguf};
use models::Family;
use numcore::{Error, Result};
pub use onnx::{OnnxOptions, save_onnx, save_onnx_decoder, save_onnx_vit};

/// Checks that a family is one that is written; those with mixtures of experts are refused by that name.
fn check_family(format: &'static str, family: Family) -> Result<()> {
    match family {
        Family::Gpt2 | Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => Ok(()),
        other => {
            let why = format!("`{}` is not written in this format: save it by `save_pretrained`", other.name());
            Err(Error::config(format, "family", why))
        }
    }
}
