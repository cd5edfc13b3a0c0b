//! Documents of packed sequences as masks, and masks as programs.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime,
    fused::{AttentionProgram, SdpaOptions},
    ops::{Apply, PointwiseOps, ViewOps},
};

/// Compares the documents of tokens, `[B, T]` and `[B, S]`, both `i64`: a `bool` of `[B, 1, T, S]`, true where they are
/// equal.
pub fn same_segment<T: Apply>(queries: &T, keys: &T) -> Result<T> {
    let (q, k) = (queries.spec(), keys.spec());
    match (&q.shape[..], &k.shape[..]) {
        (&[b, t], &[batch, s]) if b == batch && q.dtype == DType::I64 => {
            queries.reshape([b, 1, t, 1])?.eq(&keys.reshape([b, 1, 1, s])?)
        }
        _ => Err(Error::shape("attention", &[q.shape, k.shape], "segments must be [B, T], of i64")),
    }
}

/// Combines segments with a mask, which is `bool` or added to scores.
pub(super) fn segments_and<R: Runtime>(
    mask: Option<&Var<R>>,
    [q, k]: [&Var<R>; 2],
    segments: &Var<R>,
) -> Result<Var<R>> {
    let (q, k, of) = (q.spec().shape, k.spec().shape, segments.spec().shape);
    if of.rank() == 2 && q.rank() == 4 && k.rank() == 4 && [q[2], k[2]] != [of[1]; 2] {
        let why = "segments are of all queries and keys: with a cache of keys give a mask";
        return Err(Error::shape("attention", &[q, k, of], why));
    }
    let same = same_segment(segments, segments)?;
    match mask {
        None => Ok(same),
        Some(given) if given.dtype() == DType::Bool => given.logical_and(&same),
        Some(given) => given.masked_fill(&same.logical_not()?, f64::NEG_INFINITY),
    }
}

/// Attention with a mask, `bool` or added to scores, or with a window to both sides, as a program with its arguments.
/// So it knows positions in whole sequences, of which ranks have parts.
pub(super) fn masked<R: Runtime>(
    options: &SdpaOptions<'_, Var<R>>,
    segments: Option<&Var<R>>,
) -> Result<(AttentionProgram, Vec<Var<R>>)> {
    let &SdpaOptions { mask, causal, window, scale, softcap, .. } = options;
    let [before, after] = [window.0, window.1].map(|keys| keys.and_then(|keys| i64::try_from(keys).ok()));
    let is_seen = mask.is_some_and(|mask| mask.dtype() == DType::Bool);
    let (is_added, has_segments) = (mask.is_some() && !is_seen, segments.is_some());
    let mut args: Vec<Var<R>> = mask.into_iter().cloned().collect();
    if let Some(segments) = segments {
        args.extend([segments.unsqueeze(1)?.unsqueeze(-1)?, segments.unsqueeze(1)?.unsqueeze(1)?]);
    }
    let mut program = AttentionProgram::over(args.len());
    if is_added || softcap.is_some() {
        program = program.score(move |score, _, args| {
            let score = softcap.map_or(score, |cap| (score / cap).tanh() * cap);
            if is_added { score + args[0].cast_like(score) } else { score }
        });
    }
    if is_seen || has_segments || causal || before.is_some() || after.is_some() {
        program = program.mask(move |at, args| {
            let all = [
                is_seen.then(|| args[0]),
                has_segments.then(|| args[args.len() - 2].eq(args[args.len() - 1])),
                causal.then(|| at.key.le(at.query)),
                before.map(|before| (at.query - at.key).le(before)),
                after.map(|after| (at.key - at.query).le(after)),
            ];
            all.into_iter().flatten().reduce(|a, b| a & b).unwrap_or_else(|| at.key.eq(at.key))
        });
    }
    Ok((scale.map_or(program.clone(), |scale| program.scale(scale)), args))
}
