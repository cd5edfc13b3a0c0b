//! The decoder: one model with options for every family there is.

mod cache;
mod inputs;
mod layer;
mod tensor_plan;

use autograd::Var;
use nn::{
    Embedding, Forward, Init, Initializer, Linear, Module, ModuleExt, Rotary,
    moe::Routing,
    parallel::{ContextSlot, VocabularyLoss},
};
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, IndexOps, PointwiseOps},
};
use serde_json::{Map, Value};

pub use cache::KvCache;
pub use inputs::DecoderInputs;
use inputs::Placement;
pub use layer::{DecoderFeedForward, DecoderLayer, DecoderMlp, DecoderNorm};

use crate::{
    config::{ConfigFields, DecoderConfig, Family},
    convert::{ConversionTable, GPT2, LLAMA, MIXTRAL},
    pretrained::Pretrained,
};

/// A decoder-only language model as Hugging Face's files hold it: GPT-2, Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3, and, with
/// mixtures of experts, Mixtral, Qwen 1.5, 2 and 3. Tokens `[B, T]` (`i64`) give the logits of each next token, `[B, T, V]`; where
/// sequences are cut over ranks, of this rank's part of the tokens.
///
/// Dropout is none: what `config.json` says of it is kept and written back.
#[derive(Debug, Module)]
pub struct Decoder<R: Runtime> {
    /// The token embedding, `[V, C]`.
    pub embed_tokens: Embedding<R>,
    /// The position embedding, `[T, C]`, where positions are learned.
    pub embed_positions: Option<Embedding<R>>,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer<R>>,
    /// The norm before the logits.
    pub norm: DecoderNorm<R>,
    /// The projection to logits; absent where it is the token embedding.
    pub lm_head: Option<Linear<R>>,
    /// The ranks that sequences are cut over, and which part of them is here: losses take their targets by it.
    pub context: ContextSlot<R>,
    #[module(skip)]
    config: DecoderConfig,
    #[module(skip)]
    rotary: Option<Rotary>,
}

impl<R: Runtime> Decoder<R> {
    /// A model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` says otherwise.
    ///
    /// # Errors
    /// If sizes do not fit each other.
    pub fn new(init: &Init<R>, config: DecoderConfig) -> Result<Self> {
        config.check()?;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let (vocab, width) = (config.vocab, config.width);
        let learned =
            config.rope.is_none().then(|| Embedding::new(init, config.context, width).map(Embedding::never_cut));
        let head = || Linear::new(init, width, vocab).map(|head| head.without_bias().to_vocabulary());
        let mut embed_tokens = Embedding::new(init, vocab, width)?;
        if let Some(row) = config.padding {
            embed_tokens = embed_tokens.with_frozen_row(row)?;
        }
        let model = Decoder {
            embed_tokens,
            embed_positions: learned.transpose()?,
            layers: (0..config.layers).map(|i| DecoderLayer::new(init, &config, i)).collect::<Result<_>>()?,
            norm: DecoderNorm::new(init, &config)?,
            lm_head: (!config.tied).then(head).transpose()?,
            context: ContextSlot::cuts(),
            rotary: config.rope.map(|rope| rope.rotary(config.head_dim)),
            config,
        };
        // Errors name parameters from the first pass on.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// An empty cache for the keys and values of a batch; see [`KvCache::new`].
    pub fn cache(&self, capacity: usize, padding: Vec<usize>) -> KvCache<R> {
        KvCache::with_windows(self.config.windows.clone(), capacity, padding)
    }

    /// Logits `[B, T, V]` of tokens that are packed, or that follow those in a cache.
    ///
    /// # Errors
    /// If shapes do not fit, a learned position is past the context, or the cache is full.
    pub fn forward_with(&self, tokens: &Var<R>, inputs: DecoderInputs<'_, R>) -> Result<Var<R>> {
        self.logits(&self.states(tokens, inputs)?)
    }

    /// What the head sees: the output of the last layer, `[B, T, C]`, normalized.
    ///
    /// # Errors
    /// If [`forward_with`](Decoder::forward_with) would fail.
    pub fn states(&self, tokens: &Var<R>, inputs: DecoderInputs<'_, R>) -> Result<Var<R>> {
        Ok(self.routed_states(tokens, inputs)?.0)
    }

    /// What [`states`](Decoder::states) gives, and where the mixtures of experts sent the tokens, layer by layer: training adds their
    /// [losses](Routing::balance_loss).
    ///
    /// # Errors
    /// If [`forward_with`](Decoder::forward_with) would fail.
    pub fn routed_states(
        &self,
        tokens: &Var<R>,
        mut inputs: DecoderInputs<'_, R>,
    ) -> Result<(Var<R>, Vec<Routing<R>>)> {
        let placement = Placement::of(tokens, &inputs, self.layers.len(), &self.context)?;
        let mut x = self.embed(&self.context.take_tokens(tokens)?, &placement)?;
        let tables = self.rotary.as_ref().map(|rotary| rotary.tables(&placement.positions, x.dtype())).transpose()?;
        let mut routings = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            let cache = inputs.cache.as_deref_mut().map(|cache| cache.layer(i));
            let (y, routing) =
                layer.forward(&x, tables.as_ref(), &placement, cache).within(format_args!("layers.{i}"))?;
            x = y;
            routings.extend(routing);
        }
        if let Some(cache) = inputs.cache {
            cache.advance(placement.tokens);
        }
        Ok((self.norm.forward(&x).within("norm")?, routings))
    }

    /// Logits of what [`states`](Decoder::states) gives, or of a part of it.
    ///
    /// # Errors
    /// If the width is not the model's.
    pub fn logits(&self, states: &Var<R>) -> Result<Var<R>> {
        match &self.lm_head {
            Some(head) => head.forward(states).within("lm_head"),
            None => self.embed_tokens.project(states).within("embed_tokens"),
        }
    }

    /// The balance loss that transformers computes of all layers' mixtures as one (`load_balancing_loss_func`), times the number of tokens: a sum over
    /// tokens, as other losses are. `config.json` has its factor as `router_aux_loss_coef`. Every token counts, padding too. Over ranks it is that of the
    /// tokens of all, if `distributed::mesh::Mesh::parallelize` was given [`tensor_plan`](Decoder::tensor_plan), also where each
    /// rank has all experts. Where sequences are cut over ranks it stands for whole sequences ([`ContextSlot::of_whole`]).
    ///
    /// # Errors
    /// If there are no mixtures.
    pub fn balance_loss(&self, routings: &[Routing<R>]) -> Result<Var<R>> {
        let Some(mixtures) = &self.config.mixtures else {
            return Err(Error::state("balance_loss", "is of mixtures of experts, and this model has none"));
        };
        let layers = routings.len() as f64;
        let mut shares = vec![0.0; mixtures.mixture.experts];
        for routing in routings {
            shares.iter_mut().zip(routing.shares()?).for_each(|(all, share)| *all += share / layers);
        }
        let losses = routings.iter().map(|routing| routing.balance_loss_with(&shares)).collect::<Result<Vec<_>>>()?;
        let sum = losses.into_iter().map(Ok).reduce(|sum: Result<Var<R>>, loss| sum?.add(&loss?));
        let none = || Err(Error::state("balance_loss", "was given where no layer sent its tokens"));
        self.context.of_whole(&sum.unwrap_or_else(none)?.mul(mixtures.mixture.top_k as f64 / layers)?)
    }

    /// The loss of predicting `targets` (`i64`, `[B, T]`) from the logits of [`forward_with`](Decoder::forward_with). Where sequences are cut
    /// over ranks, targets are those of whole sequences, and the loss is by this rank's part of them ([`ContextSlot::loss`]).
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn next_token_loss(&self, logits: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        self.context.loss(targets, loss, |targets, loss| loss.of(logits, targets, None))
    }

    fn embed(&self, tokens: &Var<R>, placement: &Placement<R>) -> Result<Var<R>> {
        let x = self.embed_tokens.forward(tokens).within("embed_tokens")?;
        let Some(learned) = &self.embed_positions else { return Ok(x) };
        if placement.end > self.config.context {
            let why = format!("{} positions are more than the context of {}", placement.end, self.config.context);
            return Err(Error::shape("decoder", &[tokens.spec().shape], why));
        }
        x.add(&learned.weight.var().embedding(&placement.positions).within("embed_positions")?)
    }
}

impl<R: Runtime> Forward<R> for Decoder<R> {
    fn forward(&self, tokens: &Var<R>) -> Result<Var<R>> {
        self.forward_with(tokens, DecoderInputs::default())
    }
}

impl<R: Runtime> Pretrained<R> for Decoder<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        Decoder::new(init, DecoderConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        match self.config.family {
            Family::Gpt2 => GPT2,
            Family::Mixtral => MIXTRAL,
            _ => LLAMA,
        }
    }

    fn does_without(&self, parameter: &str) -> bool {
        self.config.tied && parameter == "lm_head.weight"
    }

    fn tied_to(&self, parameter: &str) -> Option<&'static str> {
        (self.config.tied && parameter == "lm_head.weight").then_some("embed_tokens.weight")
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
