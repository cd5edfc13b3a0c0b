//! The block of an encoder, in which every position attends to every other.

use autograd::Var;
use numcore::{Error, Result, Runtime, Within, fused::SdpaOptions};

use super::{
    Activation, Dropout, LayerNorm, Linear,
    attention::{check_cut_alike, check_heads, merge_heads, split_heads},
    transformer::add_branch,
};
use crate::{
    Forward, Init, Module,
    parallel::{AttendedTokens, ContextSlot, CutLayer, Cuts, RowCut, SharedInput},
};

/// The sizes and options of an [`EncoderBlock`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderBlockConfig {
    /// The number of channels, C.
    pub width: usize,
    /// The number of heads, which divides `width`.
    pub heads: usize,
    /// The width between the two linear layers.
    pub hidden: usize,
    /// The activation between them.
    pub activation: Activation,
    /// True if the norms come before each branch (ViT), false if after its sum (BERT).
    pub pre_norm: bool,
    /// True if queries, keys and values have biases; all other linear layers have them.
    pub qkv_bias: bool,
    /// The constant added to variances.
    pub eps: f64,
    /// The dropout probability of each residual branch.
    pub dropout: f64,
}

/// A block of an encoder (Vaswani et al. 2017; Devlin et al. 2019; Dosovitskiy et al. 2021) of `x: [B, T, C]`.
#[derive(Debug, Module)]
pub struct EncoderBlock<R: Runtime> {
    /// The projection to queries.
    pub query: Linear<R>,
    /// The projection to keys.
    pub key: Linear<R>,
    /// The projection to values.
    pub value: Linear<R>,
    /// The output projection of attention.
    pub output: Linear<R>,
    /// The norm of attention: before it, or after the residual sum.
    pub norm1: LayerNorm<R>,
    /// The first linear layer.
    pub fc1: Linear<R>,
    /// The second linear layer.
    pub fc2: Linear<R>,
    /// The norm of the linear layers: before them, or after the residual sum.
    pub norm2: LayerNorm<R>,
    dropout: Dropout,
    context: ContextSlot<R>,
    #[module(skip)]
    config: EncoderBlockConfig,
}

impl<R: Runtime> EncoderBlock<R> {
    /// Creates a block of these sizes.
    #[track_caller]
    pub fn new(init: &Init<R>, config: EncoderBlockConfig) -> Result<Self> {
        let EncoderBlockConfig { width, heads, hidden, eps, .. } = config;
        check_heads(width, heads)?;
        let norm = || Ok::<_, Error>(LayerNorm { eps, ..LayerNorm::new(init, width)? });
        let rows = RowCut::of_heads(heads);
        let projection = || {
            Ok::<_, Error>(Linear::new(init, width, width)?.with_bias_if(config.qkv_bias).with_cuts(Cuts::Weight(rows)))
        };
        Ok(EncoderBlock {
            query: projection()?,
            key: projection()?,
            value: projection()?,
            output: Linear::new(init, width, width)?,
            norm1: norm()?,
            fc1: Linear::new(init, width, hidden)?,
            fc2: Linear::new(init, hidden, width)?,
            norm2: norm()?,
            dropout: Dropout::new(config.dropout)?,
            context: ContextSlot::attends(),
            config,
        })
    }

    /// Computes the block's output. A `bool` mask that broadcasts to `[B, H, T, T]` is true where a position may attend
    /// to another. Where sequences are cut over ranks, it is of whole ones.
    #[track_caller]
    pub fn forward_masked(&self, x: &Var<R>, mask: Option<&Var<R>>) -> Result<Var<R>> {
        if self.config.pre_norm {
            let x = self.attend(&self.norm1.forward(x).within("norm1")?, mask, x)?;
            return self.widen(&self.norm2.forward(&x).within("norm2")?, &x);
        }
        let x = self.norm1.forward(&self.attend(x, mask, x)?).within("norm1")?;
        self.norm2.forward(&self.widen(&x, &x)?).within("norm2")
    }

    #[track_caller]
    fn attend(&self, x: &Var<R>, mask: Option<&Var<R>>, residual: &Var<R>) -> Result<Var<R>> {
        check_cut_alike([&self.query, &self.key, &self.value])?;
        let count = self.query.share_of(self.config.heads);
        // One entry for all three, so that the gradient of the input is summed over ranks once.
        let x = &self.query.enter(x)?;
        let heads = |linear: &Linear<R>, name| split_heads(&linear.forward_entered(x).within(name)?, count);
        let (q, k, v) = (heads(&self.query, "query")?, heads(&self.key, "key")?, heads(&self.value, "value")?);
        let options = SdpaOptions { mask, ..Default::default() };
        let tokens = AttendedTokens { first_head: self.query.first_head(count), ..Default::default() };
        let found = merge_heads(&self.context.attention([&q, &k, &v], options, &tokens)?)?;
        self.plus(&self.output, &found, residual).within("output")
    }

    #[track_caller]
    fn widen(&self, x: &Var<R>, residual: &Var<R>) -> Result<Var<R>> {
        let active = self.config.activation.apply(&self.fc1.forward(x).within("fc1")?)?;
        self.plus(&self.fc2, &active, residual).within("fc2")
    }

    #[track_caller]
    fn plus(&self, last: &Linear<R>, x: &Var<R>, residual: &Var<R>) -> Result<Var<R>> {
        add_branch(residual, (last, x), &self.dropout, &self.context)
    }
}

impl<R: Runtime> Forward<R> for EncoderBlock<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.forward_masked(x, None)
    }
}
