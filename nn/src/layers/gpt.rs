//! A decoder-only language model.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, PointwiseOps, ViewOps},
};

use super::{
    Activation, Block, BlockConfig, Dropout, Embedding, LanguageModel, LanguageModelNames, LayerNorm, Linear,
    TokenEmbedding,
};
use crate::{
    Forward, Init, Initializer, Stage,
    module::one_value,
    parallel::{CutLayer, Cuts, TensorPlan, VocabularyLoss},
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
    /// True if linear layers have biases (the head never has one, norms always do).
    pub bias: bool,
    /// The dropout probability after the embeddings and in every block.
    pub dropout: f64,
    /// The activation between the linear layers of a block; GPT-2's is [`Activation::GeluTanh`].
    pub activation: Activation,
    /// True if the head shares the weight of the token embedding.
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

const NAMES: LanguageModelNames =
    LanguageModelNames { tokens: "wte", positions: "wpe", blocks: "blocks", norm: "lnf", head: "head" };

/// A decoder-only language model with learned positions and pre-norm blocks (Radford et al. 2019). It maps tokens
/// `[B, T]` (`i64`) to logits of each next token, `[B, T, V]`. Where sequences are cut over ranks, logits are those of
/// this rank's part of the tokens.
///
/// Weights are initialized as normal with standard deviation 0.02 and biases as 0, unless `init` sets others.
/// Parameters are `wte` and `wpe`, those of `blocks`, `lnf` and `head`.
pub type Gpt<R> = LanguageModel<R, Block<R>, LayerNorm<R>>;

impl<R: Runtime> Gpt<R> {
    /// A model of the given sizes.
    #[track_caller]
    pub fn new(init: &Init<R>, config: GptConfig) -> Result<Self> {
        let GptConfig { vocab, context, layers, heads, width, bias, dropout, activation, tied_head } = config;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let block = BlockConfig { width, heads, bias, dropout, activation };
        let embedding = TokenEmbedding {
            tokens: Embedding::new(init, vocab, width)?,
            positions: Some(Embedding::new(init, context, width)?.with_cuts(Cuts::None)),
            dropout: Dropout::new(dropout)?,
        };
        let blocks = (0..layers).map(|_| Block::new(init, block)).collect::<Result<_>>()?;
        let norm = LayerNorm::new(init, width)?;
        let head = || Linear::new(init, width, vocab).map(|head| head.without_bias().with_cuts(Cuts::Table));
        Ok(LanguageModel::of(&NAMES, embedding, blocks, norm, (!tied_head).then(head).transpose()?))
    }

    /// Computes the input of the first block, `[B, T, C]`: the sum of token and position embeddings. Where sequences
    /// are cut, it is that of this rank's part.
    #[track_caller]
    pub fn embed(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let TokenEmbedding { tokens: table, positions, dropout } = self.start()?;
        let (shape, learned) = (tokens.spec().shape, positions.as_ref().map(|table| &table.weight));
        let &[_, t] = &shape[..] else {
            return Err(Error::shape("gpt", &[shape], "tokens must be [B, T]")).at_caller();
        };
        if let Some(context) = learned.map(|table| table.shape()[0]).filter(|&context| t > context) {
            return Err(Error::shape("gpt", &[shape], format!("{t} tokens are longer than the context of {context}")))
                .at_caller();
        }
        let part = self.context.part(t)?;
        // Every rank keeps this order: tokens are compared, one table is read, then the other.
        let x = table.forward(&self.context.take_tokens(tokens)?).within(NAMES.tokens)?;
        // Positions are views of the table's rows, not a gather, and are read when they are added; joined ranges are
        // read when joined.
        let x = learned.map_or(Ok(x.clone()), |table| x.add(&part.take(&table.var().narrow(0, 0, t)?, 0)?))?;
        let x = dropout.forward_part(&x, Some(&part).filter(|part| !part.is_whole()))?;
        table.weight.placed().map_or(Ok(x.clone()), |placed| placed.enter_sequence(&x))
    }

    /// The loss of predicting `targets` (`i64`, `[B, T]`) after `tokens`: the cross-entropy of
    /// [`forward`](Forward::forward)'s logits, computed by
    /// [`next_token_loss_of`](LanguageModel::next_token_loss_of). Where the projection is cut along the vocabulary,
    /// no rank has all logits. Where sequences are cut over ranks, tokens and targets are still those of whole
    /// sequences.
    #[track_caller]
    pub fn next_token_loss(&self, tokens: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        self.next_token_loss_of(&self.decoded(self.embed(tokens)?)?, targets, loss)
    }

    /// The plan that cuts this model over ranks: attention by heads, the layers after it along their channels,
    /// embedding and head along the vocabulary.
    pub fn tensor_plan() -> TensorPlan {
        TensorPlan::new()
            .column("blocks.*.qkv")
            .row("blocks.*.proj")
            .column("blocks.*.scores")
            .optional()
            .column("blocks.*.fc1")
            .row("blocks.*.fc2")
            .vocabulary("wte")
            .vocabulary("head")
            .optional()
            .sequence("blocks.*.ln1")
            .sequence("blocks.*.ln2")
            .sequence("lnf")
            .sequence_region("blocks.*")
            .sequence_region("lnf")
    }

    /// The output of the last block, given the input of the first.
    fn decoded(&self, x: Var<R>) -> Result<Var<R>> {
        self.through_blocks(x, |_, block, x| block.forward(&x))
    }
}

/// Maps tokens to logits. A stage starts from the output of the stage before, or ends with the input of the next.
impl<R: Runtime> Forward<R> for Gpt<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = if self.embedding.is_some() { self.embed(x)? } else { x.clone() };
        self.handed_on(self.decoded(x)?)
    }
}

impl<R: Runtime> Stage<R> for Gpt<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        Ok(vec![self.forward(one_value("gpt stage", inputs)?)?])
    }
}
