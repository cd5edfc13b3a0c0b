//! The blocks of a decoder.

use autograd::{Var, recomputed};
use numcore::{
    Error, Result, Runtime, Within,
    fused::SdpaOptions,
    ops::{Apply, PointwiseOps, ViewOps},
};

use super::{
    Activation, Dropout, LayerNorm, Linear,
    attention::{check_heads, merge_heads, split_heads, three},
};
use crate::{
    Forward, Init, Module,
    parallel::{AttendedTokens, ContextSlot, CutLayer, Cuts, RowCut},
};

/// Causal self-attention of `x: [B, T, C]`: no position sees a later one. Queries, keys and values come from one
/// matmul.
#[derive(Debug, Module)]
pub struct CausalSelfAttention<R: Runtime> {
    /// The projection to queries, keys and values in one matmul, `[3C, C]`.
    pub qkv: Linear<R>,
    /// The output projection, applied to the concatenated heads.
    pub proj: Linear<R>,
    heads: usize,
    context: ContextSlot<R>,
}

impl<R: Runtime> CausalSelfAttention<R> {
    /// Causal self-attention of `width` channels; `heads` divides `width`.
    #[track_caller]
    pub fn new(init: &Init<R>, width: usize, heads: usize) -> Result<Self> {
        check_heads(width, heads)?;
        let rows = RowCut { parts: 3, ..RowCut::of_heads(heads) };
        Ok(CausalSelfAttention {
            qkv: Linear::new(init, width, 3 * width)?.with_cuts(Cuts::Weight(rows)),
            proj: Linear::new(init, width, width)?,
            heads,
            context: ContextSlot::attends(),
        })
    }

    /// Drops the biases.
    pub fn without_bias(self) -> Self {
        CausalSelfAttention { qkv: self.qkv.without_bias(), proj: self.proj.without_bias(), ..self }
    }
}

impl<R: Runtime> CausalSelfAttention<R> {
    /// The concatenated heads, `[B, T, C]`, before the output projection.
    #[track_caller]
    fn found(&self, x: &Var<R>) -> Result<Var<R>> {
        let parts = self.qkv.forward(x).within("qkv")?.chunk(-1, 3)?;
        let heads = self.qkv.share_of(self.heads);
        let [q, k, v] = three(parts)?.map(|x| split_heads(&x, heads));
        let options = SdpaOptions { causal: true, ..SdpaOptions::default() };
        let tokens = AttendedTokens { first_head: self.qkv.first_head(heads), ..Default::default() };
        let found = self.context.attention([&q?, &k?, &v?], options, &tokens)?;
        recomputed(&[&found], |x| merge_heads(&x[0]))
    }
}

impl<R: Runtime> Forward<R> for CausalSelfAttention<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.proj.forward(&self.found(x)?).within("proj")
    }
}

/// The sizes and options of a [`Block`].
#[derive(Clone, Copy, Debug)]
pub struct BlockConfig {
    /// The number of channels, C.
    pub width: usize,
    /// The number of heads, which divides `width`.
    pub heads: usize,
    /// True if linear layers have biases.
    pub bias: bool,
    /// The dropout probability of each residual branch.
    pub dropout: f64,
    /// The activation between the two linear layers.
    pub activation: Activation,
}

/// A pre-norm decoder block of `x: [B, T, C]`: `x + attention(ln1(x))`, then `x + fc2(activation(fc1(ln2(x))))`. Norms,
/// the activation and the merged heads are [`recomputed`] in backward by the ops that would save them, unless the
/// runtime keeps them.
#[derive(Debug, Module)]
pub struct Block<R: Runtime> {
    /// The norm before attention.
    pub ln1: LayerNorm<R>,
    /// Self-attention, whose parameters are named as the block's own.
    #[module(flatten)]
    pub attention: CausalSelfAttention<R>,
    /// The norm before the linear layers.
    pub ln2: LayerNorm<R>,
    /// The linear layer to four times the width.
    pub fc1: Linear<R>,
    /// The linear layer from `[.., 4C]` back to `[.., C]`.
    pub fc2: Linear<R>,
    dropout: Dropout,
    #[module(skip)]
    activation: Activation,
}

impl<R: Runtime> Block<R> {
    /// A block of the given sizes.
    #[track_caller]
    pub fn new(init: &Init<R>, config: BlockConfig) -> Result<Self> {
        let BlockConfig { width, heads, bias, dropout, activation } = config;
        let block = Block {
            ln1: LayerNorm::new(init, width)?,
            attention: CausalSelfAttention::new(init, width, heads)?,
            ln2: LayerNorm::new(init, width)?,
            fc1: Linear::new(init, width, 4 * width)?,
            fc2: Linear::new(init, 4 * width, width)?,
            dropout: Dropout::new(dropout)?,
            activation,
        };
        Ok(if bias { block } else { block.without_bias() })
    }

    /// Drops the biases of the linear layers.
    fn without_bias(self) -> Self {
        let attention = self.attention.without_bias();
        Block { attention, fc1: self.fc1.without_bias(), fc2: self.fc2.without_bias(), ..self }
    }

    /// Adds a residual branch to `x`.
    #[track_caller]
    fn plus(&self, x: &Var<R>, last: &Linear<R>, h: &Var<R>) -> Result<Var<R>> {
        add_branch(x, (last, h), &self.dropout, &self.attention.context)
    }
}

/// Adds a residual branch to `x`, by the branch's last layer and its input: in the epilogue of its GEMM, if there is no
/// dropout. Dropout has the masks of whole sequences.
#[track_caller]
pub(super) fn add_branch<R: Runtime>(
    x: &Var<R>,
    (last, h): (&Linear<R>, &Var<R>),
    dropout: &Dropout,
    context: &ContextSlot<R>,
) -> Result<Var<R>> {
    if dropout.is_identity() {
        return last.forward_onto(h, x);
    }
    let within = last.weight.placed().and_then(|placed| placed.sequence_part());
    let h = last.forward(h)?;
    let [.., here, _] = *h.dims() else {
        return Err(Error::shape("a block of layers", &[h.spec().shape], "needs [.., T, C]"));
    };
    let part = context.part_of_values(here, within)?;
    x.add(&dropout.forward_part(&h, part.as_ref())?)
}

impl<R: Runtime> Forward<R> for Block<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let found = self.attention.found(&self.ln1.recomputed(x).within("ln1")?)?;
        let x = self.plus(x, &self.attention.proj, &found).within("proj")?;
        let widened = self.fc1.forward(&self.ln2.recomputed(&x).within("ln2")?).within("fc1")?;
        let activation = self.activation;
        let active = recomputed(&[&widened], move |x| activation.apply(&x[0]))?;
        self.plus(&x, &self.fc2, &active).within("fc2")
    }
}
