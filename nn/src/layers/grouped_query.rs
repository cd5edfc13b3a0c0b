//! Causal attention with fewer heads of keys than of queries, rotary positions and a sliding window.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    fused::SdpaOptions,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};

use super::{
    Linear, RmsNorm, RotaryTables,
    attention::{check_cut_alike, merge_heads},
};
use crate::{
    Forward, Init, Module, Visitor,
    parallel::{ContextSlot, CutLayer, Cuts, Exchange, RowCut, SharedInput},
};

/// The sizes and options of a [`GroupedQueryAttention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedQueryConfig {
    /// The number of channels, C.
    pub width: usize,
    /// The number of heads of queries, H.
    pub heads: usize,
    /// The number of heads of keys and values, G, which divides `heads`.
    pub kv_heads: usize,
    /// The width of a head, D; `H · D` need not be C.
    pub head_dim: usize,
    /// True if queries, keys and values come from one projection.
    pub fused: bool,
    /// True if the projections of queries, keys and values have biases.
    pub bias: bool,
    /// True if the output projection has a bias.
    pub output_bias: bool,
    /// The RMS norms of queries and keys before their rotation, if there are any.
    pub head_norm: Option<HeadNorm>,
    /// The number of keys that a query sees, its own included; all up to its own if `None`.
    pub window: Option<usize>,
    /// The scale and the soft cap of scores.
    pub scores: ScoreOptions,
}

/// The RMS norms of queries and of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNorm {
    /// The constant added to mean squares.
    pub eps: f64,
    /// The number added to weights: 1 in Gemma 3, else 0.
    pub offset: f64,
    /// True if all heads of a token are normalized together (OLMo 2); otherwise each head by itself (Qwen 3).
    pub together: bool,
}

impl HeadNorm {
    /// The norm of each head by itself, with this constant added to mean squares.
    pub fn each(eps: f64) -> Self {
        HeadNorm { eps, offset: 0.0, together: false }
    }
}

/// The scale and the soft cap of attention's scores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreOptions {
    /// The factor of scores; `1/√D` if `None`.
    pub scale: Option<f64>,
    /// The soft cap `c`: scaled scores become `c · tanh(score / c)`; none if `None`.
    pub softcap: Option<f64>,
}

/// Causal self-attention of `x: [B, T, C]` in which groups of query heads share one head of keys and values (Ainslie et
/// al. 2023).
#[derive(Debug, Module)]
pub struct GroupedQueryAttention<R: Runtime> {
    /// The projections to queries, keys and values.
    #[module(flatten)]
    pub qkv: QkvProjection<R>,
    /// The norm of queries.
    pub q_norm: Option<RmsNorm<R>>,
    /// The norm of keys.
    pub k_norm: Option<RmsNorm<R>>,
    /// The output projection, applied to the concatenated heads.
    pub o_proj: Linear<R>,
    context: ContextSlot<R>,
    #[module(skip)]
    config: GroupedQueryConfig,
}

/// The projections to queries, keys and values: one (`qkv_proj`), or three (`q_proj`, `k_proj`, `v_proj`).
#[derive(Debug)]
pub enum QkvProjection<R: Runtime> {
    /// One matmul for all three, whose outputs are concatenated.
    Fused(Box<Linear<R>>),
    /// Queries, keys and values.
    Separate(Box<[Linear<R>; 3]>),
}

impl<R: Runtime> Module<R> for QkvProjection<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        match self {
            QkvProjection::Fused(one) => one.visit("qkv_proj", visitor),
            QkvProjection::Separate(three) => {
                three.iter().zip(["q_proj", "k_proj", "v_proj"]).for_each(|(linear, name)| linear.visit(name, visitor));
            }
        }
        visitor.leave();
    }
}

impl<R: Runtime> GroupedQueryAttention<R> {
    /// Creates a layer of these sizes.
    ///
    /// # Errors
    /// An error if the configuration is inconsistent: `kv_heads` does not divide `heads`, a `head_dim` or `window` is
    /// 0, or heads of `fused` projections are normalized together.
    #[track_caller]
    pub fn new(init: &Init<R>, config: GroupedQueryConfig) -> Result<Self> {
        config.check()?;
        let GroupedQueryConfig { width, heads, kv_heads, head_dim, .. } = config;
        let linear = |rows: RowCut| {
            let linear = Linear::new(init, width, rows.pieces() * head_dim)?;
            Ok::<_, Error>(linear.with_bias_if(config.bias).with_cuts(Cuts::Weight(rows)))
        };
        let queries = RowCut::of_heads(heads);
        // Ranks with different heads of queries may share a head of keys and values.
        let keys = RowCut { shared: true, ..RowCut::of_heads(kv_heads) };
        let qkv = match config.fused {
            true => QkvProjection::Fused(Box::new(linear(RowCut { keys: kv_heads, ..queries })?)),
            false => QkvProjection::Separate(Box::new([linear(queries)?, linear(keys)?, linear(keys)?])),
        };
        let norm = |heads: usize| {
            let norm = |HeadNorm { eps, offset, together }: HeadNorm| {
                let width = if together { heads * head_dim } else { head_dim };
                Ok::<_, Error>(RmsNorm { eps: Some(eps), ..RmsNorm::with_offset(init, width, offset)? })
            };
            config.head_norm.map(norm).transpose()
        };
        Ok(GroupedQueryAttention {
            qkv,
            q_norm: norm(heads)?,
            k_norm: norm(kv_heads)?,
            o_proj: Linear::new(init, heads * head_dim, width)?.with_bias_if(config.output_bias),
            context: ContextSlot::attends(),
            config,
        })
    }

    /// Projects `x: [B, T, C]` to queries `[B, H, T, D]` and keys and values `[B, G, T, D]`; queries and keys are
    /// normalized and rotated.
    #[track_caller]
    pub fn project(&self, x: &Var<R>, rotary: Option<&RotaryTables<R>>) -> Result<[Var<R>; 3]> {
        self.check_head_norms()?;
        let [q, k, v] = match &self.qkv {
            QkvProjection::Fused(one) => self.parts(&one.forward(x).within("qkv_proj")?)?,
            QkvProjection::Separate(three) => {
                let [q, k, v] = &**three;
                check_cut_alike([q, k, v])?;
                // One entry for all three, so that the gradient of the input is summed over ranks once.
                let x = &q.enter(x)?;
                [
                    q.forward_entered(x).within("q_proj")?,
                    k.forward_entered(x).within("k_proj")?,
                    v.forward_entered(x).within("v_proj")?,
                ]
            }
        };
        let q = self.placed(q, (&self.q_norm, 0), rotary)?;
        let k = self.placed(k, (&self.k_norm, 1), rotary)?;
        Ok([q, k, self.heads_of(&v)?.transpose(1, 2)?])
    }

    /// Computes attention, projects it to `[B, T, C]` and adds `residual`, if given. Queries are at the last positions
    /// of the keys. A `bool` mask that broadcasts to `[B, H, T, S]` is false where a query must not attend; later keys are
    /// hidden in any case.
    #[track_caller]
    pub fn attend<'r>(
        &self,
        qkv: [Var<R>; 3],
        mask: Option<&Var<R>>,
        residual: impl Into<Option<&'r Var<R>>>,
    ) -> Result<Var<R>> {
        self.attend_within(qkv, mask, None, residual.into())
    }

    /// Attends as [`attend`](GroupedQueryAttention::attend) does, but tokens see only their own document. `segments`,
    /// `[B, T]` (`i64`), gives the document of each token of the sequence; of the whole sequence, where it is cut over
    /// ranks.
    #[track_caller]
    pub fn attend_segments<'r>(
        &self,
        qkv: [Var<R>; 3],
        segments: &Var<R>,
        residual: impl Into<Option<&'r Var<R>>>,
    ) -> Result<Var<R>> {
        self.attend_within(qkv, None, Some(segments), residual.into())
    }

    #[track_caller]
    fn attend_within(
        &self,
        [q, k, v]: [Var<R>; 3],
        mask: Option<&Var<R>>,
        segments: Option<&Var<R>>,
        residual: Option<&Var<R>>,
    ) -> Result<Var<R>> {
        let window = (self.config.window.map(|keys| keys.saturating_sub(1)), None);
        let ScoreOptions { scale, softcap } = self.config.scores;
        let options = SdpaOptions { mask, causal: true, window, lower_right: true, scale, softcap };
        let found = merge_heads(&self.context.attention([&q, &k, &v], options, segments)?)?;
        let out =
            residual.map_or_else(|| self.o_proj.forward(&found), |residual| self.o_proj.forward_onto(&found, residual));
        out.within("o_proj")
    }

    /// The queries, keys and values of this rank's heads, from the output of the one projection.
    fn parts(&self, x: &Var<R>) -> Result<[Var<R>; 3]> {
        let (width, [h, g]) = (x.dims().last().copied().unwrap_or(0), [self.config.heads, self.config.kv_heads]);
        let [q, k] = [h, g].map(|heads| width * heads / (h + 2 * g));
        Ok([x.narrow(-1, 0, q)?, x.narrow(-1, q, k)?, x.narrow(-1, q + k, k)?])
    }

    /// Returns an error unless gradients of the head norms are summed over ranks exactly where ranks have different
    /// heads.
    fn check_head_norms(&self) -> Result<()> {
        let queries = match &self.qkv {
            QkvProjection::Fused(one) => one,
            QkvProjection::Separate(three) => &three[0],
        };
        let norms = [("q_norm", &self.q_norm), ("k_norm", &self.k_norm)];
        for (name, weight) in norms.iter().filter_map(|(name, norm)| Some((name, &norm.as_ref()?.weight))) {
            let Some(placed) = weight.placed() else { continue };
            let why = match (queries.is_column(), placed.has_partial_gradient()) {
                (true, false) => "normalizes heads that are cut over ranks: name it by `partial_gradient` in the plan",
                (false, true) => {
                    "normalizes all heads on every rank, and the plan has its gradients summed: remove its line"
                }
                _ => continue,
            };
            return Err(Error::config("attention", "TensorPlan", format!("`{name}` {why}")));
        }
        Ok(())
    }

    /// Reshapes `[B, T, H · D]` to `[B, T, H, D]`.
    #[track_caller]
    fn heads_of(&self, x: &Var<R>) -> Result<Var<R>> {
        let (shape, depth) = (x.spec().shape, self.config.head_dim);
        let &[b, t, c] = &shape[..] else {
            return Err(Error::shape("attention", &[shape], "needs [B, T, C]"));
        };
        x.reshape([b, t, c / depth, depth])
    }

    /// Splits queries or keys into heads, normalizes and rotates them: `[B, H, T, D]`. `which` is their place among the
    /// projections.
    #[track_caller]
    fn placed(
        &self,
        x: Var<R>,
        (norm, which): (&Option<RmsNorm<R>>, usize),
        rotary: Option<&RotaryTables<R>>,
    ) -> Result<Var<R>> {
        let together = self.config.head_norm.is_some_and(|norm| norm.together);
        let x = match norm {
            Some(norm) if together => self.heads_of(&self.normalized_together(x, norm, which)?)?,
            Some(norm) => norm.forward(&self.heads_of(&x)?)?,
            None => self.heads_of(&x)?,
        };
        let x = x.transpose(1, 2)?;
        rotary.map_or(Ok(x.clone()), |tables| tables.rotate(&x))
    }

    /// Normalizes all heads of a token together. Where ranks have some of them, mean squares are summed over ranks.
    fn normalized_together(&self, x: Var<R>, norm: &RmsNorm<R>, which: usize) -> Result<Var<R>> {
        let placed = match &self.qkv {
            QkvProjection::Separate(three) if three[which].is_column() => three[which].weight.placed(),
            _ => None,
        };
        let Some(placed) = placed else { return norm.forward(&x) };
        let (own, all) = (placed.placement().ranges(0)[0].clone(), placed.placement().logical()[0]);
        let wide = x.to_dtype(x.dtype().compute())?;
        // Several ranks may have one head. The sum is equal on all ranks, and each uses it for its own heads.
        let squares = placed.exchange(Exchange::AllReduce, &wide.square()?.sum_keepdim(&[-1])?)?;
        let mean = placed.exchange(Exchange::Copy, &squares)?.div((all * placed.replicas()) as f64)?;
        let rstd = mean.add(norm.eps.unwrap_or(x.dtype().epsilon()))?.rsqrt()?;
        let weight = norm.weight.var().narrow(0, own.start, own.len())?.to_dtype(wide.dtype())?;
        wide.mul(&rstd)?.mul(&weight.add(norm.offset)?)?.to_dtype(x.dtype())
    }
}

impl GroupedQueryConfig {
    fn check(&self) -> Result<()> {
        let GroupedQueryConfig { heads, kv_heads, head_dim, fused, head_norm, window, .. } = *self;
        let wrong = |field, why: String| Err(Error::config("attention", field, why));
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return wrong("kv_heads", format!("{kv_heads} heads of keys do not divide {heads} heads of queries"));
        }
        if fused && head_norm.is_some_and(|norm| norm.together) {
            return wrong("fused", "heads that are normalized together need a projection of their own".into());
        }
        if head_dim == 0 {
            return wrong("head_dim", "a head is at least 1 wide".into());
        }
        if window == Some(0) {
            return wrong("window", "a window of 0 keys leaves a query nothing to see".into());
        }
        Ok(())
    }
}
