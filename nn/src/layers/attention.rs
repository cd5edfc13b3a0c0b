//! Multi-head attention.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Within,
    fused::SdpaOptions,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps},
};

use super::Linear;
use crate::{
    Forward, Init, Initializer, Module, Param,
    parallel::{AttendedTokens, ContextSlot, TensorStyle},
};

/// Options of attention: masks, window, scale and soft cap.
pub struct AttentionOptions<'a, R: Runtime> {
    /// True if queries see no key at a later position.
    pub causal: bool,
    /// A mask that broadcasts to `[B, H, T, S]`: added to the scores, or of `bool`, true where a query may attend.
    pub mask: Option<&'a Var<R>>,
    /// Keys that no query sees, `[B, S]`, `bool`, true for a hidden key. A query without any visible key gets zeros
    /// (PyTorch: NaN).
    pub key_padding: Option<&'a Var<R>>,
    /// The sliding window `(left, right)`: the numbers of keys before and after its own position that a query sees; all
    /// if `None`.
    pub window: (Option<usize>, Option<usize>),
    /// True if query `t` of `T` is at position `t + S − T` of the keys instead of `t`, for `causal` and `window`. For
    /// queries after a KV cache.
    pub lower_right: bool,
    /// The factor of the scores; `1/√D` if `None`, where `D` is a head's width.
    pub scale: Option<f64>,
    /// The soft cap `c`: scaled scores become `c · tanh(score / c)` before the mask.
    pub softcap: Option<f64>,
}

impl<R: Runtime> Default for AttentionOptions<'_, R> {
    fn default() -> Self {
        AttentionOptions {
            causal: false,
            mask: None,
            key_padding: None,
            window: (None, None),
            lower_right: false,
            scale: None,
            softcap: None,
        }
    }
}

/// Multi-head attention (Vaswani et al. 2017), batch first; parameters are named as in PyTorch's
/// `nn.MultiheadAttention`.
#[derive(Debug, Module)]
pub struct MultiHeadAttention<R: Runtime> {
    /// The projections of queries, keys and values, concatenated along the rows: `[3C, C]`.
    pub in_proj_weight: Param<R>,
    /// The bias of the input projections, `[3C]`.
    pub in_proj_bias: Option<Param<R>>,
    /// The output projection, applied to the concatenated heads.
    pub out_proj: Linear<R>,
    heads: usize,
    context: ContextSlot<R>,
}

impl<R: Runtime> MultiHeadAttention<R> {
    /// A layer of `width` channels; `heads` divides `width`. Input projections are Xavier-uniform, the output
    /// projection is as in a linear layer, biases are 0.
    #[track_caller]
    pub fn new(init: &Init<R>, width: usize, heads: usize) -> Result<Self> {
        check_heads(width, heads)?;
        let in_proj_weight = init.weight([3 * width, width], Initializer::XavierUniform { gain: 1.0 })?;
        let in_proj_bias = Some(init.bias([3 * width], Initializer::Zeros)?);
        let out_proj = Linear::new(&init.clone().biases(Initializer::Zeros), width, width)?;
        Ok(MultiHeadAttention { in_proj_weight, in_proj_bias, out_proj, heads, context: ContextSlot::attends() })
    }

    /// Drops the biases.
    pub fn without_bias(self) -> Self {
        MultiHeadAttention { in_proj_bias: None, out_proj: self.out_proj.without_bias(), ..self }
    }

    /// Multi-head attention of `query: [B, T, C]` over `key` and `value`, `[B, S, C]`, giving `[B, T, C]`. The layer
    /// projects its inputs and its output. Where sequences are cut over ranks, queries and keys must be parts of one
    /// sequence, and a mask covers the whole sequence.
    #[track_caller]
    pub fn attend(
        &self,
        query: &Var<R>,
        key: &Var<R>,
        value: &Var<R>,
        options: AttentionOptions<'_, R>,
    ) -> Result<Var<R>> {
        let projected = [query, key, value].into_iter().enumerate().map(|(i, x)| self.project(x, i, 1));
        let [q, k, v] = three(projected.collect::<Result<Vec<_>>>()?)?;
        self.combine(q, k, v, options)
    }

    /// Self-attention of `x: [B, T, C]`: one matmul computes queries, keys and values.
    #[track_caller]
    pub fn attend_self(&self, x: &Var<R>, options: AttentionOptions<'_, R>) -> Result<Var<R>> {
        let [q, k, v] = three(self.project(x, 0, 3)?.chunk(-1, 3)?)?;
        self.combine(q, k, v, options)
    }

    /// Input projections `first ..` of `x`, `count` of them concatenated.
    #[track_caller]
    fn project(&self, x: &Var<R>, first: usize, count: usize) -> Result<Var<R>> {
        let width = self.in_proj_weight.shape()[1];
        let part = |p: &Param<R>| p.var().narrow(0, first * width, count * width);
        let bias = self.in_proj_bias.as_ref().map(part).transpose()?;
        x.linear(&part(&self.in_proj_weight)?, bias.as_ref())
    }

    #[track_caller]
    fn combine(&self, q: Var<R>, k: Var<R>, v: Var<R>, options: AttentionOptions<'_, R>) -> Result<Var<R>> {
        let mask = options.joint_mask()?;
        let AttentionOptions { causal, window, lower_right, scale, softcap, .. } = options;
        let options = SdpaOptions { mask: mask.as_ref(), causal, window, lower_right, scale, softcap };
        let [q, k, v] = [q, k, v].map(|x| split_heads(&x, self.heads));
        let found = merge_heads(&self.context.attention([&q?, &k?, &v?], options, &AttendedTokens::default())?)?;
        self.out_proj.forward(&found).within("out_proj")
    }
}

/// Self-attention of `x: [B, T, C]`, without a mask.
impl<R: Runtime> Forward<R> for MultiHeadAttention<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.attend_self(x, AttentionOptions::default())
    }
}

impl<R: Runtime> AttentionOptions<'_, R> {
    /// Combines both masks into one.
    fn joint_mask(&self) -> Result<Option<Var<R>>> {
        let Some(padding) = self.key_padding else {
            return Ok(self.mask.cloned());
        };
        let hidden = padding.unsqueeze(1)?.unsqueeze(1)?;
        match self.mask {
            Some(mask) if mask.dtype() == DType::Bool => mask.logical_and(&hidden.logical_not()?).map(Some),
            Some(mask) => mask.masked_fill(&hidden, f64::NEG_INFINITY).map(Some),
            None => hidden.logical_not().map(Some),
        }
    }
}

#[track_caller]
pub(super) fn check_heads(width: usize, heads: usize) -> Result<()> {
    if heads == 0 || !width.is_multiple_of(heads) {
        let why = format!("{heads} heads do not divide a width of {width}");
        return Err(Error::config("attention", "heads", why)).at_caller();
    }
    Ok(())
}

/// Checks that a plan cuts the projections to queries, keys and values alike: otherwise a head of queries would meet
/// the keys of another.
///
/// # Errors
/// An error that names how each is cut.
pub fn check_cut_alike<R: Runtime>([q, k, v]: [&Linear<R>; 3]) -> Result<()> {
    let style = |linear: &Linear<R>| linear.weight.placed().map(|placed| placed.style());
    let styles = [q, k, v].map(style);
    match styles {
        [None | Some(TensorStyle::Column | TensorStyle::Replicated), ..] if styles == [styles[0]; 3] => Ok(()),
        _ => {
            let [q, k, v] = styles.map(|style| style.unwrap_or(TensorStyle::Replicated));
            let why = format!(
                "queries are cut by {q:?}, keys by {k:?} and values by {v:?}: cut all of them by `column`, or leave all of them whole"
            );
            Err(Error::config("attention", "TensorPlan", why))
        }
    }
}

/// Reshapes `[B, T, C]` to `[B, H, T, C/H]`.
#[track_caller]
pub(super) fn split_heads<R: Runtime>(x: &Var<R>, heads: usize) -> Result<Var<R>> {
    let shape = x.spec().shape;
    let &[b, t, c] = &shape[..] else {
        return Err(Error::shape("attention", &[shape], "needs [B, T, C]"));
    };
    x.reshape([b, t, heads, c / heads])?.transpose(1, 2)
}

/// Reshapes `[B, H, T, D]` to `[B, T, H · D]`.
#[track_caller]
pub(super) fn merge_heads<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    x.transpose(1, 2)?.flatten(2, 3)
}

/// Converts a list of exactly three parts to an array; an error for another length.
pub(super) fn three<T>(parts: Vec<T>) -> Result<[T; 3]> {
    parts.try_into().map_err(|_| Error::internal("attention", "queries, keys and values are three"))
}
