//! A decoder-only language model.

use autograd::Var;
use numcore::{Result, Runtime, Within};

use super::{
    Activation, Block, BlockConfig, Dropout, Embedding, GptEmbedding, GptHead, GptProjection, LayerNorm, Linear,
};
use crate::{
    Forward, Init, Initializer, Module, ModuleExt,
    parallel::{ContextSlot, TensorPlan, VocabularyLoss},
};

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
/// (`i64`) to logits of each next token, `[B, T, V]`. Where sequences are cut over ranks, logits are those of this rank's part of the tokens.
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
    /// The ranks that sequences are cut over, and which part of them is here: losses of one's own take their targets by it.
    pub context: ContextSlot<R>,
    dropout: Dropout,
}

impl<R: Runtime> Gpt<R> {
    /// A model of the given sizes.
    pub fn new(init: &Init<R>, config: GptConfig) -> Result<Self> {
        let GptConfig { vocab, context, layers, heads, width, bias, dropout, activation, tied_head } = config;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let block = BlockConfig { width, heads, bias, dropout, activation };
        let head = || Linear::new(init, width, vocab).map(|head| head.without_bias().to_vocabulary());
        let model = Gpt {
            wte: Embedding::new(init, vocab, width)?,
            wpe: Embedding::new(init, context, width)?.never_cut(),
            blocks: (0..layers).map(|_| Block::new(init, block)).collect::<Result<_>>()?,
            lnf: LayerNorm::new(init, width)?,
            head: (!tied_head).then(head).transpose()?,
            context: ContextSlot::cuts(),
            dropout: Dropout::new(dropout)?,
        };
        // Errors name parameters from the first pass on.
        model.named_parameters();
        Ok(model)
    }

    /// The input of the first block: the sum of token and position embeddings, `[B, T, C]`, of this rank's part of the sequence where that is
    /// cut.
    #[track_caller]
    pub fn embed(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let Gpt { wte, wpe, dropout, context, .. } = self;
        GptEmbedding { wte, wpe, dropout, context }.forward(tokens)
    }

    /// The logits for the output of the last block: all of them, on every rank, where the projection is cut along the vocabulary.
    #[track_caller]
    pub fn logits(&self, x: &Var<R>) -> Result<Var<R>> {
        self.end().logits(x)
    }

    /// The loss of predicting `targets` (`i64`, `[B, T]`) after `tokens`: the cross-entropy of [`forward`](Forward::forward)'s logits, of which
    /// a few rows are in memory at a time ([`linear_cross_entropy`](numcore::fused::NnOps::linear_cross_entropy)). Where the projection is cut along the vocabulary no rank has the logits of all of it. Where sequences are cut over ranks, tokens and targets
    /// are still those of whole sequences, and the loss is by this rank's part of them ([`ContextSlot::loss`]).
    pub fn next_token_loss(&self, tokens: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        self.next_token_loss_of(&self.decoded(tokens)?, targets, loss)
    }

    /// The loss, like [`next_token_loss`](Gpt::next_token_loss), for the output of the last block.
    pub fn next_token_loss_of(&self, x: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        self.end().loss(x, targets, loss, &self.context)
    }

    /// How this model is cut over ranks: attention by heads, the layers after it along their channels, embedding and head along the
    /// vocabulary.
    pub fn tensor_plan() -> TensorPlan {
        TensorPlan::new()
            .column("blocks.*.qkv")
            .row("blocks.*.proj")
            .column("blocks.*.fc1")
            .row("blocks.*.fc2")
            .vocabulary("wte")
            .vocabulary("head")
            .if_there()
            .sequence("blocks.*.ln1")
            .sequence("blocks.*.ln2")
            .sequence("lnf")
            .sequence_region("blocks.*")
            .sequence_region("lnf")
    }

    /// The output of the last block.
    fn decoded(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let block = |x: Var<R>, (i, block): (usize, &Block<R>)| block.forward(&x).within(format_args!("blocks.{i}"));
        self.blocks.iter().enumerate().try_fold(self.embed(tokens)?, block)
    }

    /// The layers after the blocks.
    fn end(&self) -> GptHead<'_, R> {
        let projection = self.head.as_ref().map_or(GptProjection::Table(&self.wte), GptProjection::Head);
        GptHead { lnf: &self.lnf, projection }
    }
}

impl<R: Runtime> Forward<R> for Gpt<R> {
    #[track_caller]
    fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        self.logits(&self.decoded(tokens)?)
    }
}
