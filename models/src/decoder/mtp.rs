//! Multi-token prediction: layers after the others, each of which predicts one token further (DeepSeek-AI 2024).

use autograd::Var;
use nn::{Embedding, Forward, Init, Linear, Module, RotaryTables, moe::Routing, parallel::VocabularyLoss};
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, PointwiseOps, ViewOps, cat},
};

use super::{Decoder, DecoderInputs, DecoderLayer, DecoderNorm, inputs::Placement};
use crate::config::DecoderConfig;

/// Marks a target without a token, which the default options of losses ignore.
const NO_TARGET: i64 = -100;

/// A layer of multi-token prediction (DeepSeek-AI 2024, section 2.2). It joins the normalized states `[B, T, C]` of one
/// depth with the embeddings of tokens one further. Its output is the normalized states of the next depth, as in
/// Megatron-LM; models with one such layer leave this open.
#[derive(Debug, Module)]
pub struct MtpLayer<R: Runtime> {
    /// The norm of the tokens' embeddings.
    pub enorm: DecoderNorm<R>,
    /// The norm of the states.
    pub hnorm: DecoderNorm<R>,
    /// The projection of both together, `[2C]` to `[C]`; embeddings come first.
    pub eh_proj: Linear<R>,
    /// The layer that computes with what is joined.
    #[module(flatten)]
    pub layer: DecoderLayer<R>,
    /// The norm before the logits, which the model's head projects.
    pub head_norm: DecoderNorm<R>,
}

/// The states of one depth of multi-token prediction.
#[derive(Debug)]
pub struct MtpDepth<R: Runtime> {
    /// The states `[B, T, C]`, normalized for [`logits`](Decoder::logits).
    pub states: Var<R>,
    /// The routing of the layer's mixture, if it has one, for a [balance loss](Decoder::balance_loss).
    pub routing: Option<Routing<R>>,
}

impl<R: Runtime> MtpLayer<R> {
    pub(super) fn new(init: &Init<R>, config: &DecoderConfig, layer: usize) -> Result<Self> {
        Ok(MtpLayer {
            enorm: DecoderNorm::new(init, config)?,
            hnorm: DecoderNorm::new(init, config)?,
            eh_proj: Linear::new(init, 2 * config.width, config.width)?.without_bias(),
            layer: DecoderLayer::new(init, config, layer)?,
            head_norm: DecoderNorm::new(init, config)?,
        })
    }

    fn forward(
        &self,
        [embedded, states]: [&Var<R>; 2],
        tables: &[RotaryTables<R>],
        placement: &Placement<R>,
    ) -> Result<MtpDepth<R>> {
        let embedded = self.enorm.forward(embedded).within("enorm")?;
        let joined = cat(&[&embedded, &self.hnorm.forward(states).within("hnorm")?], -1)?;
        let (x, routing) =
            self.layer.forward(&self.eh_proj.forward(&joined).within("eh_proj")?, tables, placement, None)?;
        Ok(MtpDepth { states: self.head_norm.forward(&x).within("head_norm")?, routing })
    }
}

impl<R: Runtime> Decoder<R> {
    /// Removes the layers of multi-token prediction, for a model that is trained without them. It comes before
    /// [`split`](Decoder::split), since stages hand on tokens for these layers.
    pub fn without_mtp(mut self) -> Self {
        self.mtp.clear();
        self.mtp_tokens = None;
        self.config = self.config.without_mtp();
        self
    }

    /// Computes the depths of multi-token prediction, in order: depth `k` predicts the token `k` after the next. They
    /// come from [`states`](Decoder::states) and the tokens `[B, T]` (`i64`) of these. The last `k` states of a row
    /// know too few tokens; [`mtp_targets`] has no target for them. A model without such layers has no depths.
    ///
    /// # Errors
    /// Fails with a cache, or if shapes do not fit.
    #[track_caller]
    pub fn mtp_states(
        &self,
        states: &Var<R>,
        tokens: &Var<R>,
        inputs: DecoderInputs<'_, R>,
    ) -> Result<Vec<MtpDepth<R>>> {
        if inputs.cache.is_some() {
            let why = "multi-token prediction has no cache: it computes with full rows of tokens";
            return Err(Error::unsupported("decoder", why));
        }
        let shape = tokens.spec().shape;
        let &[b, t] = &shape[..] else {
            return Err(Error::shape("decoder", &[shape], "tokens must be [B, T]"));
        };
        let placement = self.placement_of(tokens.runtime(), [b, t], &inputs).at_caller()?;
        self.depths(states, tokens, &placement).at_caller()
    }

    /// The depths, from positions and mask that are known.
    pub(super) fn depths(
        &self,
        states: &Var<R>,
        tokens: &Var<R>,
        placement: &Placement<R>,
    ) -> Result<Vec<MtpDepth<R>>> {
        let (tables, table) = (self.rotary_tables(placement, states.dtype())?, self.table()?);
        let mut depths = Vec::<MtpDepth<R>>::new();
        for (depth, (number, layer)) in self.mtp.numbered().enumerate() {
            let further = shifted(tokens, depth + 1, 0)?;
            let embedded = self.embed(&table, &further, placement)?;
            let before = depths.last().map_or(states, |depth| &depth.states);
            let found = layer.forward([&embedded, before], &tables, placement);
            depths.push(found.within(format_args!("layers.{number}"))?);
        }
        Ok(depths)
    }

    /// Computes the mean over depths of the losses of [`mtp_states`](Decoder::mtp_states), from the targets `[B, T]`
    /// (`i64`) and segments of the next tokens' loss. DeepSeek-V3 adds it with a factor of 0.3, later 0.1. A depth that
    /// leaves no row a target makes a mean NaN; a sum is 0.
    ///
    /// # Errors
    /// Fails if shapes do not fit, or there are no depths.
    #[track_caller]
    pub fn mtp_loss(
        &self,
        depths: &[MtpDepth<R>],
        targets: &Var<R>,
        segments: Option<&Var<R>>,
        loss: &VocabularyLoss,
    ) -> Result<Var<R>> {
        let ignored = loss.cross_entropy.ignore_index;
        let losses = depths.iter().enumerate().map(|(k, depth)| {
            self.parts.loss_of_normalized(&depth.states, &further_targets(targets, segments, k + 1, ignored)?, loss)
        });
        let sum = losses.reduce(|sum, loss| sum?.add(&loss?));
        let none = || Err(Error::state("mtp_loss", "was given no depths: this model predicts one token alone"));
        sum.unwrap_or_else(none).at_caller()?.div(depths.len() as f64)
    }

    /// The token embedding; in a last stage a copy of it.
    fn table(&self) -> Result<Embedding<R>> {
        let weight = match (&self.parts.embedding, &self.mtp_tokens, &self.parts.head) {
            (Some(own), ..) => &own.tokens.weight,
            (None, Some(copy), _) => &copy.weight,
            (None, None, Some(head)) if self.config.tied => head.projection.weight(),
            (None, None, _) => return Err(Error::state("mtp_states", "this stage has no embeddings: the last has")),
        };
        let table = Embedding::of(weight.clone());
        match self.config.padding {
            None => Ok(table),
            Some(row) => table.with_frozen_row(row),
        }
    }
}

/// The targets `[B, T]` (`i64`) of the token `depth` after the next, from those of the next token. The last of a row
/// and of each of its `segments` `[B, T]` have none: −100.
///
/// # Errors
/// Fails if shapes do not fit.
#[track_caller]
pub fn mtp_targets<R: Runtime>(targets: &Var<R>, segments: Option<&Var<R>>, depth: usize) -> Result<Var<R>> {
    further_targets(targets, segments, depth, NO_TARGET).at_caller()
}

fn further_targets<R: Runtime>(targets: &Var<R>, segments: Option<&Var<R>>, depth: usize, none: i64) -> Result<Var<R>> {
    let further = shifted(targets, depth, none)?;
    match segments {
        None => Ok(further),
        Some(segments) => further.where_cond(&segments.eq(&shifted(segments, depth, 0)?)?, none as f64),
    }
}

/// The values `[B, T]` of places that are `by` further in their rows; `fill` where a row has none.
fn shifted<R: Runtime>(x: &Var<R>, by: usize, fill: i64) -> Result<Var<R>> {
    let shape = x.spec().shape;
    let &[b, t] = &shape[..] else {
        return Err(Error::shape("multi-token prediction", &[shape], "tokens, targets and segments must be [B, T]"));
    };
    let by = by.min(t);
    let filled = Var::new(Tensor::full(x.runtime(), [b, by], x.dtype(), fill)?);
    cat(&[&x.narrow(1, by, t - by)?, &filled], 1)
}
