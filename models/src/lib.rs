//! Pretrained models: Hugging Face's folders in and out, generation, adapters, chat.
//!
//! A [`Decoder`] is a model of the family that `config.json` names, one of those in [`Family`].
//! [`Pretrained`] reads a folder into a model and writes one that transformers loads:
//!
//! ```no_run
//! use models::{Decoder, Pretrained};
//! use nn::Init;
//! use runtime_cpu::Cpu;
//! # fn main() -> numcore::Result<()> {
//! let model = Decoder::from_pretrained("Qwen2.5-0.5B", &Init::new(&Cpu::new(), 0))?;
//! model.save_pretrained("mine")?;
//! # Ok(())
//! # }
//! ```
//!
//! **Invariant**: a model that would compute something else than transformers does is an error. A field, a weight or an
//! option that this crate does not know is an error with its name.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod chat;
mod clip;
mod config;
mod convert;
mod decoder;
mod encoder;
mod files;
mod gathered;
mod generate;
#[cfg(feature = "hub")]
mod hub;
mod lora;
mod pretrained;
mod quantize;
mod report;
mod seq2seq;
mod source;
mod tied;

#[cfg(feature = "text")]
pub use chat::{ChatDate, ChatTemplate, Conversation};
pub use chat::{ChatExample, pack_examples};
pub use clip::{Clip, ClipConfig, ClipImage, ClipImageConfig, ClipText, ClipTextConfig, ClipTower};
pub use config::{ConfigFields, DecoderConfig, DecoderMixtures, DecoderOptions, Family, RopeConfig, RopeScaling};
pub use convert::{Change, ConversionRule, ConversionTable, Converted, GGUF_TABLE, StackNames, StackPlace, StackRule};
pub use decoder::{
    Decoder, DecoderFeedForward, DecoderInputs, DecoderLayer, DecoderMlp, DecoderNorm, KvCache, MtpDepth, MtpLayer,
    UpProjection, mtp_targets,
};
pub use encoder::{
    Bert, BertConfig, BertFamily, BertHead, BertInputs, BertTask, ConvNext, ConvNextConfig, ConvNextLayer,
    ConvNextStage, NormedConv, Pooling, ResNet, ResNetConfig, ResNetLayer, ResNetStage, Vit, VitConfig,
};
#[cfg(feature = "text")]
pub use encoder::{SentenceEncoder, cosine_similarities};
pub use files::{JsonObject, SaveOptions};
pub use gathered::gathered;
pub use generate::{
    FinishReason, Generated, GenerationOptions, Prompt, Rollout, RolloutBatch, Sampling, StopTexts, TimeStampRules,
    generate, rollouts,
};
#[cfg(feature = "hub")]
pub use hub::{Hub, HubOptions};
pub use lora::{Lora, LoraAdapter, LoraConfig, LoraTargets, LowRank};
pub use pretrained::{Pretrained, require_unchanged};
pub use quantize::{QuantizeConfig, Weight4bit, quantize};
pub use report::PretrainedReport;
pub use seq2seq::{
    LayerStack, LayerStackConfig, RelativeBias, RelativeConfig, SpeechPrompt, StackAttention, StackLayer, StackMemory,
    T5, T5Config, TextDecoder, Whisper, WhisperConfig,
};
