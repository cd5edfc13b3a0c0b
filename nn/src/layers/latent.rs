//! The projections of multi-head latent attention: keys and values of all heads from one narrow vector.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, ViewOps, cat},
};

use super::{GroupedQueryConfig, Linear, RmsNorm, RotaryTables, attention::check_cut_alike};
use crate::{
    Forward, Init, Module,
    parallel::{CutLayer, Cuts, RowCut, SharedInput},
};

/// The sizes of a [`LatentProjection`] (DeepSeek-AI 2024). A head of queries and keys is `D = N + R` wide. Of it, `N`
/// components come from the latent vector, and `R` rotated ones are shared by the keys of all heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// The width of the latent vector of queries; a single projection if `None`.
    pub query_rank: Option<usize>,
    /// The width of the latent vector of keys and values, `L`.
    pub rank: usize,
    /// The number of rotated components of a head, `R`.
    pub rotated: usize,
    /// The width of a head of values, `E`.
    pub value: usize,
    /// The constant added to mean squares in the norms of latent vectors.
    pub eps: f64,
}

/// The projections of `x: [B, T, C]` to queries and keys `[B, H, T, D]` and values `[B, H, T, E]` through latent
/// vectors.
#[derive(Debug, Module)]
pub struct LatentProjection<R: Runtime> {
    /// The projection to queries, if they have no latent vector.
    pub q_proj: Option<Linear<R>>,
    /// The projection to the latent vector of queries.
    pub q_a_proj: Option<Linear<R>>,
    /// The norm of the latent vector of queries.
    pub q_a_norm: Option<RmsNorm<R>>,
    /// The projection of the latent vector to queries.
    pub q_b_proj: Option<Linear<R>>,
    /// The projection to the latent vector of keys and values, with the rotated part of keys: `[L + R, C]`.
    pub kv_a_proj: Linear<R>,
    /// The norm of the latent vector of keys and values.
    pub kv_a_norm: RmsNorm<R>,
    /// The projection of the latent vector to the other part of keys and to values, `[H · (N + E), L]`.
    pub kv_b_proj: Linear<R>,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    config: LatentConfig,
}

impl<R: Runtime> LatentProjection<R> {
    #[track_caller]
    pub(super) fn new(init: &Init<R>, of: &GroupedQueryConfig, config: LatentConfig) -> Result<Self> {
        let GroupedQueryConfig { width, heads, kv_heads, head_dim, bias, .. } = *of;
        let LatentConfig { query_rank, rank, rotated, value, eps } = config;
        let wrong = |field, why: String| Err(Error::config("attention", field, why));
        if kv_heads != heads {
            return wrong("kv_heads", format!("a latent vector gives keys to all {heads} heads, not to {kv_heads}"));
        }
        if rotated > head_dim || value == 0 || rank == 0 || query_rank == Some(0) {
            return wrong("latent", format!("{config:?} does not fit heads of width {head_dim}"));
        }
        let plain = |inputs, outputs| Ok::<_, Error>(Linear::new(init, inputs, outputs)?.with_bias_if(bias));
        let of_heads = |inputs, each: usize| {
            let linear = Linear::new(init, inputs, heads * each)?.without_bias();
            Ok::<_, Error>(linear.with_cuts(Cuts::Weight(RowCut::of_heads(heads))))
        };
        let norm = |width| Ok::<_, Error>(RmsNorm { eps: Some(eps), ..RmsNorm::new(init, width)? });
        Ok(LatentProjection {
            q_proj: query_rank.is_none().then(|| of_heads(width, head_dim)).transpose()?,
            q_a_proj: query_rank.map(|rank| plain(width, rank)).transpose()?,
            q_a_norm: query_rank.map(norm).transpose()?,
            q_b_proj: query_rank.map(|rank| of_heads(rank, head_dim)).transpose()?,
            kv_a_proj: plain(width, rank + rotated)?,
            kv_a_norm: norm(rank)?,
            kv_b_proj: of_heads(rank, head_dim - rotated + value)?,
            head_dim,
            config,
        })
    }

    #[track_caller]
    pub(super) fn project(&self, x: &Var<R>, rotary: Option<&RotaryTables<R>>) -> Result<[Var<R>; 3]> {
        let LatentConfig { rank, rotated, value, .. } = self.config;
        let plain = self.head_dim - rotated;
        let turn = |x: &Var<R>| rotary.map_or(Ok(x.clone()), |tables| tables.rotate(x));
        let q = heads(&self.queries(x)?, self.head_dim)?;
        let q = cat(&[&q.narrow(-1, 0, plain)?, &turn(&q.narrow(-1, plain, rotated)?)?], -1)?;
        let latent = self.kv_a_proj.forward(x).within("kv_a_proj")?;
        let kv = self.kv_a_norm.forward(&latent.narrow(-1, 0, rank)?).within("kv_a_norm")?;
        let kv = heads(&self.kv_b_proj.forward(&kv).within("kv_b_proj")?, plain + value)?;
        // Each rank's heads use the shared part, so its gradient is summed over ranks as that of the latent vector is.
        let shared = turn(&heads(&self.kv_b_proj.enter(&latent.narrow(-1, rank, rotated)?)?, rotated)?)?;
        let shared = shared.broadcast_to(kv.spec().shape.with(3, rotated))?;
        let k = cat(&[&kv.narrow(-1, 0, plain)?, &shared], -1)?;
        Ok([q, k, kv.narrow(-1, plain, value)?])
    }

    fn queries(&self, x: &Var<R>) -> Result<Var<R>> {
        let last = self.q_proj.as_ref().or(self.q_b_proj.as_ref()).unwrap_or(&self.kv_b_proj);
        check_cut_alike([last, &self.kv_b_proj, &self.kv_b_proj])?;
        match (&self.q_proj, &self.q_a_proj, &self.q_a_norm, &self.q_b_proj) {
            (Some(one), ..) => one.forward(x).within("q_proj"),
            (None, Some(a), Some(norm), Some(b)) => {
                let latent = norm.forward(&a.forward(x).within("q_a_proj")?).within("q_a_norm")?;
                b.forward(&latent).within("q_b_proj")
            }
            _ => {
                Err(Error::state("attention", "has neither `q_proj` nor all of `q_a_proj`, `q_a_norm` and `q_b_proj`"))
            }
        }
    }
}

/// Reshapes `[B, T, H · D]` to `[B, H, T, D]`.
#[track_caller]
fn heads<R: Runtime>(x: &Var<R>, width: usize) -> Result<Var<R>> {
    let shape = x.spec().shape;
    let &[b, t, c] = &shape[..] else {
        return Err(Error::shape("attention", &[shape], "needs [B, T, C]"));
    };
    x.reshape([b, t, c / width.max(1), width])?.transpose(1, 2)
}
