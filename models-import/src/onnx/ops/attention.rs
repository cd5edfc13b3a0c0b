//! Attention and rotary embeddings.

use autograd::Var;
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{NnOps, SdpaOptions},
    ops::{Apply, IndexOps, MatmulOps, PadMode, PadOps, PointwiseOps, RepeatOps, ViewOps, cat},
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const ATTENTION: &[&str] = &[
        "is_causal",
        "kv_num_heads",
        "left_window_size",
        "q_num_heads",
        "qk_matmul_output_mode",
        "right_window_size",
        "scale",
        "softcap",
        "softmax_precision",
    ];
    match op {
        "Attention" => row(ATTENTION, attention),
        "RotaryEmbedding" => row(&["interleaved", "num_heads", "rotary_embedding_dim"], rotary),
        _ => None,
    }
}

/// `[B, T, H·D]` as `[B, H, T, D]`.
pub(super) fn heads<R: Runtime>(x: &Var<R>, count: usize) -> Result<Var<R>> {
    let [b, t, width] = array("the value's shape", &x.dims())?;
    x.reshape([b, t, count, width / count.max(1)])?.transpose(1, 2)
}

/// `[B, H, T, D]` as `[B, T, H·D]`.
pub(super) fn merged<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    let [b, h, t, d] = array("the value's shape", &x.dims())?;
    x.transpose(1, 2)?.reshape([b, t, h * d])
}

/// The number of query heads for each head of keys and values, of `[B, H, T, D]`.
fn groups<R: Runtime>(q: &Var<R>, k: &Var<R>) -> Result<usize> {
    let ([_, many, ..], [_, few, ..]) =
        (array::<usize, 4>("queries", &q.dims())?, array::<usize, 4>("keys", &k.dims())?);
    many.checked_div(few).ok_or_else(|| bad("there is no head of keys"))
}

/// The scale of scores, and the type in which their softmax is computed.
fn scale<R: Runtime>(c: &NodeCall<'_, R>, q: &Var<R>) -> f64 {
    c.float("scale", 1.0 / (q.dims().last().copied().unwrap_or(1) as f64).sqrt())
}

fn precision<R: Runtime>(c: &NodeCall<'_, R>, q: &Var<R>) -> Result<DType> {
    if c.has("softmax_precision") { c.dtype("softmax_precision", 1) } else { Ok(q.dtype()) }
}

fn attention<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let flat = c.x(0)?.dims().len() == 3;
    let part = |i: usize, name: &'static str| -> Result<Var<R>> {
        let x = c.x(i)?;
        if flat { heads(x, c.size(name, 1)?) } else { Ok(x.clone()) }
    };
    let (q, mut k, mut v) = (part(0, "q_num_heads")?, part(1, "kv_num_heads")?, part(2, "kv_num_heads")?);
    if let (Some(keys), Some(values)) = (c.opt(4)?, c.opt(5)?) {
        k = cat(&[keys, &k], 2)?;
        v = cat(&[values, &v], 2)?;
    }
    groups(&q, &k)?;
    // The fused operation has no scores as an output.
    let plain = c.outputs() < 4 && c.opt(4)?.is_none() && c.opt(6)?.is_none() && !c.has("softmax_precision");
    let y = if plain {
        let window = |name: &str| usize::try_from(c.int(name, -1)).ok();
        let mask = c.opt(3)?.map(|m| padded(m, k.dims()[2])).transpose()?;
        let options = SdpaOptions {
            mask: mask.as_ref(),
            causal: c.flag("is_causal"),
            window: (window("left_window_size"), window("right_window_size")),
            lower_right: false,
            scale: Some(scale(c, &q)),
            softcap: Some(c.float("softcap", 0.0)).filter(|&cap| cap > 0.0),
        };
        vec![q.attention_with(&k, &v, options)?]
    } else {
        composed(c, &q, &k, &v)?
    };
    let first = if flat { merged(&y[0])? } else { y[0].clone() };
    Ok([&[first, k, v], &y[1..]].concat())
}

/// A mask that is shorter than the keys hides the rest of them.
fn padded<R: Runtime>(mask: &Var<R>, keys: usize) -> Result<Var<R>> {
    let mut pads = vec![(0, 0); mask.dims().len()];
    let width = mask.dims().last().copied().unwrap_or(1);
    let (Some(last), true) = (pads.last_mut(), width > 1 && width < keys) else { return Ok(mask.clone()) };
    last.1 = (keys - width) as isize;
    let hidden = if mask.dtype() == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
    mask.pad_with(&pads, PadMode::Constant(hidden))
}

/// The output, and the scores as far as `qk_matmul_output_mode` says.
fn composed<R: Runtime>(c: &NodeCall<'_, R>, q: &Var<R>, k: &Var<R>, v: &Var<R>) -> Result<Vec<Var<R>>> {
    let groups = groups(q, k)?;
    let (k, v) = (k.repeat_interleave(groups, 1)?, v.repeat_interleave(groups, 1)?);
    let root = scale(c, q).sqrt();
    let mut scores = q.mul(root)?.matmul(&k.mul(root)?.t()?)?;
    let cap = c.float("softcap", 0.0);
    if cap > 0.0 {
        scores = scores.div(cap)?.tanh()?.mul(cap)?;
    }
    let mut shown = scores.clone();
    if let Some(mask) = c.opt(3)? {
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
    let probabilities = scores.to_dtype(precision(c, q)?)?.softmax(-1)?.to_dtype(q.dtype())?;
    if mode == 3 {
        shown = probabilities.clone();
    }
    Ok(vec![probabilities.matmul(&v)?, shown])
}

/// Masks of keys that queries may not see, each broadcast to `[B, H, T, S]`.
fn hidden<R: Runtime>(c: &NodeCall<'_, R>, queries: usize, keys: usize) -> Result<Vec<Var<R>>> {
    let numbers = |n: usize| Tensor::arange(c.device(), 0i64, 1i64, n, DType::I64).map(Var::new);
    let (i, j) = (numbers(queries)?.reshape([queries, 1])?, numbers(keys)?);
    let per_batch = |x: &Var<R>| x.to_dtype(DType::I64)?.reshape([x.spec().shape.numel(), 1, 1, 1]);
    let at = match (c.opt(4)?, c.opt(6)?) {
        (Some(past), _) => i.add(past.dims().get(2).copied().unwrap_or(0) as f64)?,
        (None, Some(lens)) => per_batch(lens)?.sub(queries as f64)?.add(&i)?,
        _ => i,
    };
    let mut found = Vec::new();
    if c.flag("is_causal") {
        found.push(j.gt(&at)?);
    }
    let (left, right) = (c.int("left_window_size", -1), c.int("right_window_size", -1));
    if left >= 0 {
        found.push(j.lt(&at.sub(left as f64)?)?);
    }
    if right >= 0 {
        found.push(j.gt(&at.add(right as f64)?)?);
    }
    if let Some(lens) = c.opt(6)? {
        found.push(j.ge(&per_batch(lens)?)?);
    }
    Ok(found)
}

/// A graph by its name, applied to scores or probabilities.
pub(in super::super) type Changed<'a, R> = &'a mut dyn FnMut(&str, Var<R>) -> Result<Var<R>>;

/// Attention whose scores and probabilities two graphs may change.
pub(in super::super) fn flex<R: Runtime>(c: &NodeCall<'_, R>, changed: Changed<'_, R>) -> NodeOutputs<R> {
    let (q, k, v) = (c.x(0)?, c.x(1)?, c.x(2)?);
    let groups = groups(q, k)?;
    let (k, v) = (k.repeat_interleave(groups, 1)?, v.repeat_interleave(groups, 1)?);
    let precision = precision(c, q)?;
    let precision = if precision.is_half() { DType::F32 } else { precision };
    let wide = |x: &Var<R>| x.to_dtype(precision);
    let scores = changed("score_mod", wide(q)?.matmul(&wide(&k)?.t()?)?.mul(scale(c, q))?)?;
    let probabilities = changed("prob_mod", scores.softmax(-1)?)?;
    one(probabilities.matmul(&wide(&v)?)?.to_dtype(q.dtype()))
}

fn rotary<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let flat = x.dims().len() == 3;
    let split = if flat { heads(x, c.size("num_heads", 1)?)? } else { x.clone() };
    let table = |i: usize| match c.opt(3)? {
        None => c.x(i)?.unsqueeze(1),
        Some(positions) => c.x(i)?.embedding(&positions.to_dtype(DType::I64)?)?.unsqueeze(1),
    };
    let y = split.rotate(&table(1)?, &table(2)?, c.flag("interleaved"))?;
    one(if flat { merged(&y) } else { Ok(y) })
}
