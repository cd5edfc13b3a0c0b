//! Models against transformers and peft, whose values are in `references/`; files that are malformed; many ranks.

mod adapters;
#[cfg(feature = "text")]
mod chats;
mod clip;
mod common;
mod context;
mod cut_seq2seq;
mod decoders;
mod encoders;
mod experts;
mod folders;
mod generation;
mod gguf;
mod images;
mod long_context;
mod mtp;
mod mxfp4;
mod pickle;
mod published;
mod quantized;
mod ranks;
mod same;
mod saving;
mod sentences;
mod seq2seq;
mod stages;
mod tensor;
mod tensor_adapters;
mod tensor_sequence;
mod whisper;
