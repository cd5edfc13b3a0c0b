//! Positions of tokens, and masks of the keys that they see.

use autograd::Var;
use nn::parallel::{ContextSlot, same_segment};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};

use super::KvCache;

/// The inputs of a decoder besides the token ids `[B, T]`. Attention is causal, within the sliding window of layers
/// that have one. With context parallelism, `T` is the length of the whole sequence, not of this rank's part.
pub struct DecoderInputs<'a, R: Runtime> {
    /// The position of each token, `[B, T]` or `[T]` (`i64`). If `None`, positions are `0..T`, or follow those of the
    /// tokens in the cache.
    pub positions: Option<&'a Var<R>>,
    /// The document of each token within its row, `[B, T]` (`i64`): a token attends only to tokens with its own id. If
    /// `None`, each row is one document. Default positions do not restart at a new document; [`data::pack`] makes
    /// positions that do, with the segments.
    pub segments: Option<&'a Var<R>>,
    /// The keys and values of earlier tokens, which these tokens attend to. The call appends the tokens' own. It fails
    /// if `positions` or `segments` is set too, or with context parallelism.
    pub cache: Option<&'a mut KvCache<R>>,
}

impl<R: Runtime> Default for DecoderInputs<'_, R> {
    fn default() -> Self {
        DecoderInputs { positions: None, segments: None, cache: None }
    }
}

/// Positions and mask of the tokens of one call.
pub(super) struct Placement<R: Runtime> {
    /// `[T]` or `[B, T]`, `i64`.
    pub positions: Var<R>,
    /// The last position of each token's text, `[1]`, `[B, 1]` or `[B, T]`. Present where it is asked for and a row of
    /// `positions` may not be one text.
    pub last: Option<Var<R>>,
    /// The keys that each query sees, besides causality: `bool`, broadcast to `[B, H, T, S]`.
    pub mask: Option<Var<R>>,
    /// The positions of queries and of keys, `[B, T]` and `[B, S]` of whole sequences; `B` may be 1. Present where a
    /// program of scores asks for them and they are not the columns.
    pub places: Option<[Var<R>; 2]>,
    /// The document of each token, where the sequence is cut over ranks and each layer makes its own masks.
    pub segments: Option<Var<R>>,
    /// One past the last position; 0 where positions were given, and are not known on the host.
    pub end: usize,
    /// The number of tokens of each row.
    pub tokens: usize,
}

impl<R: Runtime> Placement<R> {
    /// The placement of tokens `[B, T]`. Where `context` cuts sequences over ranks, positions are those of this rank's
    /// tokens. `asks` tells whether the last positions of texts matter, and whether layers have programs of scores.
    pub(super) fn of(
        rt: &R,
        [b, t]: [usize; 2],
        inputs: &DecoderInputs<'_, R>,
        layers: usize,
        context: &ContextSlot<R>,
        [asks_last, has_scores]: [bool; 2],
    ) -> Result<Self> {
        let range = |start: usize| Ok::<_, Error>(Var::new(Tensor::arange(rt, start as i64, 1i64, t, DType::I64)?));
        if let Some(cache) = &inputs.cache {
            if inputs.positions.is_some() || inputs.segments.is_some() {
                let why = "a cache knows the positions of its tokens: give none, and no segments";
                return Err(Error::usage("decoder", why));
            }
            if context.ranks() > 1 {
                let why = "a cache has all tokens of a sequence, and sequences of this model are cut over ranks";
                return Err(Error::unsupported("decoder", why));
            }
            cache.check(b, t, layers)?;
            return Placement::after(cache, range(cache.len())?, t, has_scores);
        }
        let all_positions = inputs.positions.map_or_else(|| range(0), |given| Ok(given.clone()))?;
        let positions = context.take(&all_positions, all_positions.dims().len().saturating_sub(1))?;
        if let Some(segments) = inputs.segments.filter(|segments| segments.spec().shape[..] != [b, t]) {
            let shapes = [Shape::new(&[b, t])?, segments.spec().shape];
            return Err(Error::shape("decoder", &shapes, "tokens and segments must be [B, T]"));
        }
        let last = match inputs.segments {
            _ if !asks_last => None,
            Some(segments) => Some(context.take(&last_of_each(&all_positions, segments)?, 1)?),
            None => (context.ranks() > 1).then(|| all_positions.amax_keepdim(&[-1])).transpose()?,
        };
        // Full sequences have one mask for all layers.
        let (mask, segments) = match inputs.segments {
            Some(segments) if context.ranks() == 1 => (Some(same_segment(segments, segments)?), None),
            segments => (None, segments.cloned()),
        };
        let end = if inputs.positions.is_some() { 0 } else { t };
        let places = inputs
            .positions
            .filter(|_| has_scores)
            .map(|given| given.reshape([given.spec().shape.numel() / t.max(1), t]));
        let places = places.transpose()?.map(|places| [places.clone(), places]);
        Ok(Placement { positions, last, mask, places, segments, end, tokens: t })
    }

    /// The placement of tokens that follow those in a cache.
    fn after(cache: &KvCache<R>, range: Var<R>, tokens: usize, has_scores: bool) -> Result<Self> {
        let columns = cache.len() + tokens;
        // One past the last position of the row that has the most.
        let end = columns - cache.shifts(columns).min().unwrap_or(0);
        let (rt, b) = (range.runtime(), cache.padding().len());
        let keys = || Var::new(Tensor::arange(rt, 0i64, 1i64, columns, DType::I64)?).reshape([1, columns]);
        if end == columns && cache.shifts(columns).all(|shift| shift == 0) {
            // Layers with windows have dropped keys.
            let asks = has_scores && !cache.is_plain();
            let places = if asks { Some([range.reshape([1, tokens])?, keys()?]) } else { None };
            return Ok(Placement { positions: range, last: None, mask: None, places, segments: None, end, tokens });
        }
        let column = |list: Vec<i64>| Ok::<_, Error>(Var::new(Tensor::from_slice(rt, [b, 1], &list)?));
        let shifts = column(cache.shifts(columns).map(|shift| shift as i64).collect())?;
        // Padding has position 0: nothing sees it.
        let moved = |columns: &Var<R>| columns.sub(&shifts)?.maximum(&zero(rt)?);
        let positions = moved(&range.reshape([1, tokens])?)?;
        let keys = keys()?;
        let places = if has_scores { Some([positions.clone(), moved(&keys)?]) } else { None };
        let padding = column(cache.padding().iter().map(|&pad| pad as i64).collect())?;
        let mask = keys.ge(&padding)?.reshape([b, 1, 1, columns])?;
        Ok(Placement { positions, last: None, mask: Some(mask), places, segments: None, end, tokens })
    }
}

/// The last position of each token's document, `[B, T]`, of positions `[T]` or `[B, T]`.
fn last_of_each<R: Runtime>(positions: &Var<R>, segments: &Var<R>) -> Result<Var<R>> {
    let (same, of) = (same_segment(segments, segments)?, positions.spec().shape);
    let rows = if of.rank() == 2 { of[0] } else { 1 };
    let positions = positions.reshape([rows, 1, 1, of.numel() / rows.max(1)])?;
    positions.where_cond(&same, &zero(positions.runtime())?)?.amax_keepdim(&[-1])?.reshape(segments.spec().shape)
}

fn zero<R: Runtime>(rt: &R) -> Result<Var<R>> {
    Ok(Var::new(Tensor::zeros(rt, [1], DType::I64)?))
}
