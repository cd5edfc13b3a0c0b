//! BERT, RoBERTa and DistilBERT: encoders of text.

use autograd::Var;
use nn::{
    Activation, Embedding, EncoderBlock, Forward, Init, Initializer, LayerNorm, Linear, Module, ModuleExt, Param,
    Visitor,
    parallel::{ContextSlot, CutLayer, Cuts},
};
use numcore::{
    DType, Error, Result, Runtime, Within,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ScanOps, ViewOps},
};
use serde_json::{Map, Value};

use super::{BertConfig, BertFamily, BertTask};
use crate::{
    config::ConfigFields,
    convert::{BERT, ConversionTable, DISTILBERT, ROBERTA, ROBERTA_OF_TEXTS},
    pretrained::Pretrained,
};

/// An encoder of text (Devlin et al. 2019) in Hugging Face's format, of one of the families in [`BertFamily`], with the
/// head for its task.
///
/// Dropout is not applied: its fields in `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct Bert<R: Runtime> {
    /// The token embedding, `[V, C]`.
    pub embed_tokens: Embedding<R>,
    /// The position embedding, `[T, C]` for a context of `T` tokens. RoBERTa's has rows before the first token's.
    pub embed_positions: Embedding<R>,
    /// The embedding of segments, `[S, C]`: the first text, the second. DistilBERT has none.
    pub embed_types: Option<Embedding<R>>,
    /// The norm of the sum of embeddings.
    pub embed_norm: LayerNorm<R>,
    /// The layers, in order.
    pub layers: Vec<EncoderBlock<R>>,
    /// The linear layer that, with tanh (DistilBERT: ReLU), computes the first token's state for the head; `None` for
    /// tasks that do not use it.
    pub pooler: Option<Linear<R>>,
    /// The head, by the task.
    pub head: BertHead<R>,
    /// The place for the ranks that sequences are cut over. Tokens, segments and masks are of whole sequences, states
    /// and logits of tokens of this rank's part.
    pub context: ContextSlot<R>,
    #[module(skip)]
    config: BertConfig,
}

/// The head of a [`Bert`].
#[derive(Debug)]
pub enum BertHead<R: Runtime> {
    /// No head: the output is the states.
    States,
    /// Logits of the vocabulary, whose weight is the token embedding.
    MaskedLm {
        /// The linear layer before the norm.
        transform: Linear<R>,
        /// The norm before the logits.
        norm: LayerNorm<R>,
        /// The bias of the logits, `[V]`.
        bias: Param<R>,
    },
    /// Logits of classes, of the text or of each token.
    Classifier(Linear<R>),
}

impl<R: Runtime> Module<R> for BertHead<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        match self {
            BertHead::States => {}
            BertHead::MaskedLm { transform, norm, bias } => {
                transform.visit("transform", visitor);
                norm.visit("norm", visitor);
                bias.visit("bias", visitor);
            }
            BertHead::Classifier(linear) => linear.visit("classifier", visitor),
        }
        visitor.leave();
    }
}

/// The inputs of a [`Bert`] besides tokens.
pub struct BertInputs<'a, R: Runtime> {
    /// The tokens that are no padding, `[B, T]`, `bool` or numbers, with 0 for padding; all if `None`.
    pub mask: Option<&'a Var<R>>,
    /// The segment of each token, `[B, T]` (`i64`); 0 if `None`.
    pub token_types: Option<&'a Var<R>>,
}

impl<R: Runtime> Default for BertInputs<'_, R> {
    fn default() -> Self {
        BertInputs { mask: None, token_types: None }
    }
}

impl<R: Runtime> Bert<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` sets
    /// other initializers.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: BertConfig) -> Result<Self> {
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        config.check().at_caller()?;
        let (block, width) = (config.block, config.block.width);
        let mut embed_tokens = Embedding::new(init, config.vocab, width)?;
        if let Some(row) = config.padding {
            embed_tokens = embed_tokens.with_frozen_row(row).at_caller()?;
        }
        if config.task == BertTask::MaskedLm {
            // The head reads the table as its weight.
            embed_tokens = embed_tokens.with_cuts(Cuts::None);
        }
        let pools = match config.task {
            BertTask::Sequence => true,
            BertTask::States => config.family != BertFamily::DistilBert,
            _ => false,
        };
        let first = config.first_position();
        let mut embed_positions = Embedding::new(init, config.context + first, width)?.with_cuts(Cuts::None);
        if let Some(padding) = first.checked_sub(1) {
            embed_positions = embed_positions.with_frozen_row(padding).at_caller()?;
        }
        let types = || Embedding::new(init, config.token_types, width).map(|types| types.with_cuts(Cuts::None));
        let model = Bert {
            embed_tokens,
            embed_positions,
            embed_types: (config.token_types > 0).then(types).transpose()?,
            embed_norm: LayerNorm { eps: block.eps, ..LayerNorm::new(init, width)? },
            layers: (0..config.layers).map(|_| EncoderBlock::new(init, block)).collect::<Result<_>>().at_caller()?,
            pooler: pools.then(|| Linear::new(init, width, width)).transpose()?,
            head: BertHead::new(init, &config).at_caller()?,
            context: ContextSlot::cuts(),
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Computes the states `[B, T, C]` of tokens `[B, T]` (`i64`).
    ///
    /// # Errors
    /// Fails if shapes do not fit, or a text is longer than the context.
    #[track_caller]
    pub fn states(&self, tokens: &Var<R>, inputs: &BertInputs<'_, R>) -> Result<Var<R>> {
        let shape = tokens.spec().shape;
        let &[b, t] = &shape[..] else {
            return Err(Error::shape("bert", &[shape], "tokens must be [B, T]")).at_caller();
        };
        if t > self.config.context {
            let why = format!("{t} tokens are more than the context of {}", self.config.context);
            return Err(Error::shape("bert", &[shape], why)).at_caller();
        }
        let positions = self.positions(tokens, t).within("embed_positions")?;
        let tokens = &self.context.take_tokens(tokens)?;
        let types = match (&self.embed_types, inputs.token_types) {
            (Some(table), Some(types)) => {
                let types = self.context.take(types, 1)?;
                Some(table.weight.var().embedding(&types).within("embed_types")?)
            }
            (Some(table), None) => Some(table.weight.var().narrow(0, 0, 1)?),
            (None, None) => None,
            (None, Some(_)) => {
                let why = "this model has no segments: give no `token_types`";
                return Err(Error::unsupported("bert", why)).at_caller();
            }
        };
        let x = self.embed_tokens.forward(tokens).within("embed_tokens")?.add(&positions)?;
        let x = types.map_or(Ok(x.clone()), |types| x.add(&types))?;
        let mut x = self.embed_norm.forward(&x).within("embed_norm")?;
        let seen = |mask: &Var<R>| {
            let mask = if mask.dtype() == DType::Bool { mask.clone() } else { mask.ne(0.0)? };
            mask.reshape([b, 1, 1, t])
        };
        let mask = inputs.mask.map(seen).transpose()?;
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward_masked(&x, mask.as_ref()).within(format_args!("layers.{i}")).at_caller()?;
        }
        Ok(x)
    }

    /// The embeddings of this rank's positions: `[T, C]`, or `[B, T, C]` where they depend on the padding among tokens.
    fn positions(&self, tokens: &Var<R>, t: usize) -> Result<Var<R>> {
        let Some(padding) = self.config.first_position().checked_sub(1) else {
            return self.context.take(&self.embed_positions.weight.var().narrow(0, 0, t)?, 0);
        };
        let counted = tokens.ne(padding as f64)?.to_dtype(DType::I64)?;
        let positions = counted.cumsum(1)?.mul(&counted)?.add(padding as f64)?;
        self.embed_positions.forward(&self.context.take(&positions, 1)?)
    }

    /// Computes the head's output: logits `[B, T, V]`, `[B, N]` or `[B, T, N]`; without a head, the states.
    ///
    /// # Errors
    /// Fails if [`states`](Bert::states) would fail.
    #[track_caller]
    pub fn forward_with(&self, tokens: &Var<R>, inputs: &BertInputs<'_, R>) -> Result<Var<R>> {
        let states = self.states(tokens, inputs)?;
        match &self.head {
            BertHead::States => Ok(states),
            BertHead::Classifier(classifier) if self.config.task == BertTask::Sequence => {
                classifier.forward(&self.pooled(&states)?).within("head.classifier")
            }
            BertHead::Classifier(classifier) => classifier.forward(&states).within("head.classifier"),
            BertHead::MaskedLm { transform, norm, bias } => {
                // RoBERTa's head has GELU, whatever its layers have.
                let is_fixed = self.config.family.skips_padding();
                let activation = if is_fixed { Activation::Gelu } else { self.config.block.activation };
                let x = activation.apply(&transform.forward(&states).within("head.transform")?).at_caller()?;
                let x = norm.forward(&x).within("head.norm")?;
                x.linear(&self.embed_tokens.weight.var(), Some(&bias.var())).within("head")
            }
        }
    }

    /// Computes `pooler_output` of transformers, `[B, C]`, from `states: [B, T, C]`: `tanh` (DistilBERT: ReLU) of the
    /// linear layer [`pooler`](Bert::pooler) of the first token. Classifiers of texts read it.
    ///
    /// # Errors
    /// Fails if the model has no pooler, as for the tasks [`MaskedLm`](BertTask::MaskedLm) and
    /// [`Tokens`](BertTask::Tokens). Also if sequences are cut over ranks, of which one has the first token.
    #[track_caller]
    pub fn pooled(&self, states: &Var<R>) -> Result<Var<R>> {
        let Some(pooler) = &self.pooler else {
            return Err(Error::unsupported("bert", "a model for tokens has no pooler")).at_caller();
        };
        if self.context.ranks() > 1 {
            let why = "sequences are cut over ranks, of which one has the first token: classify by tokens, or leave sequences whole";
            return Err(Error::unsupported("bert", why)).at_caller();
        }
        let pooled = pooler.forward(&states.select(1, 0)?).within("pooler")?;
        if self.config.family == BertFamily::DistilBert { pooled.relu() } else { pooled.tanh() }
    }
}

impl<R: Runtime> BertHead<R> {
    fn new(init: &Init<R>, config: &BertConfig) -> Result<Self> {
        let width = config.block.width;
        Ok(match config.task {
            BertTask::States => BertHead::States,
            BertTask::Sequence | BertTask::Tokens => BertHead::Classifier(Linear::new(init, width, config.labels)?),
            BertTask::MaskedLm => BertHead::MaskedLm {
                transform: Linear::new(init, width, width)?,
                norm: LayerNorm { eps: config.block.eps, ..LayerNorm::new(init, width)? },
                bias: init.bias([config.vocab], Initializer::Zeros)?,
            },
        })
    }
}

/// The forward pass without padding, with one segment.
impl<R: Runtime> Forward<R> for Bert<R> {
    fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        self.forward_with(tokens, &BertInputs::default())
    }
}

impl<R: Runtime> Pretrained<R> for Bert<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        Bert::new(init, BertConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        match (self.config.family, self.config.task) {
            (BertFamily::Bert, _) => BERT,
            (BertFamily::DistilBert, _) => DISTILBERT,
            (_, BertTask::Sequence) => ROBERTA_OF_TEXTS,
            _ => ROBERTA,
        }
    }

    fn does_without(&self, parameter: &str) -> bool {
        let is_tied = parameter.starts_with("head.decoder.");
        is_tied || self.pooler.is_none() && parameter.starts_with("pooler.")
    }

    fn tied_to(&self, parameter: &str) -> Option<&'static str> {
        match parameter {
            "head.decoder.weight" if self.config.task == BertTask::MaskedLm => Some("embed_tokens.weight"),
            "head.decoder.bias" if self.config.task == BertTask::MaskedLm => Some("head.bias"),
            _ => None,
        }
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
