//! Attention whose scores and mask are programs of positions (Dong et al., *FlexAttention*, 2024).

use std::{ops::Range, sync::LazyLock};

use smallvec::SmallVec;

use super::{Attention, Fused, NnOps, SdpaOptions, Softmax, attention::raw_scores, attention_pieces::Piece};
use crate::{
    DType, Error, Result, Shape, Tensor, Within,
    ops::{Apply, PointwiseOps, Spec, ViewOps, cat},
    pointwise::{Binary, Bounds, Expr, Inst, Program},
};

/// Rows of queries, and of keys, whose visibility is decided together.
const BLOCK: usize = 64;

/// The position of a score: whole numbers (`i64`), counted over all ranks and all keys of a cache.
#[derive(Clone, Copy)]
pub struct ScorePosition<'b> {
    /// The example of the batch.
    pub batch: Expr<'b>,
    /// The head of the query.
    pub head: Expr<'b>,
    /// The position of the query in its sequence.
    pub query: Expr<'b>,
    /// The position of the key in its sequence.
    pub key: Expr<'b>,
}

impl<'b> ScorePosition<'b> {
    const AXES: usize = 4;

    fn of(inputs: &[Expr<'b>]) -> Self {
        ScorePosition { batch: inputs[0], head: inputs[1], query: inputs[2], key: inputs[3] }
    }
}

/// Attention, `softmax(score(q·kᵀ·scale))·v`, whose scores and mask are programs: pointwise expressions of a score, its
/// position, and arguments. Arguments are tensors that broadcast to `[B, H, T, S]`, and may be learned.
///
/// Queries and keys that a mask hides from each other by its positions alone are not computed: the mask is evaluated
/// over ranges of positions, without reading data. A query that sees no key gives zeros. A mask, and a constant that is
/// added to scores, run in the runtime's attention kernel, a piece of a dense mask at a time. Other programs of scores,
/// those of half-precision operands, and those with learned arguments are computed from primitives, a piece at a time,
/// and in `f32` at least.
///
/// ```
/// use numcore::{DType, NullRuntime, Tensor, fused::AttentionProgram};
///
/// let rt = NullRuntime::new();
/// let [q, k, v] = [1, 2, 3].map(|seed| Tensor::uniform(&rt, [1, 2, 8, 4], DType::F32, -1.0, 1.0, seed));
/// // ALiBi (Press et al. 2022): a slope of each head times the distance, in documents of four tokens.
/// let slopes = Tensor::from_slice(&rt, [2, 1, 1], &[0.5f32, 0.25])?;
/// let attention = AttentionProgram::over(1)
///     .score(|score, at, args| score + args[0] * (at.key - at.query).cast_like(score))
///     .mask(|at, _| at.key.le(at.query) & (at.key / 4).eq(at.query / 4));
/// let y = attention.attend(&q?, &k?, &v?, &[&slopes])?; // [1, 2, 8, 4]
/// # Ok::<(), numcore::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AttentionProgram {
    score: Option<Program>,
    mask: Option<Program>,
    args: usize,
    scale: Option<f64>,
    first: [usize; ScorePosition::AXES],
    blocks: Option<(usize, Vec<Range<usize>>)>,
}

impl AttentionProgram {
    /// Attention by programs with this number of arguments. At first, scores are `q·kᵀ/√D`, and every query sees every
    /// key.
    pub fn over(args: usize) -> Self {
        AttentionProgram { score: None, mask: None, args, scale: None, first: [0; 4], blocks: None }
    }

    /// Attention in which a query sees no key after its own position. It runs as
    /// [`causal_attention`](NnOps::causal_attention), with its bits.
    pub fn causal() -> Self {
        Self::over(0).mask(|at, _| at.key.le(at.query))
    }

    /// Sets the program of a score: of `q·kᵀ·scale`, its position, and the arguments. It gives a floating value.
    #[doc(alias("score_mod"))]
    pub fn score(mut self, f: impl for<'b> FnOnce(Expr<'b>, ScorePosition<'b>, &[Expr<'b>]) -> Expr<'b>) -> Self {
        let inputs = 1 + ScorePosition::AXES + self.args;
        self.score = Some(Program::build("attention_score", inputs, 0, |_, ins, _| {
            vec![f(ins[0], ScorePosition::of(&ins[1..]), &ins[1 + ScorePosition::AXES..])]
        }));
        self
    }

    /// Sets the program of a mask, a truth value: it holds where a query sees a key.
    #[doc(alias("mask_mod", "create_block_mask"))]
    pub fn mask(mut self, f: impl for<'b> FnOnce(ScorePosition<'b>, &[Expr<'b>]) -> Expr<'b>) -> Self {
        let inputs = ScorePosition::AXES + self.args;
        self.mask = Some(Program::build("attention_mask", inputs, 0, |_, ins, _| {
            vec![f(ScorePosition::of(ins), &ins[ScorePosition::AXES..])]
        }));
        self
    }

    /// Sets the factor of the products of queries and keys; at first `1/√D`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Moves the positions of the first example, head, query and key by these counts, which add up over calls. They are 0
    /// at first. A call is of a rank's part of heads or sequences, say, or of queries after a cache of keys.
    pub fn shifted(mut self, batch: usize, head: usize, query: usize, key: usize) -> Self {
        self.first.iter_mut().zip([batch, head, query, key]).for_each(|(first, by)| *first += by);
        self
    }

    /// Sets the keys that queries may see, for masks that follow from data: `keys[i]` is the range for the queries from
    /// `i · rows` on. Ranges are of the operands of a call, whatever its shift. Keys outside are not computed; inside,
    /// the mask decides.
    pub fn blocks(mut self, rows: usize, keys: Vec<Range<usize>>) -> Self {
        self.blocks = Some((rows, keys));
        self
    }

    /// Tells whether the program has a table of [`blocks`](AttentionProgram::blocks).
    pub fn has_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    /// Attention of queries `q: [B, H, T, D]` over keys `[B, K, S, D]` and values `[B, K, S, E]`, where `K` divides `H`:
    /// `[B, H, T, E]`. Scores of half-precision operands are `f32`, and the result has their dtype.
    ///
    /// # Errors
    /// An error if the operands do not fit, the arguments are not as many as the programs take, or do not broadcast to
    /// `[B, H, T, S]`; if a program gives another type than it should; or if the ranges of keys do not cover `T`.
    #[track_caller]
    pub fn attend<T: Apply>(&self, q: &T, k: &T, v: &T, args: &[&T]) -> Result<T> {
        let call = ScoredCall::of(self, [q, k, v], args)?;
        if call.batch * call.heads * call.queries == 0 {
            return q.attention(k, v);
        }
        if let Some(lower_right) = self.is_causal(&call) {
            let options = SdpaOptions { causal: true, lower_right, scale: Some(call.scale), ..Default::default() };
            return q.attention_with(k, v, options);
        }
        let pieces = self.pieces(&call).at_caller()?;
        if pieces.is_empty() {
            return q.attention_with(k, v, SdpaOptions { scale: Some(call.scale), ..Default::default() });
        }
        let parts = pieces.iter().map(|piece| self.part(&call, piece)).collect::<Result<Vec<_>>>()?;
        if let [whole] = &parts[..] {
            return Ok(whole.clone());
        }
        cat(&parts.iter().collect::<Vec<_>>(), 2)
    }

    /// Tells whether the call is causal, which kernels have as a whole, and whether its last query is at the last key.
    fn is_causal<T: Apply>(&self, call: &ScoredCall<'_, T>) -> Option<bool> {
        static CAUSAL: LazyLock<Option<Program>> = LazyLock::new(|| AttentionProgram::causal().mask);
        let [.., query, key] = self.first;
        let (at_start, at_end) = (query == key, query + call.queries == key + call.keys);
        let is_causal = self.args == 0 && self.score.is_none() && self.blocks.is_none() && self.mask == *CAUSAL;
        (is_causal && (at_start || at_end)).then_some(!at_start)
    }

    /// The consecutive queries that see some of the same keys.
    fn pieces<T: Apply>(&self, call: &ScoredCall<'_, T>) -> Result<Vec<Piece>> {
        let (rows, given) = match &self.blocks {
            Some((rows, keys)) => {
                if *rows == 0 || keys.len() != call.queries.div_ceil(*rows) {
                    let allowed = format!("the number of blocks of {rows} queries among {}", call.queries);
                    return Err(Error::range("AttentionProgram::blocks", "number of ranges", keys.len(), allowed));
                }
                if let Some(range) = keys.iter().find(|range| range.end > call.keys || range.start > range.end) {
                    let why = format!("{range:?} is no range of the {} keys", call.keys);
                    return Err(Error::argument("AttentionProgram::blocks", why));
                }
                (*rows, Some(keys))
            }
            None => (BLOCK, None),
        };
        let mut pieces: Vec<Piece> = Vec::new();
        for (i, start) in (0..call.queries).step_by(rows).enumerate() {
            let queries = start..call.queries.min(start + rows);
            let within = given.map_or(0..call.keys, |keys| keys[i].clone());
            let piece = self.piece(call, queries, within);
            if !pieces.last_mut().is_some_and(|last| last.takes(&piece, given.is_none())) {
                pieces.push(piece);
            }
        }
        Ok(pieces)
    }

    /// The keys, out of a range, that any of some queries may see by their positions.
    fn piece<T: Apply>(&self, call: &ScoredCall<'_, T>, queries: Range<usize>, within: Range<usize>) -> Piece {
        let Some(mask) = &self.mask else { return Piece::new(queries, within, false) };
        let [batch, head, query, key] = self.first;
        let spans =
            |first: usize, range: &Range<usize>| Some(((first + range.start) as i64, (first + range.end) as i64 - 1));
        let mut inputs: Vec<Bounds> = vec![None; mask.inputs()];
        inputs[0] = spans(batch, &(0..call.batch));
        inputs[1] = spans(head, &(0..call.heads));
        inputs[2] = spans(query, &queries);
        let (mut keys, mut masked) = (within.start..within.start, false);
        for start in within.clone().step_by(BLOCK) {
            let block = start..within.end.min(start + BLOCK);
            inputs[3] = spans(key, &block);
            match mask.bounds(&inputs)[0] {
                Some((0, 0)) => continue,
                Some((1, 1)) => {}
                _ => masked = true,
            }
            masked |= !keys.is_empty() && keys.end != block.start;
            keys = if keys.is_empty() { block } else { keys.start..block.end };
        }
        Piece::new(queries, keys, masked)
    }

    /// The outputs of a piece.
    #[track_caller]
    fn part<T: Apply>(&self, call: &ScoredCall<'_, T>, piece: &Piece) -> Result<T> {
        let Piece { queries, keys, masked, .. } = piece;
        let q = along(call.q, 2, queries)?;
        let [k, v] = [call.k, call.v].map(|x| along(x, 2, keys));
        let (k, v) = (k?, v?);
        if keys.is_empty() {
            // Zeros, with gradients of zeros: ranks that see no key take part in backward as others do.
            return q.attention_with(&k, &v, SdpaOptions::default());
        }
        let inputs = self.inputs(call, piece)?;
        let allowed = match &self.mask {
            Some(mask) if *masked => Some(truth(run(mask, &[], &inputs)?)?),
            _ => None,
        };
        let dtype = q.spec().dtype;
        let Some(score) = &self.score else {
            let options = SdpaOptions { mask: allowed.as_ref(), scale: Some(call.scale), ..Default::default() };
            return q.attention_with(&k, &v, options);
        };
        if adds_to_score(score) && !dtype.is_half() {
            // The value that the program adds is its value at a score of 0. Half precision would round it.
            let zero = T::constant(Tensor::zeros(q.runtime(), [1; 4], dtype.compute())?);
            let added = run(score, &[&zero], &inputs)?;
            let added = match &allowed {
                Some(allowed) => added.where_cond(allowed, f64::NEG_INFINITY)?,
                None => added,
            };
            let added = floating(added)?.to_dtype(dtype)?;
            let options = SdpaOptions { mask: Some(&added), scale: Some(call.scale), ..Default::default() };
            return q.attention_with(&k, &v, options);
        }
        let [q, k, v] = [q, k, v].map(|x| x.to_dtype(dtype.compute()));
        let (q, k, v) = (q?, k?, v?);
        let raw = raw_scores(&q, &k)?.mul(call.scale)?;
        let scores = floating(run(score, &[&raw], &inputs)?)?.broadcast_to(raw.spec().shape)?;
        let scores = match &allowed {
            Some(allowed) => scores.where_cond(allowed, f64::NEG_INFINITY)?,
            None => scores,
        };
        let weights = T::apply1(Softmax { log: false }, &[&scores])?;
        super::attention::weighted(&weights, &k, &v)?.to_dtype(dtype)
    }

    /// The positions and arguments of a piece, as operands of its programs.
    #[track_caller]
    fn inputs<T: Apply>(&self, call: &ScoredCall<'_, T>, piece: &Piece) -> Result<Vec<T>> {
        let ranges = [0..call.batch, 0..call.heads, piece.queries.clone(), piece.keys.clone()];
        let rt = call.q.runtime();
        let mut inputs = Vec::with_capacity(ScorePosition::AXES + self.args);
        for (axis, range) in ranges.iter().enumerate() {
            let first = (self.first[axis] + range.start) as i64;
            let positions = Tensor::arange(rt, first, 1i64, range.len(), DType::I64)?;
            inputs.push(T::constant(positions.reshape(Shape::new(&[1; 4])?.with(axis, range.len()))?));
        }
        for arg in call.args {
            let rank = arg.spec().shape.rank();
            let mut arg = (*arg).clone();
            for (back, range) in [(2, &piece.queries), (1, &piece.keys)] {
                if rank >= back && arg.spec().shape[rank - back] != 1 {
                    arg = along(&arg, rank - back, range)?;
                }
            }
            let is_half = arg.spec().dtype.is_half();
            inputs.push(if is_half { arg.to_dtype(DType::F32)? } else { arg });
        }
        Ok(inputs)
    }
}

/// The operands of a call and their sizes.
struct ScoredCall<'a, T> {
    q: &'a T,
    k: &'a T,
    v: &'a T,
    args: &'a [&'a T],
    scale: f64,
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
}

impl<'a, T: Apply> ScoredCall<'a, T> {
    #[track_caller]
    fn of(program: &AttentionProgram, [q, k, v]: [&'a T; 3], args: &'a [&'a T]) -> Result<Self> {
        // Operands of several dtypes are those that `autocast` makes one.
        let dtype = q.spec().dtype;
        let specs: SmallVec<[Spec; 3]> = [q, k, v].iter().map(|x| Spec { dtype, ..x.spec() }).collect();
        Attention::new(1.0).infer(&specs).map_err(|error| T::explained(error, &[q, k, v]))?;
        if args.len() != program.args {
            return Err(Error::range("AttentionProgram", "number of arguments", args.len(), program.args)).at_caller();
        }
        let (shape, keys) = (specs[0].shape, specs[1].shape[2]);
        let scores = Shape::new(&[shape[0], shape[1], shape[2], keys])?;
        if let Some(arg) = args.iter().find(|arg| arg.spec().shape.broadcast(&scores) != Some(scores)) {
            let why = format!("an argument broadcasts to the scores {scores}");
            return Err(T::explained(Error::shape("AttentionProgram", &[arg.spec().shape, scores], why), &[arg]));
        }
        let scale = program.scale.unwrap_or(1.0 / (shape[3] as f64).sqrt());
        Ok(ScoredCall { q, k, v, args, scale, batch: shape[0], heads: shape[1], queries: shape[2], keys })
    }
}

/// Tells whether a program gives the sum of the score and a value that does not depend on it. Its derivative does not
/// tell: that of `score + score.floor()` is 1 too.
fn adds_to_score(score: &Program) -> bool {
    let insts = score.insts();
    let mut depends: Vec<bool> = Vec::with_capacity(insts.len());
    for inst in insts {
        let of_operands = match *inst {
            Inst::CastLike(a, _) => depends[a as usize], // of the other, only the dtype counts
            _ => inst.operands().any(|a| depends[a as usize]),
        };
        depends.push(of_operands || *inst == Inst::Input(0));
    }
    let mut at = score.outputs()[0] as usize;
    loop {
        at = match insts[at] {
            Inst::Input(0) => return true,
            Inst::Binary(Binary::Add, a, b) if !depends[b as usize] => a as usize,
            Inst::Binary(Binary::Add, a, b) if !depends[a as usize] => b as usize,
            Inst::Binary(Binary::Sub, a, b) if !depends[b as usize] => a as usize,
            _ => return false,
        };
    }
}

/// Part of an axis; the operand itself if the range is all of it.
#[track_caller]
fn along<T: Apply>(x: &T, axis: usize, range: &Range<usize>) -> Result<T> {
    if range.len() == x.spec().shape[axis] { Ok(x.clone()) } else { x.narrow(axis as isize, range.start, range.len()) }
}

/// Applies a program to a score, if it takes one, and positions and arguments. Operands that it does not read do not
/// lengthen the result.
#[track_caller]
fn run<T: Apply>(program: &Program, score: &[&T], inputs: &[T]) -> Result<T> {
    let all: SmallVec<[&T; 8]> = score.iter().copied().chain(inputs).collect();
    let short = |x: &T| {
        let long = x.spec().shape.iter().enumerate().filter(|(_, n)| **n > 1).map(|(axis, _)| axis).collect::<Vec<_>>();
        long.into_iter().try_fold(x.clone(), |x, axis| x.narrow(axis as isize, 0, 1))
    };
    let given = all.iter().enumerate().map(|(i, x)| {
        let is_read = program.reads() >> i & 1 == 1;
        if is_read { Ok((*x).clone()) } else { short(x) }
    });
    let given = given.collect::<Result<SmallVec<[T; 8]>>>()?;
    let rest: SmallVec<[&T; 8]> = given[1..].iter().collect();
    given[0].apply_program(program, &rest, &[])
}

fn truth<T: Apply>(mask: T) -> Result<T> {
    let dtype = mask.spec().dtype;
    if dtype == DType::Bool {
        return Ok(mask);
    }
    Err(Error::dtype("AttentionProgram::mask", &[dtype], "the program of a mask gives truth values: compare"))
}

fn floating<T: Apply>(score: T) -> Result<T> {
    let dtype = score.spec().dtype;
    if dtype.is_float() {
        return Ok(score);
    }
    Err(Error::dtype("AttentionProgram::score", &[dtype], "the program of a score gives a floating value"))
}
