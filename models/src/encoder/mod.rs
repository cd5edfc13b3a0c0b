//! Encoders: BERT with its heads, and ViT.

mod bert;
mod bert_config;
mod vit;

pub use bert::{Bert, BertHead, BertInputs};
pub use bert_config::{BertConfig, BertTask};
pub use vit::{Vit, VitConfig};
