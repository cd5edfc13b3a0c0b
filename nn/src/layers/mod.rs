//! Layers: one file each. Parameters have PyTorch's names, layouts and first values.

mod activation;
mod attention;
mod batch_norm;
mod conv;
mod dropout;
mod embedding;
mod gpt;
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
pub use conv::{Conv1d, Conv1dOptions, Conv2d, ConvTranspose2d};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use gpt::{Gpt, GptConfig};
pub use linear::Linear;
pub use norm::{GroupNorm, LayerNorm, RmsNorm};
pub use pool::{AdaptiveAvgPool2d, AvgPool2d, MaxPool2d};
pub use recurrent::{Cell, Gru, GruCell, Lstm, LstmCell, Recurrent, RecurrentConfig, RecurrentOutput, Rnn, RnnCell};
pub use sequential::Sequential;
pub use shape::{Flatten, Identity};
pub use transformer::{Block, BlockConfig, CausalSelfAttention};

pub use numcore::fused::ConvOptions;

use autograd::Var;
use numcore::Runtime;

use crate::Param;

/// A parameter that may be absent, as a variable.
fn optional<R: Runtime>(parameter: &Option<Param<R>>) -> Option<Var<R>> {
    parameter.as_ref().map(Param::var)
}

/// A layer's `without_bias`.
macro_rules! without_bias {
    ($($layer:ident),*) => {$(
        impl<R: numcore::Runtime> $layer<R> {
            /// The same without a bias.
            pub fn without_bias(mut self) -> Self {
                self.bias = None;
                self
            }
        }
    )*};
}
use without_bias;
