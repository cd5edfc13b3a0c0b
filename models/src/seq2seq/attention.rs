//! Attention of one sequence to itself, or to another.

use autograd::Var;
use nn::{
    Init, Linear, Module, Param, check_cut_alike,
    parallel::{ContextSlot, CutLayer, Cuts, RowCut},
};
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    fused::{AttentionProgram, NnOps, SdpaOptions},
    ops::{Apply, IndexOps, ViewOps},
};

use super::{LayerStackConfig, RelativeConfig};

/// Multi-head attention of `x: [B, T, C]` to keys and values of `[B, S, C]`, which may come from `x` itself.
#[derive(Debug, Module)]
pub struct StackAttention<R: Runtime> {
    /// The projection to queries, `[H · D, C]`.
    pub q_proj: Linear<R>,
    /// The projection to keys.
    pub k_proj: Linear<R>,
    /// The projection to values.
    pub v_proj: Linear<R>,
    /// The output projection, applied to the concatenated heads.
    pub o_proj: Linear<R>,
    context: ContextSlot<R>,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    scale: Option<f64>,
}

/// The keys that queries see, and what is added to their scores.
pub(super) struct SeenKeys<'a, R: Runtime> {
    /// The number of keys before the first query's own, if queries see no later keys than their own.
    pub causal: Option<usize>,
    /// The keys that are no padding, `[B, 1, 1, S]`, `bool`.
    pub mask: Option<&'a Var<R>>,
    /// The numbers that are added to scores, `[1, H, T, S]`.
    pub bias: Option<&'a Var<R>>,
}

impl<R: Runtime> StackAttention<R> {
    pub(super) fn new(init: &Init<R>, config: &LayerStackConfig) -> Result<Self> {
        let LayerStackConfig { width, heads, head_dim, bias, key_bias, scale, .. } = *config;
        let linear = |has_bias: bool| {
            let linear = Linear::new(init, width, heads * head_dim)?.with_bias_if(has_bias);
            Ok::<_, Error>(linear.with_cuts(Cuts::Weight(RowCut::of_heads(heads))))
        };
        Ok(StackAttention {
            q_proj: linear(bias)?,
            k_proj: linear(key_bias)?,
            v_proj: linear(bias)?,
            o_proj: Linear::new(init, heads * head_dim, width)?.with_bias_if(bias),
            context: ContextSlot::refuses(),
            head_dim,
            scale,
        })
    }

    /// The keys and values of `x: [B, S, C]`, `[B, H, S, D]` each.
    pub(super) fn keys_values(&self, x: &Var<R>) -> Result<[Var<R>; 2]> {
        check_cut_alike([&self.q_proj, &self.k_proj, &self.v_proj])?;
        let keys = self.heads(&self.k_proj.forward_onto(x, None::<&Var<R>>).within("k_proj")?)?;
        Ok([keys, self.heads(&self.v_proj.forward_onto(x, None::<&Var<R>>).within("v_proj")?)?])
    }

    /// The output, plus `residual`.
    pub(super) fn attend(
        &self,
        x: &Var<R>,
        [k, v]: &[Var<R>; 2],
        seen: &SeenKeys<'_, R>,
        residual: &Var<R>,
    ) -> Result<Var<R>> {
        let q = self.heads(&self.q_proj.forward_onto(x, None::<&Var<R>>).within("q_proj")?)?;
        let (mask, causal) = (seen.mask, seen.causal);
        let found = match seen.bias {
            None => {
                let causal = causal.is_some();
                q.attention_with(
                    k,
                    v,
                    SdpaOptions { mask, causal, lower_right: true, scale: self.scale, ..Default::default() },
                )?
            }
            Some(bias) => {
                let (here, heads) = (bias.dims()[1], q.dims()[1]);
                if here != heads {
                    let why = format!(
                        "{here} heads have biases of distances here, and {heads} have queries: cut `relative` by `row` \
                         where queries are cut by `column`"
                    );
                    return Err(Error::config("attention", "TensorPlan", why));
                }
                let args: Vec<&Var<R>> = [bias].into_iter().chain(mask).collect();
                let scale = self.scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt());
                let program = AttentionProgram::over(args.len())
                    .score(|score, _, args| score + args[0].cast_like(score))
                    .scale(scale);
                let program = match (causal, mask.is_some()) {
                    (None, false) => program,
                    (None, true) => program.mask(|_, args| args[1]),
                    (Some(_), false) => program.mask(|at, _| at.key.le(at.query)),
                    (Some(_), true) => program.mask(|at, args| at.key.le(at.query) & args[1]),
                };
                program.shifted(0, 0, causal.unwrap_or(0), 0).attend(&q, k, v, &args)?
            }
        };
        let found = found.transpose(1, 2)?.flatten(2, 3)?;
        self.o_proj.forward_onto(&found, residual).within("o_proj")
    }

    /// Reshapes `[B, T, H · D]` to `[B, H, T, D]`.
    fn heads(&self, x: &Var<R>) -> Result<Var<R>> {
        let shape = x.spec().shape;
        let &[b, t, c] = &shape[..] else {
            return Err(Error::shape("attention", &[shape], "needs [B, T, C]"));
        };
        x.reshape([b, t, c / self.head_dim.max(1), self.head_dim])?.transpose(1, 2)
    }
}

/// The bias of scores by the distance of key and query (Raffel et al. 2020). Near distances have a bucket of their own;
/// farther ones share buckets that grow with the logarithm.
#[derive(Debug, Module)]
pub struct RelativeBias<R: Runtime> {
    /// The bias of each bucket and head, `[N, H]`. A plan cuts its heads by `row`.
    pub weight: Param<R>,
    /// True if keys after the query have no buckets.
    causal: bool,
    /// The distance from which on all share the last bucket.
    distance: usize,
}

impl<R: Runtime> RelativeBias<R> {
    pub(super) fn new(init: &Init<R>, relative: RelativeConfig, heads: usize, causal: bool) -> Result<Self> {
        let weight = init.weight([relative.buckets, heads], nn::Initializer::Normal { mean: 0.0, std: 0.02 })?;
        // One piece of rows: buckets are not cut.
        let weight = weight.with_cuts(Cuts::Weight(RowCut::of_heads(1)));
        Ok(RelativeBias { weight, causal, distance: relative.distance })
    }

    /// The bias `[1, H, T, S]` of `T` queries, the last of `S` positions.
    pub(super) fn of(&self, queries: usize, keys: usize) -> Result<Var<R>> {
        let buckets = self.weight.shape()[0];
        let bucket = |i: usize| {
            let (query, key) = (i / keys.max(1) + keys - queries, i % keys.max(1));
            bucket(key as i64 - query as i64, buckets, self.distance, self.causal) as i64
        };
        let places: Vec<i64> = (0..queries * keys).map(bucket).collect();
        let places = Tensor::from_slice(self.weight.leaf().runtime(), [queries, keys], &places)?;
        self.weight.var().embedding(&Var::new(places))?.permute(&[2, 0, 1])?.unsqueeze(0)
    }
}

/// The bucket of a key that comes `distance` positions after the query, of `buckets`. Without causality, the second
/// half is of keys after the query. Logarithms are in `f32`, as in transformers.
fn bucket(distance: i64, mut buckets: usize, most: usize, causal: bool) -> usize {
    let (mut first, back) = (0, (-distance).max(0) as usize);
    let far = if causal { back } else { distance.unsigned_abs() as usize };
    if !causal {
        buckets /= 2;
        first = if distance > 0 { buckets } else { 0 };
    }
    let exact = buckets / 2;
    if far < exact {
        return first + far;
    }
    let scale = (most as f64 / exact as f64).ln() as f32;
    let beyond = (far as f32 / exact as f32).ln() / scale * (buckets - exact) as f32;
    first + (exact + beyond as usize).min(buckets - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `T5Attention._relative_position_bucket` of transformers 5.24, for 32 buckets up to a distance of 128.
    #[test]
    fn buckets_are_those_of_transformers() {
        for (distance, due) in [
            (-400, [15, 31]),
            (-128, [15, 31]),
            (-127, [15, 31]),
            (-113, [15, 31]),
            (-91, [15, 29]),
            (-90, [14, 29]),
            (-64, [14, 26]),
            (-63, [13, 26]),
            (-46, [13, 24]),
            (-32, [12, 21]),
            (-31, [11, 21]),
            (-23, [11, 18]),
            (-17, [10, 16]),
            (-16, [10, 16]),
            (-15, [9, 15]),
            (-12, [9, 12]),
            (-11, [8, 11]),
            (-8, [8, 8]),
            (-7, [7, 7]),
            (-1, [1, 1]),
            (0, [0, 0]),
            (1, [17, 0]),
            (7, [23, 0]),
            (8, [24, 0]),
            (9, [24, 0]),
            (11, [24, 0]),
            (12, [25, 0]),
            (15, [25, 0]),
            (16, [26, 0]),
            (22, [26, 0]),
            (23, [27, 0]),
            (31, [27, 0]),
            (32, [28, 0]),
            (45, [28, 0]),
            (46, [29, 0]),
            (63, [29, 0]),
            (64, [30, 0]),
            (90, [30, 0]),
            (91, [31, 0]),
            (127, [31, 0]),
            (128, [31, 0]),
            (300, [31, 0]),
        ] {
            assert_eq!([false, true].map(|causal| bucket(distance, 32, 128, causal)), due, "{distance}");
        }
    }
}
