//! The decoder: one model with options for all families.

mod cache;
mod inputs;
mod layer;
mod mtp;
mod stages;
mod tensor_plan;

use autograd::Var;
use nn::{
    Dropout, Embedding, Forward, Init, Initializer, LanguageModel, LanguageModelNames, Linear, Module, Numbered,
    Rotary, RotaryTables, TokenEmbedding,
    moe::Routing,
    parallel::{CutLayer, Cuts, VocabularyLoss},
};
use numcore::{
    DType, Error, Result, Runtime, Tensor, Within,
    fused::{CrossEntropyOptions, Reduction},
    ops::{Apply, IndexOps, PointwiseOps},
};
use serde_json::{Map, Value};

pub use cache::KvCache;
pub(crate) use cache::LayerCache;
pub use inputs::DecoderInputs;
use inputs::Placement;
pub(crate) use layer::MlpForm;
pub use layer::{DecoderFeedForward, DecoderLayer, DecoderMlp, DecoderNorm, UpProjection};
pub use mtp::{MtpDepth, MtpLayer, mtp_targets};

use crate::{
    config::{ConfigFields, DecoderConfig, Family},
    convert::{ConversionTable, DEEPSEEK_V3, GEMMA, GPT_OSS, GPT2, LLAMA, MIXTRAL},
    pretrained::Pretrained,
};

const NAMES: LanguageModelNames = LanguageModelNames {
    tokens: "embed_tokens",
    positions: "embed_positions",
    blocks: "layers",
    norm: "norm",
    head: "lm_head",
};

/// A decoder-only language model in Hugging Face's format, of one of the families in [`Family`]. Mixtral, GPT-OSS,
/// DeepSeek-V3 and Qwen 1.5, 2 and 3 may have mixtures of experts.
///
/// Input: tokens `[B, T]` (`i64`). Output: logits of each next token, `[B, T, V]`; where sequences are cut over ranks,
/// those of this rank's tokens. There is no dropout: its fields in `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct Decoder<R: Runtime> {
    /// The embeddings, the layers, the last norm and the head; a [stage](Decoder::split) has some of them. Their names
    /// are `embed_tokens`, `embed_positions`, `layers`, `norm` and `lm_head`.
    #[module(flatten)]
    pub parts: LanguageModel<R, DecoderLayer<R>, DecoderNorm<R>>,
    /// The layers of [multi-token prediction](Decoder::mtp_states), numbered after the others; absent from earlier
    /// stages.
    #[module(rename = "layers")]
    pub mtp: Numbered<MtpLayer<R>>,
    /// A copy of the token embedding for `mtp`, in a last stage whose head is no such copy.
    #[module(rename = "embed_tokens")]
    mtp_tokens: Option<Embedding<R>>,
    #[module(skip)]
    config: DecoderConfig,
    /// The rotary positions that layers have.
    #[module(skip)]
    rotaries: Vec<Rotary>,
}

impl<R: Runtime> Decoder<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` sets
    /// other initializers.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or the family has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: DecoderConfig) -> Result<Self> {
        config.check().at_caller()?;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let (vocab, width) = (config.vocab, config.width);
        let learned = config
            .rope
            .is_none()
            .then(|| Embedding::new(init, config.context, width).map(|table| table.with_cuts(Cuts::None)));
        let head = || Linear::new(init, width, vocab).map(|head| head.without_bias().with_cuts(Cuts::Table));
        let mut embed_tokens = Embedding::new(init, vocab, width)?;
        if let Some(row) = config.padding {
            embed_tokens = embed_tokens.with_frozen_row(row).at_caller()?;
        }
        let embedding =
            TokenEmbedding { tokens: embed_tokens, positions: learned.transpose()?, dropout: Dropout::new(0.0)? };
        let layers =
            (0..config.layers).map(|i| DecoderLayer::new(init, &config, i)).collect::<Result<_>>().at_caller()?;
        let (norm, head) = (DecoderNorm::new(init, &config).at_caller()?, (!config.tied).then(head).transpose()?);
        let parts = LanguageModel::of(&NAMES, embedding, layers, norm, head);
        let mut model = Decoder::of(parts.with_logit_softcap(config.options.logit_softcap), &config);
        let later = config.layers..config.layers + config.options.mtp_layers;
        let later = later.map(|i| MtpLayer::new(init, &config, i)).collect::<Result<_>>().at_caller()?;
        model.mtp = Numbered::new(config.layers, later);
        Ok(model)
    }

    fn of(parts: LanguageModel<R, DecoderLayer<R>, DecoderNorm<R>>, config: &DecoderConfig) -> Self {
        let rotaries = config
            .ropes()
            .map(|rope| Rotary { interleaved: config.options.interleaved, ..rope.rotary(config.head_dim) })
            .collect();
        Decoder {
            parts,
            mtp: Numbered::new(config.layers, Vec::new()),
            mtp_tokens: None,
            rotaries,
            config: config.clone(),
        }
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// An empty cache of keys and values, with this model's sliding windows; see [`KvCache::new`].
    pub fn cache(&self, capacity: usize, padding: Vec<usize>) -> KvCache<R> {
        KvCache::with_windows(self.config.windows.clone(), capacity, padding)
    }

    /// Computes logits `[B, T, V]` of tokens that are packed, or that follow those in a cache.
    ///
    /// # Errors
    /// Fails if shapes do not fit, a learned position is past the context, or the cache is full.
    #[track_caller]
    pub fn forward_with(&self, tokens: &Var<R>, inputs: DecoderInputs<'_, R>) -> Result<Var<R>> {
        self.logits(&self.states(tokens, inputs)?)
    }

    /// Computes the states that the head projects: the last layer's output, `[B, T, C]`, normalized.
    ///
    /// # Errors
    /// Fails if [`forward_with`](Decoder::forward_with) would fail.
    #[track_caller]
    pub fn states(&self, tokens: &Var<R>, inputs: DecoderInputs<'_, R>) -> Result<Var<R>> {
        Ok(self.routed_states(tokens, inputs)?.0)
    }

    /// Computes [`states`](Decoder::states), and the routing of tokens by each layer's mixture of experts, for the
    /// [losses](Routing::balance_loss) that training adds.
    ///
    /// # Errors
    /// Fails if [`forward_with`](Decoder::forward_with) would fail.
    #[track_caller]
    pub fn routed_states(
        &self,
        tokens: &Var<R>,
        mut inputs: DecoderInputs<'_, R>,
    ) -> Result<(Var<R>, Vec<Routing<R>>)> {
        let placement = self.placement(tokens, &inputs).at_caller()?;
        let (x, routings) = self
            .through_layers(self.embed_here(tokens, &placement).at_caller()?, &placement, inputs.cache.as_deref_mut())
            .at_caller()?;
        if let Some(cache) = inputs.cache {
            cache.advance(placement.tokens);
        }
        Ok((self.parts.normalized(&x).at_caller()?, routings))
    }

    /// Tells whether a row of `cache` gets other frequencies of positions with `tokens` more (LongRoPE), and which. Its
    /// keys have the old ones then, and all its tokens are to be read again.
    pub(crate) fn outgrows(&self, cache: &KvCache<R>, tokens: usize) -> Option<usize> {
        self.first_context().and_then(|most| cache.passes(most, tokens))
    }

    /// The most tokens of a text that has the frequencies of short ones, if there are two sets (LongRoPE).
    pub(crate) fn first_context(&self) -> Option<usize> {
        self.rotaries.iter().find_map(|rotary| rotary.long.as_ref()).map(|(most, _)| *most)
    }

    /// Positions and mask of a call, by its input: tokens `[B, T]`, or a later stage's `[B, T, C]`, which is this
    /// rank's part of the sequence.
    fn placement(&self, x: &Var<R>, inputs: &DecoderInputs<'_, R>) -> Result<Placement<R>> {
        let (shape, context) = (x.spec().shape, &self.parts.context);
        let of = match (&shape[..], self.parts.embedding.is_some()) {
            (&[b, t], true) => [b, t],
            (&[b, t, _], false) => [b, t * self.sequence_parts().unwrap_or(1) * context.ranks()],
            (_, true) => return Err(Error::shape("decoder", &[shape], "tokens must be [B, T]")),
            (_, false) => return Err(Error::shape("decoder", &[shape], "a later stage takes [B, T, C]")),
        };
        self.placement_of(x.runtime(), of, inputs)
    }

    /// The layers of this stage, then those of multi-token prediction.
    fn layers(&self) -> impl Iterator<Item = &DecoderLayer<R>> {
        self.parts.blocks.iter().chain(self.mtp.iter().map(|mtp| &mtp.layer))
    }

    fn sequence_parts(&self) -> Option<usize> {
        self.layers().find_map(DecoderLayer::sequence_parts)
    }

    /// Positions and mask of a call with tokens `[B, T]`.
    fn placement_of(&self, rt: &R, of: [usize; 2], inputs: &DecoderInputs<'_, R>) -> Result<Placement<R>> {
        if let (Some(_), Some(_)) = (self.sequence_parts(), &inputs.cache) {
            let why = "a cache has all tokens of a sequence: cut this model by a plan without `sequence_parallel`";
            return Err(Error::unsupported("decoder", why));
        }
        if let Some(row) = inputs.cache.as_ref().and_then(|cache| self.outgrows(cache, of[1])) {
            let why = "outgrows the first context with these tokens, and its keys in the cache are those of a short \
                       text (`longrope`): begin a new cache, and read all tokens again";
            return Err(Error::state(format!("row {row} of the cache"), why));
        }
        // A later stage without layers does not know how its values are cut, and needs no positions.
        let nothing = DecoderInputs::default();
        let passes = self.parts.embedding.is_none() && self.layers().next().is_none();
        let inputs = if passes { &nothing } else { inputs };
        let asks = [self.first_context().is_some(), self.layers().any(|layer| layer.self_attn.has_scores())];
        Placement::of(rt, of, inputs, self.parts.blocks.len(), &self.parts.context, asks)
    }

    /// The rotary positions of these tokens, for values of type `dtype`.
    fn rotary_tables(&self, placement: &Placement<R>, dtype: DType) -> Result<Vec<RotaryTables<R>>> {
        let table = |rotary: &Rotary| rotary.tables_within(&placement.positions, placement.last.as_ref(), dtype);
        self.rotaries.iter().map(table).collect()
    }

    /// The output of this stage's last layer, and the routings of its mixtures.
    fn through_layers(
        &self,
        x: Var<R>,
        placement: &Placement<R>,
        mut cache: Option<&mut KvCache<R>>,
    ) -> Result<(Var<R>, Vec<Routing<R>>)> {
        let tables = self.rotary_tables(placement, x.dtype())?;
        let mut routings = Vec::new();
        let x = self.parts.through_blocks(x, |i, layer, x| {
            let cache = cache.as_deref_mut().map(|cache| cache.layer(i));
            let (x, routing) = layer.forward(&x, &tables, placement, cache)?;
            routings.extend(routing);
            Ok(x)
        })?;
        Ok((x, routings))
    }

    /// Projects [`states`](Decoder::states), or some of their tokens, to logits.
    ///
    /// # Errors
    /// Fails if the width is not the model's.
    #[track_caller]
    pub fn logits(&self, states: &Var<R>) -> Result<Var<R>> {
        self.parts.project(states).at_caller()
    }

    /// Computes log-probabilities `[B, T]` (at least `f32`) of `tokens` (`i64`, `[B, T]`) from
    /// [`states`](Decoder::states): token `t` is the one that follows the state's. A token of −100 has 0. Few logits
    /// are in memory at a time, if the head is not cut; see [`loss::logprobs`](nn::loss::logprobs).
    ///
    /// On the CPU a token's bits depend on its own text alone. Padding, packing and other rows of the batch change
    /// none, nor does a cache, nor a cut by a plan with [`whole_sums`](nn::parallel::TensorPlan::whole_sums). So the
    /// ratio of a policy that is trained to the one that sampled is 1 at first. (On one instruction set, except AMX,
    /// and in rows of at most 2048 tokens. With LongRoPE, bits change where a text outgrows the first context:
    /// [`RolloutBatch`](crate::RolloutBatch) refuses such rollouts.)
    ///
    /// # Errors
    /// Fails if shapes do not fit.
    #[track_caller]
    pub fn logprobs(&self, states: &Var<R>, tokens: &Var<R>) -> Result<Var<R>> {
        let cross_entropy = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
        let loss = VocabularyLoss { cross_entropy, z_loss: 0.0 };
        self.parts.loss_of_normalized(states, tokens, &loss).at_caller()?.neg()
    }

    /// Computes the balance loss of all layers' mixtures together (`load_balancing_loss_func` of transformers), times
    /// the number of tokens: a sum over tokens, as other losses are. Its factor in `config.json` is
    /// `router_aux_loss_coef`. Every token counts, padding too.
    ///
    /// The loss is that of the tokens of all ranks, if `distributed::mesh::Mesh::parallelize` was given
    /// [`tensor_plan`](Decoder::tensor_plan), even where each rank has all experts. Where sequences are cut over ranks,
    /// it stands for full sequences ([`of_whole`](nn::parallel::ContextSlot::of_whole)).
    ///
    /// # Errors
    /// Fails if there are no mixtures, or `routings` is empty.
    #[track_caller]
    pub fn balance_loss(&self, routings: &[Routing<R>]) -> Result<Var<R>> {
        let Some(mixtures) = &self.config.mixtures else {
            return Err(Error::state("balance_loss", "is of mixtures of experts, and this model has none")).at_caller();
        };
        let layers = routings.len() as f64;
        let mut shares = vec![0.0; mixtures.mixture.experts];
        for routing in routings {
            shares.iter_mut().zip(routing.shares().at_caller()?).for_each(|(all, share)| *all += share / layers);
        }
        let losses = routings
            .iter()
            .map(|routing| routing.balance_loss_with(&shares))
            .collect::<Result<Vec<_>>>()
            .at_caller()?;
        let sum = losses.into_iter().map(Ok).reduce(|sum: Result<Var<R>>, loss| sum?.add(&loss?));
        let none = || Err(Error::state("balance_loss", "was given where no layer sent its tokens"));
        self.parts
            .context
            .of_whole(&sum.unwrap_or_else(none).at_caller()?.mul(mixtures.mixture.top_k as f64 / layers)?)
            .at_caller()
    }

    /// Computes the loss of predicting `targets` (`i64`, `[B, T]`) from the logits of
    /// [`forward_with`](Decoder::forward_with). Where sequences are cut over ranks, targets are those of full
    /// sequences. The loss is then this rank's part of theirs ([`ContextSlot::loss`](nn::parallel::ContextSlot::loss)).
    ///
    /// # Errors
    /// Fails if shapes do not fit.
    #[track_caller]
    pub fn next_token_loss(&self, logits: &Var<R>, targets: &Var<R>, loss: &VocabularyLoss) -> Result<Var<R>> {
        self.parts.logits_loss(*loss).at_caller()?.of(logits, targets).at_caller()
    }

    fn embed_here(&self, tokens: &Var<R>, placement: &Placement<R>) -> Result<Var<R>> {
        self.embed(&self.parts.start()?.tokens, tokens, placement)
    }

    /// The embeddings of tokens, of which each rank has its part.
    fn embed(&self, table: &Embedding<R>, tokens: &Var<R>, placement: &Placement<R>) -> Result<Var<R>> {
        let mut x = table.forward(&self.parts.context.take_tokens(tokens)?).within(NAMES.tokens)?;
        if self.config.family.parts().scaled_embedding {
            // The factor has the type of the table, which rounds it.
            let factor = (self.config.width as f64).sqrt();
            let factor = Tensor::from_f64_fn(x.runtime(), [1], table.weight.dtype(), || factor)?;
            x = x.mul(&Var::new(factor.to_dtype(x.dtype())?))?;
        }
        let positions = self.parts.embedding.as_ref().and_then(|embedding| embedding.positions.as_ref());
        if positions.is_some() && placement.end > self.config.context {
            let why = format!("{} positions are more than the context of {}", placement.end, self.config.context);
            return Err(Error::shape("decoder", &[tokens.spec().shape], why));
        }
        let at = |learned: &Embedding<R>| learned.weight.var().embedding(&placement.positions).within(NAMES.positions);
        let x = positions.map_or(Ok(x.clone()), |learned| x.add(&at(learned)?))?;
        table.weight.placed().map_or(Ok(x.clone()), |placed| placed.enter_sequence(&x))
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
            Family::GptOss => GPT_OSS,
            Family::DeepseekV3 => DEEPSEEK_V3,
            Family::Olmo2 | Family::Gemma2 | Family::Gemma3 => GEMMA,
            _ => LLAMA,
        }
    }

    fn is_whole(&self) -> bool {
        self.parts.is_whole()
    }

    fn does_without(&self, parameter: &str) -> bool {
        // Layers of multi-token prediction that the model was asked not to have.
        let without = self.config.family == Family::DeepseekV3 && self.config.options.mtp_layers == 0;
        let is_later = || layer_of(parameter).is_some_and(|layer| layer >= self.config.layers);
        self.tied_to(parameter).is_some() || without && is_later()
    }

    fn tied_to(&self, parameter: &str) -> Option<&'static str> {
        let (tokens, head) = ("embed_tokens.weight", "lm_head.weight");
        match parameter {
            "lm_head.weight" if self.config.tied => Some(tokens),
            // Files of layers of multi-token prediction have copies of both.
            _ if self.config.options.mtp_layers == 0 => None,
            _ if parameter.ends_with(".shared_head.head.weight") => Some(if self.config.tied { tokens } else { head }),
            _ if parameter.ends_with(".embed_tokens.weight") => Some(tokens),
            _ => None,
        }
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}

/// The number of the layer that a parameter is of.
fn layer_of(parameter: &str) -> Option<usize> {
    parameter.strip_prefix("layers.")?.split_once('.')?.0.parse().ok()
}
