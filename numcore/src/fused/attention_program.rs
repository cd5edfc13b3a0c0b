//! Attention whose scores and mask are programs of positions (Dong et al., *FlexAttention*, 2024).

use std::{ops::Range, sync::LazyLock};

use smallvec::SmallVec;

use super::{
    Attention, Fused, NnOps, ScorePosition, ScoredAttention, SdpaOptions,
    attention_pieces::Piece,
    score_operands::{along, arg_along, positions, run, varies_along_both},
};
use crate::{
    DType, Error, Result, Shape, Within,
    ops::{Apply, PointwiseOps, Spec, cat},
    pointwise::{Bounds, Expr, Inst, Program},
};

/// Rows of queries, and of keys, whose visibility is decided together.
const BLOCK: usize = 64;

/// Attention, `softmax(score(q·kᵀ·scale))·v`, whose scores and mask are programs: pointwise expressions of a score, its
/// position, and arguments. Arguments are tensors that broadcast to `[B, H, T, S]`, and may be learned.
///
/// Queries and keys that a mask hides from each other by its positions alone are not computed. The mask is evaluated
/// over ranges of positions, without reading data. A query that sees no key gives zeros. The rest is one
/// [`ScoredAttention`] for each piece. Runtimes evaluate it in their attention kernel, or from a dense mask or
/// primitives, in `f32` at least.
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
    /// The program of scores that are `−∞` where the mask hides a key; `None` without a mask.
    both: Option<Program>,
    args: usize,
    scale: Option<f64>,
    first: [usize; ScorePosition::AXES],
    blocks: Option<(usize, Vec<Range<usize>>)>,
}

impl AttentionProgram {
    /// Attention by programs with this number of arguments. At first, scores are `q·kᵀ/√D`, and every query sees every
    /// key.
    pub fn over(args: usize) -> Self {
        AttentionProgram { score: None, mask: None, both: None, args, scale: None, first: [0; 4], blocks: None }
    }

    /// Attention in which a query sees no key after its own position. It runs as
    /// [`causal_attention`](NnOps::causal_attention), with its bits.
    pub fn causal() -> Self {
        Self::over(0).mask(|at, _| at.key.le(at.query))
    }

    /// Sets the program of a score: of `q·kᵀ·scale`, its position, and the arguments. It gives a floating value.
    #[doc(alias("score_mod"))]
    pub fn score(mut self, f: impl for<'b> FnOnce(Expr<'b>, ScorePosition<'b>, &[Expr<'b>]) -> Expr<'b>) -> Self {
        let inputs = ScoredAttention::arg(self.args);
        self.score = Some(Program::build("attention_score", inputs, 0, |_, ins, _| {
            vec![f(ins[0], ScorePosition::of(&ins[1..]), &ins[ScoredAttention::arg(0)..])]
        }));
        self.with_both()
    }

    /// Sets the program of a mask, a truth value: it holds where a query sees a key.
    #[doc(alias("mask_mod", "create_block_mask"))]
    pub fn mask(mut self, f: impl for<'b> FnOnce(ScorePosition<'b>, &[Expr<'b>]) -> Expr<'b>) -> Self {
        let inputs = ScorePosition::AXES + self.args;
        self.mask = Some(Program::build("attention_mask", inputs, 0, |_, ins, _| {
            vec![f(ScorePosition::of(ins), &ins[ScorePosition::AXES..])]
        }));
        self.with_both()
    }

    fn with_both(self) -> Self {
        let both = self.mask.is_some().then(|| {
            Program::build("attention_score", ScoredAttention::arg(self.args), 0, |b, ins, _| {
                let (at, args) = (ScorePosition::of(&ins[1..]), &ins[ScoredAttention::arg(0)..]);
                let score = self.score_of(ins[0], at, args);
                vec![self.mask_of(at, args).map_or(score, |seen| seen.select(score, b.c(f64::NEG_INFINITY)))]
            })
        });
        AttentionProgram { both, ..self }
    }

    /// The score that the program makes of another in a program that is being built.
    fn score_of<'b>(&self, score: Expr<'b>, at: ScorePosition<'b>, args: &[Expr<'b>]) -> Expr<'b> {
        let ins: Vec<_> = [score].iter().chain(&at.axes()).chain(args).copied().collect();
        let found = |program: &Program| program.inline(score.builder(), &ins, &[]).ok()?.pop();
        self.score.as_ref().and_then(found).unwrap_or(score)
    }

    /// The truth value of the mask in a program that is being built.
    fn mask_of<'b>(&self, at: ScorePosition<'b>, args: &[Expr<'b>]) -> Option<Expr<'b>> {
        let ins: Vec<_> = at.axes().iter().chain(args).copied().collect();
        self.mask.as_ref()?.inline(at.key.builder(), &ins, &[]).ok()?.pop()
    }

    /// Composition of two programs: this one is applied to the scores of `first`. A query sees the keys that both masks
    /// show. Arguments are those of `first`, then those of this program, then `more` ones. `at` gives the positions
    /// that this program sees, from those of a score and the last arguments. The scale is that of `first`, unless this
    /// program has its own.
    pub fn after(
        &self,
        first: &Self,
        more: usize,
        at: impl for<'b> Fn(ScorePosition<'b>, &[Expr<'b>]) -> ScorePosition<'b>,
    ) -> Self {
        let (own, end) = (first.args, first.args + self.args);
        let both = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
        let blocks = match (&self.blocks, &first.blocks) {
            (Some((rows, own)), Some((same, others))) if rows == same => {
                Some((*rows, own.iter().zip(others).map(|(a, b)| both(a, b)).collect()))
            }
            (own, first) => own.clone().or_else(|| first.clone()),
        };
        let scale = self.scale.or(first.scale);
        let mut both = AttentionProgram { scale, blocks, first: first.first, ..Self::over(end + more) };
        if first.score.is_some() || self.score.is_some() {
            both = both.score(|score, here, args| {
                let score = first.score_of(score, here, &args[..own]);
                self.score_of(score, at(here, &args[end..]).shifted(self.first), &args[own..end])
            });
        }
        if first.mask.is_some() || self.mask.is_some() {
            both = both.mask(|here, args| {
                let there = at(here, &args[end..]).shifted(self.first);
                let masks = [first.mask_of(here, &args[..own]), self.mask_of(there, &args[own..end])];
                masks.into_iter().flatten().reduce(|a, b| a & b).unwrap_or_else(|| here.key.eq(here.key))
            });
        }
        both
    }

    /// Checks the types that the programs give.
    fn check_dtypes<T: Apply>(&self, score: DType, args: &[&T]) -> Result<()> {
        let args =
            args.iter().map(|arg| arg.spec().dtype).map(|dtype| if dtype.is_half() { DType::F32 } else { dtype });
        let dtypes: Vec<DType> = [score].into_iter().chain([DType::I64; ScorePosition::AXES]).chain(args).collect();
        let gives = |program: &Program, dtypes: &[DType]| {
            Ok::<_, Error>(program.resolve(dtypes, &[])?.dtypes[program.outputs()[0] as usize])
        };
        if let Some(mask) = &self.mask {
            let dtype = gives(mask, &dtypes[1..])?;
            if dtype != DType::Bool {
                let why = "the program of a mask gives truth values: compare";
                return Err(Error::dtype("AttentionProgram::mask", &[dtype], why));
            }
        }
        if let Some(program) = &self.score {
            let dtype = gives(program, &dtypes)?;
            if dtype != score {
                let why = format!("the program of a score gives a floating value, here {score}");
                return Err(Error::dtype("AttentionProgram::score", &[dtype], why));
            }
        }
        Ok(())
    }

    /// The factor of products of queries and keys whose heads are `width` wide.
    pub fn scale_of(&self, width: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (width as f64).sqrt())
    }

    /// Sets the factor of the products of queries and keys; at first `1/√D`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Moves the positions of the first example, head, query and key by these counts, which add up over calls. They are
    /// 0 at first. A call is of a rank's part of heads or sequences, say, or of queries after a cache of keys.
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

    /// Attention of queries `q: [B, H, T, D]` over keys `[B, K, S, D]` and values `[B, K, S, E]`, where `K` divides
    /// `H`: `[B, H, T, E]`. Scores of half-precision operands are `f32`, and the result has their dtype.
    ///
    /// # Errors
    /// An error if the operands do not fit, or the arguments are not as many as the programs take, or do not broadcast
    /// to `[B, H, T, S]`. Also if a program gives another type than it should, or the ranges of keys do not cover `T`.
    #[track_caller]
    pub fn attend<T: Apply>(&self, q: &T, k: &T, v: &T, args: &[&T]) -> Result<T> {
        let call = ScoredCall::of(self, [q, k, v], args)?;
        if call.batch * call.heads * call.queries == 0 {
            return q.attention(k, v);
        }
        if let Some(lower_right) = self.is_causal(&call) {
            if let Some(score) = &self.score {
                let attention = Attention { causal: true, lower_right, ..Attention::new(call.scale) };
                return self.scored(&call, score, attention, [q, k, v], (&(0..call.queries), &(0..call.keys)));
            }
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
        static CAUSAL: LazyLock<Vec<Inst>> =
            LazyLock::new(|| AttentionProgram::causal().mask.map_or_else(Vec::new, |mask| mask.insts().to_vec()));
        let [.., query, key] = self.first;
        let (at_start, at_end) = (query == key, query + call.queries == key + call.keys);
        let is_causal =
            self.blocks.is_none() && self.mask.as_ref().is_some_and(|mask| mask.insts() == CAUSAL.as_slice());
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
        let mask = self.mask.as_ref().filter(|_| *masked);
        let plain = SdpaOptions { scale: Some(call.scale), ..Default::default() };
        let program = match (mask, &self.score) {
            (None, None) => return q.attention_with(&k, &v, plain),
            (None, Some(score)) => score,
            (Some(mask), score) => {
                let args = call.args_of(queries, keys)?;
                if score.is_none() && !varies_along_both(mask, &args) {
                    let [batch, head, query, key] = self.first;
                    let first = [batch, head, query + queries.start, key + keys.start];
                    let mut operands = positions(call.q, first, [call.batch, call.heads, queries.len(), keys.len()])?;
                    operands.extend(args);
                    let allowed = run(mask, &[], &operands)?.remove(0);
                    return q.attention_with(&k, &v, SdpaOptions { mask: Some(&allowed), ..plain });
                }
                self.both.as_ref().unwrap_or(mask)
            }
        };
        self.scored(call, program, Attention::new(call.scale), [&q, &k, &v], (queries, keys))
    }

    /// Attention of some queries over some keys, by a program of scores.
    #[track_caller]
    fn scored<T: Apply>(
        &self,
        call: &ScoredCall<'_, T>,
        program: &Program,
        attention: Attention,
        qkv: [&T; 3],
        (queries, keys): (&Range<usize>, &Range<usize>),
    ) -> Result<T> {
        let [batch, head, query, key] = self.first;
        let first = [batch, head, query + queries.start, key + keys.start];
        let args = call.args_of(queries, keys)?;
        let ins: Vec<&T> = qkv.into_iter().chain(&args).collect();
        Ok(T::apply(ScoredAttention { attention, program: program.clone(), first }.into(), &ins)?.remove(0))
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
    /// The arguments of some queries and keys; halves are cast to `f32`.
    #[track_caller]
    fn args_of(&self, queries: &Range<usize>, keys: &Range<usize>) -> Result<Vec<T>> {
        let args = self.args.iter().map(|arg| {
            let arg = arg_along(*arg, queries, keys)?;
            if arg.spec().dtype.is_half() { arg.to_dtype(DType::F32) } else { Ok(arg) }
        });
        args.collect()
    }

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
        program.check_dtypes(dtype.compute(), args).at_caller()?;
        let scale = program.scale_of(shape[3]);
        Ok(ScoredCall { q, k, v, args, scale, batch: shape[0], heads: shape[1], queries: shape[2], keys })
    }
}
