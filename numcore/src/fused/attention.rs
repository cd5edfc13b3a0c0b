//! Scaled dot-product attention (Vaswani et al. 2017), computed block by block where a runtime has a kernel (Dao 2023).

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::{SmallVec, smallvec};

use super::{Fused, Softmax, as_forward};
use crate::{
    DType, Error, Result, Shape, Tensor,
    ops::{
        Apply, Backprop, Bits, Matmul, MatmulOps, Outs, PointwiseOps, ReduceOps, Saves, Spec, Specs, ViewOps,
        rule::no_gradient,
    },
    pointwise::Program,
};

/// Scaled dot-product attention, `softmax(q·kᵀ·scale + mask) · v`, with scores optionally bounded by a soft cap before
/// the mask.
///
/// Inputs are `q: [B, H, T, D]`, `k: [B, K, S, D]` and `v: [B, K, S, E]`, where `K` divides `H` (grouped heads share
/// keys). If `masked`, an additive mask that broadcasts to `[B, H, T, S]` follows. Outputs are `o: [B, H, T, E]` and
/// the scores' logsumexp `[B, H, T]`. A query that may attend to no key gives zeros.
///
/// Half-precision values are computed in `f32`. A kernel may round probabilities, and in backward the gradients of
/// scores, to the half type where they are operands of a matmul. Accumulation stays in `f32`.
///
/// The axes of `o` are stored in the order of `q`'s axes, if the runtime [supports
/// it](crate::Runtime::supports_strided_outputs). Heads that were split by a view are then merged by a view.
#[derive(Clone, Debug)]
pub struct Attention {
    /// True if a query sees no key after its own position; it overrides `window[1]` with 0.
    pub causal: bool,
    /// The numbers of keys before and after its own position that a query sees (sliding-window attention, Beltagy et
    /// al. 2020); `None` means all.
    pub window: [Option<usize>; 2],
    /// True if query `t` of `T` is at position `t + S − T` of the keys instead of `t`: for queries after a KV cache.
    pub lower_right: bool,
    /// The factor of the scores, usually `1/√D`.
    pub scale: f64,
    /// The soft cap `c`: scaled scores become `c · tanh(score / c)` (Gemma 2, 2024) before the mask.
    pub softcap: Option<f64>,
    /// True if an additive mask is given.
    pub masked: bool,
    /// True if the keys are only a part of all keys, and the caller that merges the parts differentiates them. Then
    /// [`AttentionGrad`] gets `o` and `lse` of all keys, and returns the gradients due to the given keys.
    pub partial: bool,
}

impl Attention {
    /// Position of `q` among the inputs.
    pub const QUERIES: usize = 0;
    /// Position of `k` among the inputs.
    pub const KEYS: usize = 1;
    /// Position of `v` among the inputs.
    pub const VALUES: usize = 2;
    /// Position of the mask among the inputs, if given.
    pub const MASK: usize = 3;
    /// Position of `o` among the outputs.
    pub const OUTPUT: usize = 0;
    /// Position of the scores' logsumexp among the outputs.
    pub const LSE: usize = 1;

    /// Attention with scores multiplied by `scale`, without a mask; every query sees every key.
    pub fn new(scale: f64) -> Self {
        Attention {
            causal: false,
            window: [None, None],
            lower_right: false,
            scale,
            softcap: None,
            masked: false,
            partial: false,
        }
    }

    /// Tells whether the call uses only a scale, an additive mask, and a causal mask. Every kernel has these options,
    /// some for queries counted from the first key alone.
    pub fn is_plain(&self) -> bool {
        self.window == [None, None] && self.softcap.is_none()
    }

    /// The position of query 0 of `queries` among `keys`.
    pub fn offset(&self, queries: usize, keys: usize) -> isize {
        if self.lower_right { keys as isize - queries as isize } else { 0 }
    }

    /// The number of keys after its own position that a query sees; `None` means all.
    pub fn right(&self) -> Option<usize> {
        if self.causal { Some(0) } else { self.window[1] }
    }
}

/// Options of [`NnOps::attention_with`](super::NnOps::attention_with), scaled dot-product attention.
#[derive(Debug)]
pub struct SdpaOptions<'a, T> {
    /// A mask that broadcasts to `[B, H, T, S]`: floats are added to the scores, `bool` is true where a query may
    /// attend.
    pub mask: Option<&'a T>,
    /// True if a query sees no key after its own position.
    pub causal: bool,
    /// The numbers `(left, right)` of keys before and after its own position that a query sees; `None` means all.
    pub window: (Option<usize>, Option<usize>),
    /// True if query `t` of `T` is at position `t + S − T` of the keys instead of `t`, for `causal` and `window`.
    /// Queries after a KV cache are.
    pub lower_right: bool,
    /// The factor of the scores; `1/√D` if not given.
    pub scale: Option<f64>,
    /// The soft cap `c`: scaled scores become `c · tanh(score / c)` before the mask.
    pub softcap: Option<f64>,
}

impl<T> Default for SdpaOptions<'_, T> {
    fn default() -> Self {
        SdpaOptions { mask: None, causal: false, window: (None, None), lower_right: false, scale: None, softcap: None }
    }
}

/// Converts a `bool` mask to an additive mask of `like`'s dtype.
pub(super) fn additive<T: Apply>(like: &T, mask: &T) -> Result<T> {
    if mask.spec().dtype != DType::Bool {
        return Ok(mask.clone());
    }
    let zero = T::constant(Tensor::zeros(like.runtime(), [], like.spec().dtype)?);
    zero.masked_fill(&mask.logical_not()?, f64::NEG_INFINITY)
}

/// The sizes of a call: batch, query heads, key heads, queries, keys.
pub(super) struct HeadSizes {
    b: usize,
    h: usize,
    kv: usize,
    pub(super) t: usize,
    pub(super) s: usize,
}

impl HeadSizes {
    pub(super) fn of(q: Shape, k: Shape) -> HeadSizes {
        HeadSizes { b: q[0], h: q[1], kv: k[1], t: q[2], s: k[2] }
    }

    /// Reshapes `[B, H, T, X]` to `[B, K, H/K · T, X]`: the queries of heads that share keys are stacked along the
    /// rows.
    pub(super) fn grouped<T: Apply>(&self, x: &T) -> Result<T> {
        x.reshape([self.b, self.kv, self.h / self.kv.max(1) * self.t, x.spec().shape[3]])
    }

    pub(super) fn ungrouped<T: Apply>(&self, x: &T) -> Result<T> {
        x.reshape([self.b, self.h, self.t, x.spec().shape[3]])
    }
}

/// The products `q · kᵀ` of queries `[B, H, T, D]` and keys `[B, K, S, D]`: `[B, H, T, S]`.
#[track_caller]
pub(super) fn raw_scores<T: Apply>(q: &T, k: &T) -> Result<T> {
    let sizes = HeadSizes::of(q.spec().shape, k.spec().shape);
    sizes.ungrouped(&T::apply1(Matmul, &[&sizes.grouped(q)?, &k.t()?])?)
}

/// The sums of values `[B, K, S, E]` with weights `p: [B, H, T, S]`: `[B, H, T, E]`.
#[track_caller]
pub(super) fn weighted<T: Apply>(p: &T, k: &T, v: &T) -> Result<T> {
    let sizes = HeadSizes::of(p.spec().shape, k.spec().shape);
    sizes.ungrouped(&T::apply1(Matmul, &[&sizes.grouped(p)?, v])?)
}

impl Attention {
    /// The scores `[B, H, T, S]`, scaled, capped and masked, and the derivative of the soft cap if there is one.
    fn scores<T: Apply>(&self, q: &T, k: &T, mask: Option<&T>) -> Result<(T, Option<T>)> {
        static SLOPE: LazyLock<Program> = LazyLock::new(|| Program::new("softcap", |[t], []| [1.0 - t * t]));
        let mut scores = raw_scores(q, k)?.mul(self.scale)?;
        let mut slope = None;
        if let Some(cap) = self.softcap {
            let tanh = scores.div(cap)?.tanh()?;
            slope = Some(tanh.apply_program(&SLOPE, &[], &[])?);
            scores = tanh.mul(cap)?;
        }
        if let Some(mask) = mask {
            scores = scores.add(mask)?;
        }
        Ok((self.hide(&scores, f64::NEG_INFINITY)?, slope))
    }

    /// Values of scores `[B, H, T, S]`, `instead` where a query does not see a key by its position.
    pub(super) fn hide<T: Apply>(&self, scores: &T, instead: f64) -> Result<T> {
        // Masks, in every matrix of T rows and S columns, the elements more than `left` before or `right` after the
        // diagonal, which starts at `offset`.
        static BAND: LazyLock<Program> = LazyLock::new(|| {
            Program::build("band", 1, 6, |b, x, s| {
                let at = b.index().cast(DType::I64);
                let (row, column) = ((at / s[1]) % s[0], at % s[1]);
                let ahead = column - row - s[2];
                vec![(ahead.le(s[4]) & ahead.ge(-s[3])).select(x[0], s[5])]
            })
        });
        let reach = [self.window[0], self.right()];
        if reach == [None, None] {
            return Ok(scores.clone());
        }
        let (queries, keys) = (scores.spec().shape[2], scores.spec().shape[3]);
        let (t, s) = (queries as i64, keys as i64);
        let [left, right] = reach.map(|n| n.map_or(t + s, |n| n.min(queries + keys) as i64));
        let offset = self.offset(queries, keys) as i64;
        let numbers = [t.into(), s.into(), offset.into(), left.into(), right.into(), instead.into()];
        scores.apply_program(&BAND, &[], &numbers)
    }

    fn probabilities<T: Apply>(&self, scores: &T) -> Result<T> {
        T::apply1(Softmax { log: false }, &[scores])
    }
}

impl Fused for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = 3 + usize::from(self.masked);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let shapes: SmallVec<[Shape; 4]> = ins.iter().map(|s| s.shape).collect();
        let dtypes: SmallVec<[DType; 4]> = ins.iter().map(|s| s.dtype).collect();
        if !dtypes[0].is_float() || dtypes.iter().any(|d| *d != dtypes[0]) {
            return Err(Error::dtype(
                "attention",
                &dtypes,
                "queries, keys, values and mask must have one floating dtype",
            ));
        }
        if let Some(c) = self.softcap.filter(|c| !(*c > 0.0 && c.is_finite())) {
            return Err(Error::range("attention", "soft cap", c, "a number above 0"));
        }
        let (q, k, v) = (shapes[Attention::QUERIES], shapes[Attention::KEYS], shapes[Attention::VALUES]);
        let fits = [q, k, v].iter().all(|s| s.rank() == 4)
            && q[0] == k[0]
            && k[..3] == v[..3]
            && q[3] == k[3]
            && k[1] != 0
            && q[1] % k[1] == 0;
        if !fits {
            let why = "needs q [B, H, T, D], k [B, K, S, D], v [B, K, S, E] with H a multiple of K";
            return Err(Error::shape("attention", &shapes, why));
        }
        let scores = Shape::new(&[q[0], q[1], q[2], k[2]])?;
        if shapes.get(Attention::MASK).is_some_and(|m| m.broadcast(&scores) != Some(scores)) {
            return Err(Error::shape("attention", &shapes, format!("the mask does not broadcast to {scores}")));
        }
        let o = Spec { shape: q.with(3, v[3]), dtype: dtypes[0] };
        let lse = Spec { shape: Shape::new(&q[..3])?, dtype: dtypes[0].compute() };
        Ok(smallvec![o, lse])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (q, k, v) = (ins[Attention::QUERIES], ins[Attention::KEYS], ins[Attention::VALUES]);
        let (scores, _) = self.scores(q, k, ins.get(Attention::MASK).copied())?;
        let o = weighted(&self.probabilities(&scores)?, k, v)?;
        let lse = scores.detach().logsumexp(&[-1])?.to_dtype(q.spec().dtype.compute())?;
        Ok(smallvec![o, lse])
    }

    fn output_order_of(&self, k: usize) -> Option<usize> {
        (k == Attention::OUTPUT).then_some(Attention::QUERIES)
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        let inputs = Bits::of(if self.masked { &[0, 1, 2, 3] } else { &[0, 1, 2] });
        let outputs = Bits::of(&[Attention::OUTPUT, Attention::LSE]);
        (!wants.has(Attention::MASK)).then_some(Saves { inputs, outputs })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        if self.partial {
            return Err(no_gradient(
                "attention",
                "it is over a part of the keys: the whole that parts are merged to has the gradient",
            ));
        }
        let mut ins: SmallVec<[T; 7]> =
            smallvec![cx.grad()?, cx.output(Attention::OUTPUT)?, cx.output(Attention::LSE)?];
        for i in 0..Attention::MASK + usize::from(self.masked) {
            ins.push(cx.input(i)?);
        }
        let refs: SmallVec<[&T; 7]> = ins.iter().collect();
        cx.give_all(0, AttentionGrad(self.clone()).into(), &refs)
    }
}

/// The gradients of [`Attention`]. Inputs are the upstream gradient, `o`, `lse`, `q`, `k`, `v` and the mask if given.
/// Outputs are the gradients of `q`, `k`, `v`, each stored with the axis order of its own operand.
#[derive(Clone, Debug)]
pub struct AttentionGrad(
    /// The options of the forward operation.
    pub Attention,
);

impl AttentionGrad {
    /// Position of the upstream gradient among the inputs.
    pub const GRAD: usize = 0;
    /// Position of `o` among the inputs.
    pub const OUTPUT: usize = 1;
    /// Position of `lse` among the inputs.
    pub const LSE: usize = 2;
    /// Position of `q` among the inputs; the other inputs of [`Attention`] follow in their order.
    pub const QUERIES: usize = 3;
    /// Position of `k` among the inputs.
    pub const KEYS: usize = 4;
    /// Position of `v` among the inputs.
    pub const VALUES: usize = 5;
    /// Position of the mask among the inputs, if given.
    pub const MASK: usize = 6;
}

/// Checks the inputs of a gradient that come from forward, whose outputs are given.
pub(super) fn check_forward(op: &'static str, ins: &[Spec], outs: &[Spec]) -> Result<()> {
    let (o, lse) = (&outs[Attention::OUTPUT], &outs[Attention::LSE]);
    let gradient = ("the gradient", &ins[AttentionGrad::GRAD], o);
    as_forward(op, [gradient, ("the output", &ins[AttentionGrad::OUTPUT], o), ("lse", &ins[AttentionGrad::LSE], lse)])
}

impl Fused for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = AttentionGrad::MASK + usize::from(self.0.masked);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        check_forward(self.name(), ins, &self.0.infer(&ins[AttentionGrad::QUERIES..])?)?;
        Ok(ins[AttentionGrad::QUERIES..=AttentionGrad::VALUES].iter().copied().collect())
    }

    /// Computes, with `P` the probabilities: `dv = Pᵀ·g`, `dS = P ∘ (g·vᵀ − Σ P ∘ g·vᵀ)`, `dq = dS·k·scale`,
    /// `dk = dSᵀ·q·scale`; `dS` is multiplied by the derivative of a soft cap. For a part of the keys, `P` follows from
    /// the given `lse`, and the sum is `Σ g ∘ o`.
    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let [g, q, k, v] =
            [AttentionGrad::GRAD, AttentionGrad::QUERIES, AttentionGrad::KEYS, AttentionGrad::VALUES].map(|i| ins[i]);
        let sizes = HeadSizes::of(q.spec().shape, k.spec().shape);
        let (scores, slope) = self.0.scores(q, k, ins.get(AttentionGrad::MASK).copied())?;
        let p = match self.0.partial {
            false => self.0.probabilities(&scores)?,
            true => weights(&scores, ins[AttentionGrad::LSE])?,
        };
        let g = sizes.grouped(g)?;
        let dp = sizes.ungrouped(&T::apply1(Matmul, &[&g, &v.t()?])?)?;
        let weighed = match self.0.partial {
            false => p.mul(&dp)?,
            true => ins[AttentionGrad::GRAD].mul(ins[AttentionGrad::OUTPUT])?,
        };
        let mut ds = p.mul(&dp.sub(&weighed.sum_keepdim(&[-1])?)?)?.mul(self.0.scale)?;
        if let Some(slope) = &slope {
            ds = ds.mul(slope)?;
        }
        let (p, ds) = (sizes.grouped(&p)?, sizes.grouped(&ds)?);
        let dq = sizes.ungrouped(&T::apply1(Matmul, &[&ds, k])?)?;
        let dk = ds.t()?.matmul(&sizes.grouped(q)?)?;
        let dv = p.t()?.matmul(&g)?;
        Ok(smallvec![dq, dk, dv])
    }

    fn output_order_of(&self, k: usize) -> Option<usize> {
        Some(AttentionGrad::QUERIES + k)
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}

/// The probabilities of scores `[B, H, T, S]` whose logsumexp over all keys is `lse`; 0 where a query attends to none.
fn weights<T: Apply>(scores: &T, lse: &T) -> Result<T> {
    static WEIGHTS: LazyLock<Program> = LazyLock::new(|| {
        Program::new("attention_weights", |[s, l], []| [(s - l.ne(f64::NEG_INFINITY).select(l, 0.0)).exp()])
    });
    scores.apply_program(&WEIGHTS, &[&lse.to_dtype(scores.spec().dtype)?.unsqueeze(-1)?], &[])
}
