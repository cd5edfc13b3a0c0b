//! Causal attention with fewer heads of keys than of queries, rotary positions and a sliding window.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Within,
    fused::{AttentionProgram, SdpaOptions},
    ops::{Apply, JoinOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::{
    LatentConfig, LatentProjection, Linear, RmsNorm, RotaryTables,
    attention::{check_cut_alike, merge_heads},
};
use crate::{
    Forward, Init, Initializer, Module, Param, Visitor,
    parallel::{AttendedTokens, ContextSlot, CutLayer, Cuts, Exchange, RowCut, SharedInput, first_query, same_segment},
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
    /// The scale, the soft cap and the sinks of scores.
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

/// The scale, the soft cap and the sinks of attention's scores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreOptions {
    /// The factor of scores; `1/√D` if `None`.
    pub scale: Option<f64>,
    /// The soft cap `c`: scaled scores become `c · tanh(score / c)`; none if `None`.
    pub softcap: Option<f64>,
    /// True if each head has a learned score of seeing nothing, its sink (GPT-OSS).
    pub sinks: bool,
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
    /// The score of each head of queries for seeing nothing, `[H]`.
    pub sinks: Option<Param<R>>,
    /// The output projection, applied to the concatenated heads.
    pub o_proj: Linear<R>,
    context: ContextSlot<R>,
    #[module(skip)]
    config: GroupedQueryConfig,
}

/// The projections to queries, keys and values: one (`qkv_proj`), three (`q_proj`, `k_proj`, `v_proj`), or those of
/// latent attention.
#[derive(Debug)]
pub enum QkvProjection<R: Runtime> {
    /// One matmul for all three, whose outputs are concatenated.
    Fused(Box<Linear<R>>),
    /// Queries, keys and values.
    Separate(Box<[Linear<R>; 3]>),
    /// Latent vectors, from which queries, keys and values come.
    Latent(Box<LatentProjection<R>>),
}

impl<R: Runtime> Module<R> for QkvProjection<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        match self {
            QkvProjection::Fused(one) => one.visit("qkv_proj", visitor),
            QkvProjection::Separate(three) => {
                three.iter().zip(["q_proj", "k_proj", "v_proj"]).for_each(|(linear, name)| linear.visit(name, visitor));
            }
            QkvProjection::Latent(latent) => {
                // Without a name of its own, as the others.
                latent.visit("", visitor);
            }
        }
        visitor.leave();
    }
}

impl<R: Runtime> GroupedQueryAttention<R> {
    /// Creates a layer of these sizes.
    ///
    /// # Errors
    /// An error if `kv_heads` does not divide `heads`, a `head_dim` or `window` is 0, or heads of `fused` projections
    /// are normalized together.
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
        Self::of(init, config, qkv, head_dim)
    }

    /// Creates multi-head latent attention (DeepSeek-AI 2024): queries, keys and values of `config` come from latent
    /// vectors. Rotary tables turn the last components of queries and keys.
    ///
    /// # Errors
    /// An error if the configuration is inconsistent, heads of keys are fewer than those of queries, or there are norms
    /// of heads.
    #[track_caller]
    pub fn with_latent(init: &Init<R>, config: GroupedQueryConfig, latent: LatentConfig) -> Result<Self> {
        config.check()?;
        if config.fused || config.head_norm.is_some() {
            let why = "latent attention has no fused projection, and no norms of heads";
            return Err(Error::config("attention", "latent", why));
        }
        let qkv = QkvProjection::Latent(Box::new(LatentProjection::new(init, &config, latent)?));
        Self::of(init, config, qkv, latent.value)
    }

    /// The layer with these projections, to values of a width.
    #[track_caller]
    fn of(init: &Init<R>, config: GroupedQueryConfig, qkv: QkvProjection<R>, value: usize) -> Result<Self> {
        let GroupedQueryConfig { width, heads, kv_heads, head_dim, .. } = config;
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
            sinks: config.scores.sinks.then(|| sinks(init, heads)).transpose()?,
            o_proj: Linear::new(init, heads * value, width)?.with_bias_if(config.output_bias),
            context: ContextSlot::attends(),
            config,
        })
    }

    /// Projects `x: [B, T, C]` to queries `[B, H, T, D]` and keys and values `[B, G, T, D]`; queries and keys are
    /// normalized and rotated. Latent attention has values of a width of their own.
    #[track_caller]
    pub fn project(&self, x: &Var<R>, rotary: Option<&RotaryTables<R>>) -> Result<[Var<R>; 3]> {
        self.check_head_norms()?;
        let [q, k, v] = match &self.qkv {
            QkvProjection::Latent(latent) => return latent.project(x, rotary),
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
    /// of the keys. A `bool` mask that broadcasts to `[B, H, T, S]` is false where a query must not attend; later keys
    /// are hidden in any case.
    #[track_caller]
    pub fn attend<'r>(
        &self,
        qkv: [Var<R>; 3],
        mask: Option<&Var<R>>,
        residual: impl Into<Option<&'r Var<R>>>,
    ) -> Result<Var<R>> {
        self.attend_tokens(qkv, mask, AttendedTokens::default(), residual)
    }

    /// Attends as [`attend`](GroupedQueryAttention::attend) does, to tokens with documents or positions of their own.
    /// The layer sets the first head.
    #[track_caller]
    pub fn attend_tokens<'r>(
        &self,
        [q, k, v]: [Var<R>; 3],
        mask: Option<&Var<R>>,
        tokens: AttendedTokens<'_, R>,
        residual: impl Into<Option<&'r Var<R>>>,
    ) -> Result<Var<R>> {
        let window = (self.config.window.map(|keys| keys.saturating_sub(1)), None);
        let ScoreOptions { scale, softcap, .. } = self.config.scores;
        let options = SdpaOptions { mask, causal: true, window, lower_right: true, scale, softcap };
        let found = match &self.sinks {
            None => {
                let first_head = self.queries().and_then(|queries| queries.first_head(q.dims()[1]));
                self.context.attention([&q, &k, &v], options, &AttendedTokens { first_head, ..tokens })?
            }
            Some(sinks) => self.attend_with_sinks([&q, &k, &v], options, tokens.segments, sinks)?,
        };
        self.o_proj.forward_onto(&merge_heads(&found)?, residual.into()).within("o_proj")
    }

    /// Attention in which a key of zeros comes before all others, every query sees it, and its score is the head's
    /// sink.
    fn attend_with_sinks(
        &self,
        [q, k, v]: [&Var<R>; 3],
        options: SdpaOptions<'_, Var<R>>,
        segments: Option<&Var<R>>,
        sinks: &Param<R>,
    ) -> Result<Var<R>> {
        if self.context.ranks() > 1 || options.softcap.is_some() || self.has_scores() {
            let why = "sinks are computed for whole sequences, without a soft cap and a program of scores: leave \
                       sequences uncut";
            return Err(Error::unsupported("attention", why));
        }
        let first = |x: &Var<R>| x.pad(&[(0, 0), (0, 0), (1, 0), (0, 0)], 0.0);
        let (k, v) = (first(k)?, first(v)?);
        let own = segments.map(|segments| same_segment(segments, segments)).transpose()?;
        // As numbers, which can be padded.
        let seen = own.as_ref().or(options.mask).map(|mask| {
            let columns = mask.broadcast_to(mask.spec().shape.with(mask.dims().len() - 1, k.dims()[2] - 1))?;
            let pads: Vec<_> = (1..mask.dims().len()).map(|_| (0, 0)).chain([(1, 0)]).collect();
            columns.to_dtype(DType::F32)?.pad(&pads, 1.0)?.ne(0.0)
        });
        let seen = seen.transpose()?;
        let sinks = sinks.var().reshape([q.dims()[1], 1, 1])?;
        let args: Vec<&Var<R>> = [&sinks].into_iter().chain(&seen).collect();
        let before = options.window.0.and_then(|keys| i64::try_from(keys).ok());
        let program = AttentionProgram::over(args.len())
            .score(|score, at, args| at.key.eq(0).select(args[0].cast_like(score), score))
            .mask(|at, args| {
                let seen = at.key.le(at.query);
                let seen = before.map_or(seen, |before| seen & (at.query - at.key).le(before));
                at.key.eq(0) | args.get(1).map_or(seen, |given| seen & *given)
            })
            .scale(options.scale.unwrap_or(1.0 / (self.config.head_dim as f64).sqrt()))
            // Queries are at the last positions of the keys.
            .shifted(0, 0, first_query(q, &k)?, 0);
        self.context.attend(&program, [q, &k, &v], &args)
    }

    /// The queries, keys and values of this rank's heads, from the output of the one projection.
    fn parts(&self, x: &Var<R>) -> Result<[Var<R>; 3]> {
        let (width, [h, g]) = (x.dims().last().copied().unwrap_or(0), [self.config.heads, self.config.kv_heads]);
        let [q, k] = [h, g].map(|heads| width * heads / (h + 2 * g));
        Ok([x.narrow(-1, 0, q)?, x.narrow(-1, q, k)?, x.narrow(-1, q + k, k)?])
    }

    /// Tells whether the layer was given a program of scores ([`set_scores`](crate::parallel::set_scores)).
    pub fn has_scores(&self) -> bool {
        self.context.scores().is_some()
    }

    /// The layer whose outputs begin with queries.
    fn queries(&self) -> Option<&Linear<R>> {
        match &self.qkv {
            QkvProjection::Fused(one) => Some(one),
            QkvProjection::Separate(three) => Some(&three[0]),
            QkvProjection::Latent(latent) => latent.q_proj.as_ref().or(latent.q_b_proj.as_ref()),
        }
    }

    /// Returns an error unless gradients of the head norms are summed over ranks exactly where ranks have different
    /// heads.
    fn check_head_norms(&self) -> Result<()> {
        let Some(queries) = self.queries() else { return Ok(()) };
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

    /// Normalizes all heads of a token together. Where ranks have some of them, mean squares are summed over ranks, or
    /// heads gathered if sums are whole.
    fn normalized_together(&self, x: Var<R>, norm: &RmsNorm<R>, which: usize) -> Result<Var<R>> {
        let placed = match &self.qkv {
            QkvProjection::Separate(three) if three[which].is_column() => three[which].weight.placed(),
            _ => None,
        };
        let Some(placed) = placed else { return norm.forward(&x) };
        let (own, all) = (placed.placement().ranges(0)[0].clone(), placed.placement().logical()[0]);
        if placed.has_whole_sums() {
            return norm.forward(&placed.all_channels(&x)?)?.narrow(-1, own.start, own.len());
        }
        let wide = x.to_dtype(x.dtype().compute())?;
        // Several ranks may have one head. The sum is equal on all ranks, and each uses it for its own heads.
        let squares = placed.exchange(Exchange::AllReduce, &wide.square()?.sum_keepdim(&[-1])?)?;
        let mean = placed.exchange(Exchange::Copy, &squares)?.div((all * placed.replicas()) as f64)?;
        let rstd = mean.add(norm.eps.unwrap_or(x.dtype().epsilon()))?.rsqrt()?;
        let weight = norm.weight.var().narrow(0, own.start, own.len())?.to_dtype(wide.dtype())?;
        wide.mul(&rstd)?.mul(&weight.add(norm.offset)?)?.to_dtype(x.dtype())
    }
}

/// Sinks of `heads` heads, at first 0.
fn sinks<R: Runtime>(init: &Init<R>, heads: usize) -> Result<Param<R>> {
    Ok(init.param([heads], Initializer::Zeros)?.with_cuts(Cuts::Bias(RowCut::of_heads(heads))))
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
