//! Encoder–decoders: T5 and Whisper.

mod attention;
mod generate;
mod speech;
mod stack;
mod t5;
mod text_decoder;
mod whisper;

pub use attention::{RelativeBias, StackAttention};
pub use speech::SpeechPrompt;
pub(crate) use stack::StackInputs;
pub use stack::{LayerStack, LayerStackConfig, RelativeConfig, StackLayer, StackMemory};
pub use t5::{T5, T5Config};
pub use text_decoder::TextDecoder;
pub use whisper::{Whisper, WhisperConfig};
