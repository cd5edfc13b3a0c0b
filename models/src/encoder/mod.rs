//! Encoders: BERT and families like it with their heads, embeddings of sentences, and ViT.

mod bert;
mod bert_config;
mod pooling;
#[cfg(feature = "text")]
mod sentences;
mod vit;

pub use bert::{Bert, BertHead, BertInputs};
pub use bert_config::{BertConfig, BertFamily, BertTask};
pub use pooling::Pooling;
#[cfg(feature = "text")]
pub use sentences::{SentenceEncoder, cosine_similarities};
pub use vit::{Vit, VitConfig};
