//! One layer of a decoder.

use autograd::{Var, recomputed};
use nn::{
    Activation, Forward, GroupedQueryAttention, GroupedQueryConfig, Init, LayerNorm, Linear, Module, RmsNorm,
    RotaryTables, Visitor,
    moe::{MixtureOfExperts, Routing},
    parallel::SharedInput,
};
use numcore::{
    Error, Result, Runtime, Within,
    fused::NnOps,
    ops::{PointwiseOps, ViewOps},
};

use super::{cache::LayerCache, inputs::Placement};
use crate::config::{DecoderConfig, Family};

/// A pre-norm layer of `x: [B, T, C]`: `x + attention(norm(x))`, then `x + mlp(norm(x))`.
#[derive(Debug, Module)]
pub struct DecoderLayer<R: Runtime> {
    /// The norm before attention.
    pub input_norm: DecoderNorm<R>,
    /// Causal self-attention.
    pub self_attn: GroupedQueryAttention<R>,
    /// The norm before the feed-forward part.
    pub mlp_norm: DecoderNorm<R>,
    /// The linear layers, or a mixture of experts in their place.
    pub mlp: DecoderFeedForward<R>,
}

impl<R: Runtime> DecoderLayer<R> {
    pub(super) fn new(init: &Init<R>, config: &DecoderConfig, layer: usize) -> Result<Self> {
        let attention = GroupedQueryConfig {
            width: config.width,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            fused: config.family == Family::Gpt2,
            bias: config.qkv_bias,
            output_bias: config.output_bias,
            head_norm: config.family.has_head_norms().then_some(config.norm_eps),
            window: config.windows[layer],
        };
        Ok(DecoderLayer {
            input_norm: DecoderNorm::new(init, config)?,
            self_attn: GroupedQueryAttention::new(init, attention)?,
            mlp_norm: DecoderNorm::new(init, config)?,
            mlp: DecoderFeedForward::new(init, config, layer)?,
        })
    }

    /// The number of ranks that sequences are cut over between layers, by a plan that is `sequence_parallel`.
    pub(super) fn sequence_parts(&self) -> Option<usize> {
        Some(self.self_attn.o_proj.weight.placed()?.sequence_part()?.1)
    }

    pub(super) fn forward(
        &self,
        x: &Var<R>,
        tables: Option<&RotaryTables<R>>,
        placement: &Placement<R>,
        cache: Option<&mut LayerCache<R>>,
    ) -> Result<(Var<R>, Option<Routing<R>>)> {
        let h = self.input_norm.forward(x).within("input_norm")?;
        let [q, mut k, mut v] = self.self_attn.project(&h, tables).within("self_attn")?;
        if let Some(cache) = cache {
            [k, v] = cache.extend(&k, &v)?;
        }
        // The mask has columns of tokens that the cache has dropped.
        let kept = k.dims()[2];
        let mask = placement.mask.as_ref().map(|mask| last_columns(mask, kept)).transpose()?;
        let x = match &placement.segments {
            Some(segments) => self.self_attn.attend_segments([q, k, v], segments, x),
            None => self.self_attn.attend([q, k, v], mask.as_ref(), x),
        };
        let x = x.within("self_attn")?;
        self.mlp.forward_onto(&self.mlp_norm.forward(&x).within("mlp_norm")?, &x).within("mlp")
    }
}

/// The feed-forward part of a layer, which computes each token by itself.
#[derive(Debug)]
pub enum DecoderFeedForward<R: Runtime> {
    /// Linear layers.
    Dense(DecoderMlp<R>),
    /// A mixture of experts.
    Mixture(MixtureOfExperts<R>),
}

impl<R: Runtime> DecoderFeedForward<R> {
    fn new(init: &Init<R>, config: &DecoderConfig, layer: usize) -> Result<Self> {
        Ok(match config.mixture_of(layer) {
            Some(mixture) => DecoderFeedForward::Mixture(MixtureOfExperts::new(init, mixture)?),
            None => DecoderFeedForward::Dense(DecoderMlp::new(init, config)?),
        })
    }

    /// The linear layers; `None` for a mixture.
    pub fn dense(&self) -> Option<&DecoderMlp<R>> {
        match self {
            DecoderFeedForward::Dense(mlp) => Some(mlp),
            DecoderFeedForward::Mixture(_) => None,
        }
    }

    /// The output plus `residual`, and the routing if this is a mixture.
    fn forward_onto(&self, x: &Var<R>, residual: &Var<R>) -> Result<(Var<R>, Option<Routing<R>>)> {
        match self {
            DecoderFeedForward::Dense(mlp) => Ok((mlp.forward_onto(x, residual)?, None)),
            DecoderFeedForward::Mixture(mixture) => {
                let out = mixture.forward_routed(x)?;
                Ok((residual.add(&out.y)?, Some(out.routing)))
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
    /// The projection that goes through the activation; GPT-2 has none.
    pub gate_proj: Option<Linear<R>>,
    /// The projection to the hidden width.
    pub up_proj: Linear<R>,
    /// The projection from the hidden width back.
    pub down_proj: Linear<R>,
    #[module(skip)]
    activation: Activation,
}

impl<R: Runtime> DecoderMlp<R> {
    fn new(init: &Init<R>, config: &DecoderConfig) -> Result<Self> {
        let linear =
            |inputs, outputs| Ok::<_, Error>(Linear::new(init, inputs, outputs)?.with_bias_if(config.mlp_bias));
        let (width, hidden) = (config.width, config.hidden);
        let gated = config.family != Family::Gpt2;
        Ok(DecoderMlp {
            gate_proj: gated.then(|| linear(width, hidden)).transpose()?,
            up_proj: linear(width, hidden)?,
            down_proj: linear(hidden, width)?,
            activation: config.activation,
        })
    }

    /// The output, plus `residual`. The activation's output is [`recomputed`] in backward.
    fn forward_onto(&self, x: &Var<R>, residual: &Var<R>) -> Result<Var<R>> {
        // Where both are cut over ranks, the gradient of their input is summed over the ranks once.
        let x = &self.up_proj.enter(x)?;
        let (up, activation) = (self.up_proj.forward_entered(x).within("up_proj")?, self.activation);
        let active = match &self.gate_proj {
            None => recomputed(&[&up], move |x| activation.apply(&x[0]))?,
            Some(gate) => {
                let gate = gate.forward_entered(x).within("gate_proj")?;
                recomputed(&[&gate, &up], move |x| match activation {
                    Activation::Silu => x[0].swiglu(&x[1]),
                    other => other.apply(&x[0])?.mul(&x[1]),
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
            _ => DecoderNorm::Rms(RmsNorm { eps: Some(eps), ..RmsNorm::new(init, width)? }),
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
