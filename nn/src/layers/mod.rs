//! Layers, one file each. Parameters have PyTorch's names, layouts and default initialization.

mod activation;
mod attention;
mod batch_norm;
mod conv;
mod dropout;
mod embedding;
mod gpt;
mod image;
mod linear;
mod norm;
mod pool;
mod recurrent;
mod sequential;
mod shape;
mod transformer;

pub use activation::*;
pub use attention::{AttentionOptions, MultiHeadAttention};
pub use batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d};
pub use conv::{
    Conv, Conv1d, Conv1dOptions, Conv2d, Conv3d, ConvTranspose, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d,
};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use gpt::{Gpt, GptConfig};
pub use image::{Fold, Pad, PixelShuffle, PixelUnshuffle, Unfold, Upsample};
pub use linear::Linear;
pub use norm::{GroupNorm, LayerNorm, RmsNorm};
pub use pool::{
    AdaptiveAvgPool, AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AdaptiveMaxPool, AdaptiveMaxPool1d,
    AdaptiveMaxPool2d, AdaptiveMaxPool3d, AvgPool, AvgPool1d, AvgPool2d, AvgPool3d, LpPool, MaxPool, MaxPool1d,
    MaxPool2d, MaxPool3d,
};
pub use recurrent::{
    Gru, GruCell, GruResetFirst, GruResetFirstCell, Lstm, LstmCell, Recurrence, Recurrent, RecurrentCell,
    RecurrentConfig, RecurrentOutput, Rnn, RnnCell,
};
pub use sequential::Sequential;
pub use shape::{Flatten, Identity};
pub use transformer::{Block, BlockConfig, CausalSelfAttention};

pub use numcore::{
    fused::ConvOptions,
    ops::{ConvNd, ConvPadding, Interpolate, Interpolation, PadMode, PoolOptions},
};

use autograd::Var;
use numcore::Runtime;

use crate::Param;

/// A parameter that may be absent, as a variable.
fn optional<R: Runtime>(parameter: &Option<Param<R>>) -> Option<Var<R>> {
    parameter.as_ref().map(Param::var)
}

/// Defines a layer's `without_bias`.
macro_rules! without_bias {
    ($($layer:ident),*) => {$(
        impl<R: numcore::Runtime> $layer<R> {
            /// This layer without a bias.
            pub fn without_bias(mut self) -> Self {
                self.bias = None;
                self
            }
        }
    )*};
}
use without_bias;
