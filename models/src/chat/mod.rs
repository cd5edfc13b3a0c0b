//! Conversations: to text by a model's template, to tokens with a mask of the assistant's messages, to packed rows.

mod example;
#[cfg(feature = "text")]
mod gguf;
#[cfg(feature = "text")]
mod mask;
#[cfg(feature = "text")]
mod python;
#[cfg(feature = "text")]
mod source;
#[cfg(feature = "text")]
mod template;

pub use example::{ChatExample, pack_examples};
#[cfg(feature = "text")]
pub use template::{ChatDate, ChatTemplate, Conversation};
