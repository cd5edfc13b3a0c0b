//! Attention and rotary embeddings.

use numcore::{
    DType, Tensor,
    fused::{NnOps, SdpaOptions},
    ops::{IndexOps, MatmulOps, PadMode, PadOps, PointwiseOps, RepeatOps, ViewOps, cat},
};

use super::one;
use crate::{
    call::{Call, dtype},
    file::Answer,
    graph::T,
};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "Attention" => attention(c),
        "RotaryEmbedding" => rotary(c),
        _ => Ok(None),
    }
}

/// `[B, T, H·D]` as `[B, H, T, D]`.
pub fn heads(x: &T, count: usize) -> numcore::Result<T> {
    let (b, t, width) = (x.dims()[0], x.dims()[1], x.dims()[2]);
    x.reshape([b, t, count, width / count])?.transpose(1, 2)
}

/// `[B, H, T, D]` as `[B, T, H·D]`.
pub fn merged(x: &T) -> numcore::Result<T> {
    let (b, h, t, d) = (x.dims()[0], x.dims()[1], x.dims()[2], x.dims()[3]);
    x.transpose(1, 2)?.reshape([b, t, h * d])
}

fn attention(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let flat = c.x(0)?.dims().len() == 3;
    let part = |i: usize, name: &str| -> Answer<T> {
        let x = c.x(i)?;
        Ok(if flat { heads(x, c.int(name, 1) as usize)? } else { x.clone() })
    };
    let (q, mut k, mut v) = (part(0, "q_num_heads")?, part(1, "kv_num_heads")?, part(2, "kv_num_heads")?);
    if let (Some(keys), Some(values)) = (c.opt(4), c.opt(5)) {
        k = cat(&[keys, &k], 2)?;
        v = cat(&[values, &v], 2)?;
    }
    let scale = c.float("scale", 1.0 / (q.dims()[3] as f64).sqrt());
    // What the fused operation has is asked of it; scores are only in the composition.
    let plain = c.outputs() < 4 && c.opt(4).is_none() && c.opt(6).is_none() && !c.has("softmax_precision");
    let y = if plain {
        let window = |name: &str| usize::try_from(c.int(name, -1)).ok();
        let mask = c.opt(3).map(|m| padded(m, k.dims()[2])).transpose()?;
        let softcap = Some(c.float("softcap", 0.0)).filter(|&cap| cap > 0.0);
        let options = SdpaOptions {
            mask: mask.as_ref(),
            causal: c.int("is_causal", 0) == 1,
            window: (window("left_window_size"), window("right_window_size")),
            lower_right: false,
            scale: Some(scale),
            softcap,
        };
        vec![q.attention_with(&k, &v, options)?]
    } else {
        composed(c, &q, &k, &v, scale)?
    };
    let y0 = if flat { merged(&y[0])? } else { y[0].clone() };
    Ok(Some([vec![y0, k, v], y[1..].to_vec()].concat()))
}

/// A mask that is shorter than the keys hides the rest of them.
fn padded(mask: &T, keys: usize) -> numcore::Result<T> {
    let rank = mask.dims().len();
    let missing = keys.saturating_sub(mask.dims()[rank - 1]);
    if missing == 0 || mask.dims()[rank - 1] == 1 {
        return Ok(mask.clone());
    }
    let mut pads = vec![(0, 0); rank];
    pads[rank - 1].1 = missing as isize;
    let hidden = if mask.dtype() == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
    mask.pad_with(&pads, PadMode::Constant(hidden))
}

/// The output, and the scores as far as `qk_matmul_output_mode` says.
fn composed(c: &Call<'_>, q: &T, k: &T, v: &T, scale: f64) -> Answer<Vec<T>> {
    let groups = q.dims()[1] / k.dims()[1];
    let (k, v) = (k.repeat_interleave(groups, 1)?, v.repeat_interleave(groups, 1)?);
    let root = scale.sqrt();
    let mut scores = q.mul(root)?.matmul(&k.mul(root)?.t()?)?;
    let cap = c.float("softcap", 0.0);
    if cap > 0.0 {
        scores = scores.div(cap)?.tanh()?.mul(cap)?;
    }
    let mut shown = scores.clone();
    if let Some(mask) = c.opt(3) {
        let mask = padded(mask, k.dims()[2])?;
        scores = match mask.dtype() {
            DType::Bool => scores.masked_fill(&mask.logical_not()?, f64::NEG_INFINITY)?,
            _ => scores.add(&mask)?,
        };
    }
    for hidden in hidden(c, q.dims()[2], k.dims()[2])? {
        scores = scores.masked_fill(&hidden, f64::NEG_INFINITY)?;
    }
    let mode = c.int("qk_matmul_output_mode", 0);
    if mode == 2 {
        shown = scores.clone();
    }
    let precision = if c.has("softmax_precision") { dtype(c.int("softmax_precision", 1))? } else { q.dtype() };
    let probabilities = scores.to_dtype(precision)?.softmax(-1)?.to_dtype(q.dtype())?;
    if mode == 3 {
        shown = probabilities.clone();
    }
    Ok(vec![probabilities.matmul(&v)?, shown])
}

/// Masks of keys that queries may not see, each broadcast to `[B, H, T, S]`.
fn hidden(c: &Call<'_>, queries: usize, keys: usize) -> Answer<Vec<T>> {
    let numbers = |n: usize| Tensor::arange(c.cpu(), 0i64, 1i64, n, DType::I64);
    let (i, j) = (numbers(queries)?.reshape([queries, 1])?, numbers(keys)?);
    let per_batch = |x: &T| x.to_dtype(DType::I64)?.reshape([x.shape().numel(), 1, 1, 1]);
    let at = match (c.opt(4), c.opt(6)) {
        (Some(past), _) => i.add(past.dims()[2] as f64)?,
        (None, Some(lens)) => per_batch(lens)?.sub(queries as f64)?.add(&i)?,
        _ => i,
    };
    let mut found = Vec::new();
    if c.int("is_causal", 0) == 1 {
        found.push(j.gt(&at)?);
    }
    let (left, right) = (c.int("left_window_size", -1), c.int("right_window_size", -1));
    if left >= 0 {
        found.push(j.lt(&at.sub(left as f64)?)?);
    }
    if right >= 0 {
        found.push(j.gt(&at.add(right as f64)?)?);
    }
    if let Some(lens) = c.opt(6) {
        found.push(j.ge(&per_batch(lens)?)?);
    }
    Ok(found)
}

/// Attention whose scores and probabilities two graphs may change.
pub fn flex(
    c: &Call<'_>,
    of_scores: impl Fn(T) -> Answer<T>,
    of_probabilities: impl Fn(T) -> Answer<T>,
) -> Answer<Vec<T>> {
    let (q, k, v) = (c.x(0)?, c.x(1)?, c.x(2)?);
    let groups = q.dims()[1] / k.dims()[1];
    let (k, v) = (k.repeat_interleave(groups, 1)?, v.repeat_interleave(groups, 1)?);
    let scale = c.float("scale", 1.0 / (q.dims()[3] as f64).sqrt());
    let precision = if c.has("softmax_precision") { dtype(c.int("softmax_precision", 1))? } else { q.dtype() };
    let precision = if precision.is_half() { DType::F32 } else { precision };
    let wide = |x: &T| x.to_dtype(precision);
    let scores = of_scores(wide(q)?.matmul(&wide(&k)?.t()?)?.mul(scale)?)?;
    let probabilities = of_probabilities(scores.softmax(-1)?)?;
    Ok(vec![probabilities.matmul(&wide(&v)?)?.to_dtype(q.dtype())?])
}

fn rotary(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let flat = x.dims().len() == 3;
    let split = if flat { heads(x, c.int("num_heads", 1) as usize)? } else { x.clone() };
    let table = |i: usize| -> Answer<T> {
        let table = c.x(i)?;
        let Some(positions) = c.opt(3) else { return Ok(table.unsqueeze(1)?) };
        Ok(table.embedding(&positions.to_dtype(DType::I64)?)?.unsqueeze(1)?)
    };
    let y = split.rotate(&table(1)?, &table(2)?, c.int("interleaved", 0) == 1)?;
    one(if flat { merged(&y) } else { Ok(y) })
}
