//! A decoder-only language model.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ViewOps},
};

use super::{Activation, Block, BlockConfig, Dropout, Embedding, LayerNorm, Linear};
use crate::{Forward, Init, Initializer, Module};

/// The sizes and options of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptConfig {
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// The number of decoder blocks.
    pub layers: usize,
    /// The number of heads, which divides `width`.
    pub heads: usize,
    /// The number of channels, C.
    pub width: usize,
    /// Whether linear layers have biases (the head never has one, norms always do).
    pub bias: bool,
    /// The dropout probability after the embeddings and in every block.
    pub dropout: f64,
    /// The activation between the linear layers of a block; GPT-2's is [`Activation::GeluTanh`].
    pub activation: Activation,
    /// Whether the head shares the weight of the token embedding.
    pub tied_head: bool,
}

impl Default for GptConfig {
    /// A small byte-level model.
    fn default() -> Self {
        GptConfig {
            vocab: 256,
            context: 256,
            layers: 6,
            heads: 6,
            width: 384,
            bias: true,
            dropout: 0.0,
            activation: Activation::Gelu,
            tied_head: false,
        }
    }
}

/// A decoder-only language model with learned positions and pre-norm blocks (Radford et al. 2019): tokens `[B, T]`
/// (`i64`) to logits of each next token, `[B, T, V]`.
///
/// Weights are initialized as normal with standard deviation 0.02 and biases 0, unless `init` says otherwise.
#[derive(Debug, Module)]
pub struct Gpt<R: Runtime> {
    /// The token embedding, `[V, C]`.
    pub wte: Embedding<R>,
    /// The position embedding, `[T, C]`.
    pub wpe: Embedding<R>,
    /// The decoder blocks, in order.
    pub blocks: Vec<Block<R>>,
    /// The norm before the logits.
    pub lnf: LayerNorm<R>,
    /// The projection to logits; absent where it is the token embedding.
    pub head: Option<Linear<R>>,
    dropout: Dropout,
}

impl<R: Runtime> Gpt<R> {
    /// A model of the given sizes.
    pub fn new(init: &Init<R>, config: GptConfig) -> Result<Self> {
        let GptConfig { vocab, context, layers, heads, width, bias, dropout, activation, tied_head } = config;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let block = BlockConfig { width, heads, bias, dropout, activation };
        let head = || Linear::new(init, width, vocab).map(Linear::without_bias);
        Ok(Gpt {
            wte: Embedding::new(init, vocab, width)?,
            wpe: Embedding::new(init, context, width)?,
            blocks: (0..layers).map(|_| Block::new(init, block)).collect::<Result<_>>()?,
            lnf: LayerNorm::new(init, width)?,
            head: (!tied_head).then(head).transpose()?,
            dropout: Dropout::new(dropout)?,
        })
    }

    /// The input of the first block: the sum of token and position embeddings, `[B, T, C]`.
    #[track_caller]
    pub fn embed(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let (shape, context) = (tokens.spec().shape, self.wpe.weight.shape()[0]);
        let &[_, t] = &shape[..] else {
            return Err(Error::shape("gpt", &[shape], "tokens must be [B, T]"));
        };
        if t > context {
            return Err(Error::shape("gpt", &[shape], format!("{t} tokens are longer than the context of {context}")));
        }
        // Positions are rows 0 .. T: a view of the table, not a gather.
        let positions = self.wpe.weight.var().narrow(0, 0, t)?;
        self.dropout.forward(&self.wte.weight.var().embedding(tokens).within("wte")?.add(&positions)?)
    }

    /// The logits for the output of the last block.
    #[track_caller]
    pub fn logits(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.lnf.forward(x).within("lnf")?;
        match &self.head {
            Some(head) => head.forward(&x).within("head"),
            None => x.linear(&self.wte.weight.var(), None).within("wte"),
        }
    }
}

impl<R: Runtime> Forward<R> for Gpt<R> {
    #[track_caller]
    fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let block = |x: Var<R>, (i, block): (usize, &Block<R>)| block.forward(&x).within(format_args!("blocks.{i}"));
        self.logits(&self.blocks.iter().enumerate().try_fold(self.embed(tokens)?, block)?)
    }
}
