//! One layer of a decoder.

use autograd::{Var, recomputed};
use nn::{
    Activation, Forward, GroupedQueryAttention, GroupedQueryConfig, HeadNorm, Init, LayerNorm, Linear, Module, RmsNorm,
    RotaryTables, ScoreOptions, Visitor,
    moe::{MixtureOfExperts, Routing},
    parallel::{AttendedTokens, CutLayer, Cuts, RowCut, SharedInput},
};
use numcore::{
    Error, Result, Runtime, Within,
    fused::NnOps,
    ops::{PointwiseOps, ViewOps},
};

use super::{cache::LayerCache, inputs::Placement};
use crate::config::{DecoderConfig, Family, FamilyParts};

/// A layer of `x: [B, T, C]`: `x + attention(norm(x))`, then `x + mlp(norm(x))`. Some families have norms of the
/// outputs of attention and of the linear layers besides, or instead.
#[derive(Debug, Module)]
pub struct DecoderLayer<R: Runtime> {
    /// The norm before attention.
    pub input_norm: Option<DecoderNorm<R>>,
    /// Causal self-attention.
    pub self_attn: GroupedQueryAttention<R>,
    /// The norm of attention's output.
    pub post_attention_norm: Option<DecoderNorm<R>>,
    /// The norm before the feed-forward part.
    pub mlp_norm: Option<DecoderNorm<R>>,
    /// The linear layers, or a mixture of experts in their place.
    pub mlp: DecoderFeedForward<R>,
    /// The norm of the feed-forward part's output.
    pub post_mlp_norm: Option<DecoderNorm<R>>,
    /// The place of the layer's rotary positions among the model's; `None` without positions.
    #[module(skip)]
    rotary: Option<usize>,
}

impl<R: Runtime> DecoderLayer<R> {
    pub(super) fn new(init: &Init<R>, config: &DecoderConfig, layer: usize) -> Result<Self> {
        let (parts, options) = (config.family.parts(), &config.options);
        let norm = |together| HeadNorm { eps: config.norm_eps, offset: parts.norm_offset, together };
        let head_dim = options.unrotated_dim + config.head_dim;
        let width = options.score_width.or(options.latent.map(|_| head_dim));
        let factor = config.rope.as_ref().map_or(1.0, |rope| rope.scaling.score_factor());
        let factor = if options.latent.is_some() { factor } else { 1.0 };
        let scale = width.map(|width| factor / (width as f64).sqrt());
        let attention = GroupedQueryConfig {
            width: config.width,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim,
            fused: parts.fused,
            bias: config.qkv_bias,
            output_bias: config.output_bias,
            head_norm: parts.head_norms.map(norm),
            window: config.windows.get(layer).copied().flatten(),
            scores: ScoreOptions { scale, softcap: options.score_softcap, sinks: parts.sinks },
        };
        let norm = |has: bool| has.then(|| DecoderNorm::new(init, config)).transpose();
        Ok(DecoderLayer {
            input_norm: norm(parts.input_norms)?,
            self_attn: match options.latent {
                None => GroupedQueryAttention::new(init, attention)?,
                Some(latent) => GroupedQueryAttention::with_latent(init, attention, latent)?,
            },
            post_attention_norm: norm(parts.output_norms)?,
            mlp_norm: norm(parts.input_norms)?,
            mlp: DecoderFeedForward::new(init, config, layer)?,
            post_mlp_norm: norm(parts.output_norms)?,
            rotary: config.rotary_of(layer),
        })
    }

    /// The number of ranks that sequences are cut over between layers, by a plan that is `sequence_parallel`.
    pub(super) fn sequence_parts(&self) -> Option<usize> {
        Some(self.self_attn.o_proj.weight.placed()?.sequence_part()?.1)
    }

    pub(super) fn forward(
        &self,
        x: &Var<R>,
        tables: &[RotaryTables<R>],
        placement: &Placement<R>,
        cache: Option<&mut LayerCache<R>>,
    ) -> Result<(Var<R>, Option<Routing<R>>)> {
        let h = normalized(&self.input_norm, x).within("input_norm")?;
        let tables = self.rotary.and_then(|at| tables.get(at));
        let [q, mut k, mut v] = self.self_attn.project(&h, tables).within("self_attn")?;
        // Mask and positions have columns of tokens that the cache has dropped.
        let mut kept = usize::MAX;
        if let Some(cache) = cache {
            [k, v] = cache.extend(&k, &v)?;
            kept = k.dims()[2];
        }
        let mask = placement.mask.as_ref().map(|mask| last_columns(mask, kept)).transpose()?;
        // Without a norm of the output, the last product adds to `x`.
        let onto = self.post_attention_norm.is_none().then_some(x);
        let keys = placement.places.as_ref().map(|places| last_columns(&places[1], kept)).transpose()?;
        let positions = placement.places.as_ref().zip(keys.as_ref()).map(|(places, keys)| [&places[0], keys]);
        let tokens = AttendedTokens { segments: placement.segments.as_ref(), positions, first_head: None };
        let found = self.self_attn.attend_tokens([q, k, v], mask.as_ref(), tokens, onto);
        let x = added(&self.post_attention_norm, x, found.within("self_attn")?).within("post_attention_norm")?;
        let h = normalized(&self.mlp_norm, &x).within("mlp_norm")?;
        let onto = self.post_mlp_norm.is_none().then_some(&x);
        let (y, routing) = self.mlp.forward_onto(&h, onto).within("mlp")?;
        Ok((added(&self.post_mlp_norm, &x, y).within("post_mlp_norm")?, routing))
    }
}

/// The normalized value, or the value itself without a norm.
fn normalized<R: Runtime>(norm: &Option<DecoderNorm<R>>, x: &Var<R>) -> Result<Var<R>> {
    norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward(x))
}

/// The sum of `x` and the normalized `y`; `y` itself, which is onto `x` already, without a norm.
fn added<R: Runtime>(norm: &Option<DecoderNorm<R>>, x: &Var<R>, y: Var<R>) -> Result<Var<R>> {
    norm.as_ref().map_or(Ok(y.clone()), |norm| x.add(&norm.forward(&y)?))
}

/// The feed-forward part of a layer, which computes each token by itself.
#[derive(Debug)]
pub enum DecoderFeedForward<R: Runtime> {
    /// Linear layers.
    Dense(DecoderMlp<R>),
    /// A mixture of experts.
    Mixture(Box<MixtureOfExperts<R>>),
}

impl<R: Runtime> DecoderFeedForward<R> {
    fn new(init: &Init<R>, config: &DecoderConfig, layer: usize) -> Result<Self> {
        Ok(match config.mixture_of(layer) {
            Some(mixture) => DecoderFeedForward::Mixture(Box::new(MixtureOfExperts::new(init, mixture)?)),
            None => {
                let FamilyParts { gated, fused, .. } = config.family.parts();
                let DecoderConfig { width, hidden, activation, mlp_bias: bias, .. } = *config;
                let form = MlpForm { width, hidden, activation, bias, gated, fused };
                DecoderFeedForward::Dense(DecoderMlp::new(init, &form)?)
            }
        })
    }

    /// The linear layers; `None` for a mixture.
    pub fn dense(&self) -> Option<&DecoderMlp<R>> {
        match self {
            DecoderFeedForward::Dense(mlp) => Some(mlp),
            DecoderFeedForward::Mixture(_) => None,
        }
    }

    /// The output, plus `residual` if given, and the routing if this is a mixture.
    fn forward_onto(&self, x: &Var<R>, residual: Option<&Var<R>>) -> Result<(Var<R>, Option<Routing<R>>)> {
        match self {
            DecoderFeedForward::Dense(mlp) => Ok((mlp.forward_onto(x, residual)?, None)),
            DecoderFeedForward::Mixture(mixture) => {
                let out = mixture.forward_routed(x)?;
                Ok((residual.map_or(Ok(out.y.clone()), |residual| residual.add(&out.y))?, Some(out.routing)))
            }
        }
    }
}

impl<R: Runtime> Module<R> for DecoderFeedForward<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        match self {
            DecoderFeedForward::Dense(mlp) => mlp.visit(name, visitor),
            DecoderFeedForward::Mixture(mixture) => mixture.visit(name, visitor),
        }
    }
}

/// The last `count` columns of a mask, whose columns may be broadcast.
fn last_columns<R: Runtime>(mask: &Var<R>, count: usize) -> Result<Var<R>> {
    let columns = mask.dims().last().copied().unwrap_or(1);
    if columns <= count { Ok(mask.clone()) } else { mask.narrow(-1, columns - count, count) }
}

/// The linear layers of a decoder layer: `down(act(up(x)))`, or `down(act(gate(x)) · up(x))` with a gate.
#[derive(Debug, Module)]
pub struct DecoderMlp<R: Runtime> {
    /// The projections to the hidden width.
    #[module(flatten)]
    pub up: UpProjection<R>,
    /// The projection from the hidden width back.
    pub down_proj: Linear<R>,
    #[module(skip)]
    activation: Activation,
}

/// The projections to the hidden width: of values and their gate, in one layer or two, or of values alone.
#[derive(Debug)]
pub enum UpProjection<R: Runtime> {
    /// `up_proj`, without a gate (GPT-2).
    Plain(Linear<R>),
    /// `gate_proj`, which goes through the activation, and `up_proj`.
    Gated([Linear<R>; 2]),
    /// `gate_up_proj`, whose outputs are those of the gate, then the others (Phi 3).
    Fused(Linear<R>),
}

impl<R: Runtime> Module<R> for UpProjection<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        match self {
            UpProjection::Plain(up) => up.visit("up_proj", visitor),
            UpProjection::Gated(both) => {
                both.iter().zip(["gate_proj", "up_proj"]).for_each(|(linear, name)| linear.visit(name, visitor));
            }
            UpProjection::Fused(both) => both.visit("gate_up_proj", visitor),
        }
        visitor.leave();
    }
}

/// The sizes and options of a [`DecoderMlp`].
pub(crate) struct MlpForm {
    pub width: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub bias: bool,
    pub gated: bool,
    pub fused: bool,
}

impl<R: Runtime> DecoderMlp<R> {
    pub(crate) fn new(init: &Init<R>, form: &MlpForm) -> Result<Self> {
        let MlpForm { width, hidden, activation, bias, gated, fused } = *form;
        let linear = |inputs, outputs| Ok::<_, Error>(Linear::new(init, inputs, outputs)?.with_bias_if(bias));
        let halves = RowCut { parts: 2, ..RowCut::of_heads(hidden) };
        let up = match (gated, fused) {
            (false, _) => UpProjection::Plain(linear(width, hidden)?),
            (true, false) => UpProjection::Gated([linear(width, hidden)?, linear(width, hidden)?]),
            (true, true) => UpProjection::Fused(linear(width, 2 * hidden)?.with_cuts(Cuts::Weight(halves))),
        };
        Ok(DecoderMlp { up, down_proj: linear(hidden, width)?, activation })
    }

    /// The output, plus `residual` if given. The activation's output is [`recomputed`] in backward.
    pub(crate) fn forward_onto(&self, x: &Var<R>, residual: Option<&Var<R>>) -> Result<Var<R>> {
        let activation = self.activation;
        let gated = move |gate: &Var<R>, up: &Var<R>| match activation {
            Activation::Silu => gate.swiglu(up),
            other => other.apply(gate)?.mul(up),
        };
        let active = match &self.up {
            UpProjection::Plain(up) => {
                recomputed(&[&up.forward(x).within("up_proj")?], move |x| activation.apply(&x[0]))?
            }
            UpProjection::Gated([gate, up]) => {
                // Where both are cut over ranks, the gradient of their input is summed over the ranks once.
                let x = &up.enter(x)?;
                let up = up.forward_entered(x).within("up_proj")?;
                recomputed(&[&gate.forward_entered(x).within("gate_proj")?, &up], move |x| gated(&x[0], &x[1]))?
            }
            UpProjection::Fused(both) => {
                recomputed(&[&both.forward(x).within("gate_up_proj")?], move |x| match &x[0].chunk(-1, 2)?[..] {
                    [gate, up] => gated(gate, up),
                    _ => Err(Error::internal("DecoderMlp", "outputs of gate and up have two halves")),
                })?
            }
        };
        self.down_proj.forward_onto(&active, residual).within("down_proj")
    }
}

/// The norm of a decoder layer: layer norm in GPT-2, RMS norm in other families.
#[derive(Debug)]
pub enum DecoderNorm<R: Runtime> {
    /// Layer norm, with a bias.
    Layer(LayerNorm<R>),
    /// RMS norm.
    Rms(RmsNorm<R>),
}

impl<R: Runtime> DecoderNorm<R> {
    pub(super) fn new(init: &Init<R>, config: &DecoderConfig) -> Result<Self> {
        let (width, eps) = (config.width, config.norm_eps);
        Ok(match config.family {
            Family::Gpt2 => DecoderNorm::Layer(LayerNorm { eps, ..LayerNorm::new(init, width)? }),
            family => {
                let norm = RmsNorm::with_offset(init, width, family.parts().norm_offset)?;
                DecoderNorm::Rms(RmsNorm { eps: Some(eps), ..norm })
            }
        })
    }
}

impl<R: Runtime> Module<R> for DecoderNorm<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        match self {
            DecoderNorm::Layer(norm) => norm.visit(name, visitor),
            DecoderNorm::Rms(norm) => norm.visit(name, visitor),
        }
    }
}

impl<R: Runtime> Forward<R> for DecoderNorm<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        match self {
            DecoderNorm::Layer(norm) => norm.forward(x),
            DecoderNorm::Rms(norm) => norm.forward(x),
        }
    }
}
