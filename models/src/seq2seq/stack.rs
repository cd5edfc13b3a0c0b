//! Layers of attention and linear layers, with norms before them, that may attend to another sequence.

use autograd::Var;
use nn::{Activation, Forward, Init, LayerNorm, Module, Param, RmsNorm};
use numcore::{DType, Error, Result, Runtime, Within, ops::PointwiseOps};

use super::{
    StackAttention,
    attention::{RelativeBias, SeenKeys},
};
use crate::decoder::{DecoderMlp, DecoderNorm, KvCache, LayerCache, MlpForm};

/// The sizes and options of a [`LayerStack`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerStackConfig {
    /// The number of layers.
    pub layers: usize,
    /// The number of channels, `C`.
    pub width: usize,
    /// The number of heads, `H`.
    pub heads: usize,
    /// The width of a head, `D`; `H · D` need not be `C`.
    pub head_dim: usize,
    /// The width between the linear layers.
    pub hidden: usize,
    /// The activation between the linear layers.
    pub activation: Activation,
    /// True if the linear layers have a gate.
    pub gated: bool,
    /// True for RMS norms, false for layer norms.
    pub rms: bool,
    /// The constant added to variances or mean squares in norms.
    pub eps: f64,
    /// True if linear layers have biases.
    pub bias: bool,
    /// True if the projection to keys has one too.
    pub key_bias: bool,
    /// The factor of scores; `1/√D` if `None`.
    pub scale: Option<f64>,
    /// True if tokens see no later tokens.
    pub causal: bool,
    /// True if layers attend to another sequence.
    pub cross: bool,
    /// The bias of scores by distance, of all layers alike.
    pub relative: Option<RelativeConfig>,
    /// True if the output of each layer is kept between ±64504 in `f16`, whose largest number is 65504.
    pub clamped: bool,
}

/// The buckets of distances of a [`RelativeBias`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativeConfig {
    /// The number of buckets.
    pub buckets: usize,
    /// The distance from which on all share the last bucket.
    pub distance: usize,
}

/// Layers of `x: [B, T, C]`, and a last norm.
#[derive(Debug, Module)]
pub struct LayerStack<R: Runtime> {
    /// The layers, in order.
    pub layers: Vec<StackLayer<R>>,
    /// The bias of scores by distance.
    pub relative: Option<RelativeBias<R>>,
    /// The norm of the last layer's output.
    pub norm: DecoderNorm<R>,
    #[module(skip)]
    config: LayerStackConfig,
}

/// A layer: `x + attention(norm(x))`, then the same with attention to another sequence, then with the linear layers.
#[derive(Debug, Module)]
pub struct StackLayer<R: Runtime> {
    /// The norm before attention.
    pub attention_norm: DecoderNorm<R>,
    /// Attention of the sequence to itself.
    pub attention: StackAttention<R>,
    /// The norm before attention to the other sequence.
    pub cross_norm: Option<DecoderNorm<R>>,
    /// Attention to the other sequence.
    pub cross: Option<StackAttention<R>>,
    /// The norm before the linear layers.
    pub mlp_norm: DecoderNorm<R>,
    /// The linear layers.
    pub mlp: DecoderMlp<R>,
}

/// The sequence that a [`LayerStack`] attends to, as keys and values of each layer.
#[derive(Debug)]
pub struct StackMemory<R: Runtime> {
    pub(super) layers: Vec<[Var<R>; 2]>,
    pub(super) mask: Option<Var<R>>,
    /// The number of rows.
    pub(super) rows: usize,
    /// A parameter by which the layers are known, unless there are none.
    of: Option<Param<R>>,
}

/// The inputs of a [`LayerStack`] besides the sequence.
pub(crate) struct StackInputs<'a, R: Runtime> {
    /// The tokens that are no padding, `[B, 1, 1, T]`, `bool`.
    pub mask: Option<&'a Var<R>>,
    /// The other sequence.
    pub memory: Option<&'a StackMemory<R>>,
    /// The keys and values of earlier tokens.
    pub cache: Option<&'a mut KvCache<R>>,
}

impl<R: Runtime> Default for StackInputs<'_, R> {
    fn default() -> Self {
        StackInputs { mask: None, memory: None, cache: None }
    }
}

impl<R: Runtime> LayerStack<R> {
    /// Creates layers of these sizes.
    ///
    /// # Errors
    /// An error if a size is 0, or buckets of distances are too few, or reach less far than their number.
    #[track_caller]
    pub fn new(init: &Init<R>, config: LayerStackConfig) -> Result<Self> {
        let LayerStackConfig { layers, width, heads, head_dim, causal, relative, .. } = config;
        if [width, heads, head_dim, config.hidden].contains(&0) {
            return Err(Error::config("LayerStack", "width", format!("a size is 0 in {config:?}"))).at_caller();
        }
        if let Some(RelativeConfig { buckets, distance }) =
            relative.filter(|r| r.buckets < 4 || r.distance <= r.buckets)
        {
            let why =
                format!("{buckets} buckets up to a distance of {distance}: give 4 or more, and a longer distance");
            return Err(Error::config("LayerStack", "relative", why)).at_caller();
        }
        let relative = relative.map(|relative| RelativeBias::new(init, relative, heads, causal));
        Ok(LayerStack {
            layers: (0..layers).map(|_| StackLayer::new(init, &config)).collect::<Result<_>>().at_caller()?,
            relative: relative.transpose()?,
            norm: norm(init, &config)?,
            config,
        })
    }

    /// The keys and values of `states: [B, S, C]` in each layer that attends to them. The mask, `[B, 1, 1, S]` of
    /// `bool`, is false for padding.
    pub(super) fn memory(&self, states: &Var<R>, mask: Option<Var<R>>) -> Result<StackMemory<R>> {
        let of = |(i, layer): (usize, &StackLayer<R>)| {
            let cross =
                layer.cross.as_ref().ok_or_else(|| Error::state("LayerStack", "attends to no other sequence"))?;
            cross.keys_values(states).within(format_args!("layers.{i}.cross"))
        };
        let layers = self.layers.iter().enumerate().map(of).collect::<Result<_>>()?;
        Ok(StackMemory { layers, mask, rows: states.dims()[0], of: self.known_by().cloned() })
    }

    /// Tells whether this is the memory of these layers.
    pub(super) fn remembers(&self, memory: &StackMemory<R>) -> bool {
        let is_same = match (self.known_by(), &memory.of) {
            (Some(own), Some(of)) => own.is(of),
            (own, of) => own.is_none() && of.is_none(),
        };
        is_same && memory.layers.len() == self.layers.len()
    }

    fn known_by(&self) -> Option<&Param<R>> {
        self.layers.first()?.cross.as_ref().map(|cross| &cross.k_proj.weight)
    }

    /// The normalized output of the last layer.
    pub(crate) fn forward_with(&self, x: &Var<R>, inputs: StackInputs<'_, R>) -> Result<Var<R>> {
        self.norm.forward(&self.layers_with(x, inputs)?).within("norm")
    }

    /// The output of the last layer.
    pub(crate) fn layers_with(&self, x: &Var<R>, mut inputs: StackInputs<'_, R>) -> Result<Var<R>> {
        let (before, tokens) = (inputs.cache.as_ref().map_or(0, |cache| cache.len()), x.dims()[1]);
        let bias = self.relative.as_ref().map(|relative| relative.of(tokens, before + tokens)).transpose()?;
        let causal = self.config.causal.then_some(before);
        let seen = SeenKeys { causal, mask: inputs.mask, bias: bias.as_ref() };
        let mut x = x.clone();
        for (i, layer) in self.layers.iter().enumerate() {
            let memory = inputs.memory.map(|memory| (memory, i));
            let cache = inputs.cache.as_deref_mut().map(|cache| cache.layer(i));
            x = layer.forward_with(&x, &seen, memory, cache).within(format_args!("layers.{i}"))?;
            if self.config.clamped && x.dtype() == DType::F16 {
                x = x.clamp(-64_504.0, 64_504.0)?;
            }
        }
        if let Some(cache) = inputs.cache {
            cache.advance(tokens);
        }
        Ok(x)
    }
}

impl<R: Runtime> StackLayer<R> {
    fn new(init: &Init<R>, config: &LayerStackConfig) -> Result<Self> {
        let LayerStackConfig { width, hidden, activation, gated, bias, cross, .. } = *config;
        Ok(StackLayer {
            attention_norm: norm(init, config)?,
            attention: StackAttention::new(init, config)?,
            cross_norm: cross.then(|| norm(init, config)).transpose()?,
            cross: cross.then(|| StackAttention::new(init, config)).transpose()?,
            mlp_norm: norm(init, config)?,
            mlp: DecoderMlp::new(init, &MlpForm { width, hidden, activation, bias, gated, fused: false })?,
        })
    }

    fn forward_with(
        &self,
        x: &Var<R>,
        seen: &SeenKeys<'_, R>,
        memory: Option<(&StackMemory<R>, usize)>,
        cache: Option<&mut LayerCache<R>>,
    ) -> Result<Var<R>> {
        let h = self.attention_norm.forward(x).within("attention_norm")?;
        let [mut k, mut v] = self.attention.keys_values(&h).within("attention")?;
        if let Some(cache) = cache {
            [k, v] = cache.extend(&k, &v)?;
        }
        let mut x = self.attention.attend(&h, &[k, v], seen, x).within("attention")?;
        if let (Some(norm), Some(cross)) = (&self.cross_norm, &self.cross) {
            let Some((memory, layer)) = memory else {
                return Err(Error::usage("LayerStack", "needs the sequence that it attends to"));
            };
            let h = norm.forward(&x).within("cross_norm")?;
            let seen = SeenKeys { causal: None, mask: memory.mask.as_ref(), bias: None };
            x = cross.attend(&h, &memory.layers[layer], &seen, &x).within("cross")?;
        }
        self.mlp.forward_onto(&self.mlp_norm.forward(&x).within("mlp_norm")?, Some(&x)).within("mlp")
    }
}

fn norm<R: Runtime>(
    init: &Init<R>,
    &LayerStackConfig { width, rms, eps, .. }: &LayerStackConfig,
) -> Result<DecoderNorm<R>> {
    Ok(match rms {
        true => DecoderNorm::Rms(RmsNorm { eps: Some(eps), ..RmsNorm::new(init, width)? }),
        false => DecoderNorm::Layer(LayerNorm { eps, ..LayerNorm::new(init, width)? }),
    })
}
