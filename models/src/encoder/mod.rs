//! Encoders: BERT and families like it with their heads, embeddings of sentences, and classifiers of images.

mod bert;
mod bert_config;
mod convnext;
mod pooling;
mod resnet;
#[cfg(feature = "text")]
mod sentences;
mod vit;

pub use bert::{Bert, BertHead, BertInputs};
pub use bert_config::{BertConfig, BertFamily, BertTask};
pub(crate) use bert_config::{expect_type, same, written};
pub use convnext::{ConvNext, ConvNextConfig, ConvNextLayer, ConvNextStage};
pub use pooling::Pooling;
pub use resnet::{NormedConv, ResNet, ResNetConfig, ResNetLayer, ResNetStage};
#[cfg(feature = "text")]
pub use sentences::{SentenceEncoder, cosine_similarities};
pub use vit::{Vit, VitConfig};
