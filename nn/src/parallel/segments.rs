//! Documents of packed sequences as masks.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime,
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
