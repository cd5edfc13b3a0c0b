//! Layers, one file each. Parameters have PyTorch's names, layouts and default initialization.

mod activation;
mod adapter;
mod attention;
mod batch_norm;
mod bilinear;
mod block_scaled;
mod conv;
mod dropout;
mod embedding;
mod embedding_bag;
mod encoder;
mod gpt;
mod grouped_query;
mod hooked;
mod image;
mod language_model;
mod latent;
mod linear;
mod norm;
mod numbered;
mod pool;
mod recurrent;
mod rotary;
mod sequential;
mod shape;
mod squeeze_excitation;
mod transformer;
mod transposed_linear;
mod weight_norm;

pub use activation::*;
pub use adapter::{Adapter, AdapterSlot};
pub use attention::{AttentionOptions, MultiHeadAttention, check_cut_alike};
pub use batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d, ConditionalBatchNorm};
pub use bilinear::Bilinear;
pub use block_scaled::block_scaled;
pub use conv::{Conv, Conv1d, Conv2d, Conv3d, ConvTranspose, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
pub use dropout::{DropUnit, Dropout};
pub use embedding::Embedding;
pub use embedding_bag::{BagMode, EmbeddingBag};
pub use encoder::{EncoderBlock, EncoderBlockConfig};
pub use gpt::{Gpt, GptConfig};
pub use grouped_query::{GroupedQueryAttention, GroupedQueryConfig, HeadNorm, QkvProjection, ScoreOptions};
pub use hooked::Hooked;
pub use image::{Fold, Pad, PixelShuffle, PixelUnshuffle, Unfold, Upsample};
pub use language_model::{
    LanguageHead, LanguageModel, LanguageModelNames, LanguageProjection, NextTokenLoss, TokenEmbedding,
};
pub use latent::{LatentConfig, LatentProjection};
pub use linear::Linear;
pub use norm::{GroupNorm, InstanceNorm, LayerNorm, RmsNorm};
pub use numbered::Numbered;
pub use pool::{
    AdaptiveAvgPool, AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AdaptiveMaxPool, AdaptiveMaxPool1d,
    AdaptiveMaxPool2d, AdaptiveMaxPool3d, AvgPool, AvgPool1d, AvgPool2d, AvgPool3d, LpPool, MaxPool, MaxPool1d,
    MaxPool2d, MaxPool3d,
};
pub use recurrent::{
    Gru, GruCell, GruResetFirst, GruResetFirstCell, Lstm, LstmCell, Recurrence, Recurrent, RecurrentCell,
    RecurrentConfig, RecurrentOutput, Rnn, RnnCell,
};
pub use rotary::{Rotary, RotaryTables};
pub use sequential::Sequential;
pub use shape::{Flatten, Identity};
pub use squeeze_excitation::SqueezeExcitation;
pub use transformer::{Block, BlockConfig, CausalSelfAttention};
pub use transposed_linear::TransposedLinear;
pub use weight_norm::{SpectralNorm, WeightNorm};

pub use numcore::{
    fused::{BlockScaling, Conv1dOptions, ConvOptions},
    ops::{ConvNd, ConvPadding, Interpolate, Interpolation, PadMode, PoolOptions},
};

use autograd::Var;
use numcore::Runtime;

use crate::Param;

/// An optional parameter as a variable.
fn optional<R: Runtime>(parameter: &Option<Param<R>>) -> Option<Var<R>> {
    parameter.as_ref().map(Param::var)
}

/// Defines the method `without_bias` of a layer.
macro_rules! without_bias {
    ($($layer:ident),*) => {$(
        impl<R: numcore::Runtime> $layer<R> {
            /// Drops the bias.
            pub fn without_bias(mut self) -> Self {
                self.bias = None;
                self
            }
        }
    )*};
}
use without_bias;
