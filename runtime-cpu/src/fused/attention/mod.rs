//! Attention in blocks of queries and keys (Dao, *FlashAttention-2*, 2023): scores of a few queries exist at a time, so
//! memory is linear in the sequence length.
//!
//! Keys and values are packed once per block of keys, and all queries of a task pass over them. Backward, and forward by
//! AMX, have one block of scores at a time; forward by vectors has all scores of a few queries. So weights are relative
//! to the largest of all scores, and no weight is ever rescaled.
//!
//! In a block through which the diagonal of a causal call passes, only scores below it are computed, a few rows at a
//! time. Blocks outside of a sliding window are skipped; inside a block keys before the window have scores of `−∞`.
//!
//! **Invariant**: the partition into tasks, and with it the order of every sum, depends only on the sizes of the call.
//! By vectors the bits of a query's output depend on its own keys alone, in calls of up to 2048 keys: outputs are summed
//! key by key, a hidden key adds nothing, and the sum of weights is exact. So neither padding nor other sequences around
//! a sequence change them.

mod backward;
mod forward;
mod lost;
mod program;
mod shares;
#[cfg(target_arch = "x86_64")]
mod tiled;

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use numcore::DType;
use numcore::{
    Element as _, Layout, Result, Support,
    fused::{Attention, AttentionGrad, ScoredAttention, ScoredAttentionGrad},
};

use self::program::{ScoreBlock, ScoreProgram};
use super::{Float, FusedCall, StoredFloat, half_rows, row_reduce};
use crate::{
    Cpu, CpuBuffer, Simd,
    element::Stored,
    gemm::{AOperand, Matrix, Old, PackedB},
    math::Math,
    operand::{Base, Operand},
    simd::multiversion,
};

/// Keys of one block: the depth `k` of the GEMM with values. The packed keys and values leave most of an L2 of 1 MiB.
const KEYS: usize = 256;
/// The row stride of a block of scores. It is no power of two, whose columns would map to a few sets of L1. As many
/// elements follow the last key as an A micro-panel has rows at most.
const SCORE_STRIDE: usize = KEYS + 16;
/// Queries, or keys, that are computed at once: whole A micro-panels for every instruction set, whose scores stay in
/// L1.
const ROWS: usize = 24;

/// Computes outputs and logsumexps.
pub(super) fn forward<S: StoredFloat>(call: &FusedCall<'_>, op: &Attention) -> Result<Support> {
    #[cfg(target_arch = "x86_64")]
    match tiled::takes(call, op, &call.ins[Attention::KEYS]) {
        Some(DType::BF16) => return forward::tasks(call, op, None, tiled::queries::<half::bf16, 1>),
        Some(DType::F32) => return forward::tasks(call, op, None, tiled::queries::<f32, 3>),
        _ => {}
    }
    forward::tasks::<S>(call, op, None, forward::queries)
}

/// Outputs and logsumexps of scores by a program.
pub(super) fn scored_forward<S: StoredFloat>(call: &FusedCall<'_>, op: &ScoredAttention) -> Result<Support> {
    let program = ScoreProgram::forward::<S::Lane>(call, op)?;
    forward::tasks::<S>(call, &op.attention, Some(program), forward::queries)
}

/// Gradients of queries, keys, values and the arguments of a program.
pub(super) fn scored_backward<S: StoredFloat>(call: &FusedCall<'_>, op: &ScoredAttentionGrad) -> Result<Support> {
    let is_lane = |&i: &usize| call.ins[ScoredAttentionGrad::ARGS + i].dtype == S::Lane::DTYPE;
    if !op.learned.iter().all(is_lane) {
        return Ok(Support::Decompose);
    }
    let program = ScoreProgram::backward::<S::Lane>(call, op)?;
    backward::tasks::<S>(call, &op.of.attention, Some((op, program)), false, backward::keys)
}

/// Gradients of queries, keys and values.
pub(super) fn backward<S: StoredFloat>(call: &FusedCall<'_>, op: &Attention) -> Result<Support> {
    #[cfg(target_arch = "x86_64")]
    match tiled::takes(call, op, &call.ins[AttentionGrad::KEYS]) {
        Some(DType::BF16) => return backward::tasks(call, op, None, true, tiled::keys::<half::bf16, 1>),
        Some(DType::F32) => return backward::tasks(call, op, None, true, tiled::keys::<f32, 3>),
        _ => {}
    }
    backward::tasks::<S>(call, op, None, false, backward::keys)
}

/// Sizes and options of a call.
struct AttentionProblem {
    heads: usize,
    /// The number of query heads that share one key head.
    group: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    value_depth: usize,
    /// The position of query 0 among the keys.
    offset: isize,
    /// The number of keys before and after its own position that a query sees; `None` for all of them.
    reach: [Option<usize>; 2],
    scale: f64,
    softcap: Option<f64>,
    mask: Option<Operand>,
    program: Option<ScoreProgram>,
}

impl AttentionProblem {
    fn new(op: &Attention, [q, k, v]: [&Operand; 3], mask: Option<&Operand>) -> Result<AttentionProblem> {
        let (q, k, v) = (q.layout.dims(), k.layout.dims(), v.layout.dims());
        let scores = numcore::Shape::new(&[q[0], q[1], q[2], k[2]])?;
        let mask = mask.map(|m| Ok::<_, numcore::Error>(Operand { layout: m.layout.broadcast_to(scores)?, ..*m }));
        Ok(AttentionProblem {
            heads: q[1],
            group: q[1] / k[1],
            queries: q[2],
            keys: k[2],
            depth: q[3],
            value_depth: v[3],
            offset: op.offset(q[2], k[2]),
            // A reach beyond all keys is no limit.
            reach: [op.window[0], op.right()].map(|n| n.filter(|&n| n < q[2] + k[2])),
            scale: op.scale,
            softcap: op.softcap,
            mask: mask.transpose()?,
            program: None,
        })
    }

    /// Tells whether the mask of a query is more than a triangle from the first query and key.
    fn is_banded(&self) -> bool {
        self.offset != 0 || self.reach[0].is_some() || self.reach[1].is_some_and(|n| n != 0)
    }

    /// The number of these keys up to the last key that a query sees, for a range extended in both directions.
    fn before_end(&self, query: usize, keys: &Range<usize>) -> isize {
        match self.reach[1] {
            Some(right) => query as isize + self.offset + right as isize + 1 - keys.start as isize,
            None => keys.len() as isize,
        }
    }

    /// The number of these keys up to the last key that a query sees.
    fn seen(&self, query: usize, keys: &Range<usize>) -> usize {
        self.before_end(query, keys).clamp(0, keys.len() as isize) as usize
    }

    /// The range of [`seen`](Self::seen) over consecutive queries.
    fn seen_by(&self, rows: &Range<usize>, keys: &Range<usize>) -> Seen {
        Seen { first: self.before_end(rows.start, keys), last: self.seen(rows.end - 1, keys) }
    }

    /// The first key that a query sees.
    fn start(&self, query: usize) -> usize {
        self.reach[0].map_or(0, |left| (query as isize + self.offset - left as isize).max(0) as usize)
    }

    /// Tells whether any of these queries sees any of these keys.
    fn meets(&self, rows: &Range<usize>, keys: &Range<usize>) -> bool {
        self.seen(rows.end - 1, keys) > 0 && self.start(rows.start) < keys.end
    }

    /// The number of keys up to the last one that any of these queries sees.
    fn visible(&self, rows: &Range<usize>) -> usize {
        if rows.is_empty() { 0 } else { self.seen(rows.end - 1, &(0..self.keys)) }
    }

    /// Tells whether gradients need the scores before the program.
    fn keeps_raw(&self) -> bool {
        self.program.as_ref().is_some_and(ScoreProgram::keeps_raw)
    }

    /// Scores of a few queries and those keys of a block that the last of them sees, in rows that are some elements
    /// apart; with a soft cap also its slopes, in as many rows of [`SCORE_STRIDE`] elements; with a program whose
    /// gradients need them, the scores before it.
    ///
    /// # Safety
    /// `q` is valid for these queries, and `k` has these keys.
    unsafe fn scores<S: StoredFloat>(
        &self,
        (b, h): (usize, usize),
        (rows, q): (&Range<usize>, Matrix<*const S::Lane>),
        (keys, k): (&Range<usize>, PackedB<'_, S::Lane>),
        simd: Simd,
        (s, stride): (&mut [S::Lane], usize),
        slopes: &mut [S::Lane],
    ) {
        let n = self.seen(rows.end - 1, keys);
        let scale = S::Lane::from_f64(self.softcap.map_or(self.scale, |cap| self.scale / cap));
        let to = Matrix { at: s.as_mut_ptr(), row: stride as isize, column: 1 };
        let raw = if self.keeps_raw() && !slopes.is_empty() { block(slopes) } else { to };
        // SAFETY: the caller guarantees the queries and keys; `s` is a mutable slice with a row for each query, and so
        // is `slopes`, if it is not empty.
        unsafe {
            k.gemm((rows.len(), 0..self.depth, n), AOperand::Strided(q), raw, scale, Old::Overwritten);
            if let Some(program) = &self.program {
                program.scores(simd, &ScoreBlock { at: (b, h), rows, first_key: keys.start, keys: n }, raw, to);
            }
        }
        if let Some(cap) = self.softcap {
            cap_rows(simd, (s, stride), slopes, (rows.len(), n), S::Lane::from_f64(cap));
        }
        self.add_mask::<S>((b, h), rows, keys, n, (s, stride));
        for (row, s) in rows.clone().zip(s.chunks_mut(stride)) {
            let hidden = self.start(row).saturating_sub(keys.start).min(n);
            s[..hidden].fill(S::Lane::from_f64(f64::NEG_INFINITY));
        }
    }

    /// Adds the mask, if there is one, to `n` scores of each of these rows.
    fn add_mask<S: StoredFloat>(
        &self,
        (b, h): (usize, usize),
        rows: &Range<usize>,
        keys: &Range<usize>,
        n: usize,
        (s, stride): (&mut [S::Lane], usize),
    ) {
        let Some(mask) = &self.mask else { return };
        let along = mask.layout.strides()[3];
        let values: Base<S> = mask.base();
        for (row, s) in rows.clone().zip(s.chunks_mut(stride)) {
            let first = offset(&mask.layout, [b, h, row, keys.start]);
            for (j, x) in s[..n].iter_mut().enumerate() {
                // SAFETY: a position of the mask, which was broadcast to the scores.
                *x = *x + unsafe { values.get(first + j as isize * along) }.load();
            }
        }
    }
}

fn offset(layout: &Layout, at: [usize; 4]) -> isize {
    layout.strides().iter().zip(at).map(|(s, i)| s * i as isize).sum()
}

/// A block of scores as a matrix.
fn block<T>(s: &mut [T]) -> Matrix<*mut T> {
    Matrix { at: s.as_mut_ptr(), row: SCORE_STRIDE as isize, column: 1 }
}

/// The matrix of batch `b` and head `h` of an operand `[B, H, T, D]`.
fn head<S: Stored>(x: &Operand, b: usize, h: usize) -> Matrix<*mut S> {
    let s = x.layout.strides();
    Matrix { at: x.base::<S>().at(b as isize * s[0] + h as isize * s[1]), row: s[2], column: 1 }
}

/// This matrix as read-only.
fn read<T>(m: Matrix<*mut T>) -> Matrix<*const T> {
    Matrix { at: m.at.cast_const(), row: m.row, column: m.column }
}

/// Rows of a matrix in the type they are computed in: in place, or upcast into `staging`.
///
/// # Safety
/// `m` is valid for reads of these rows, which nothing writes meanwhile.
unsafe fn upcast<S: StoredFloat>(
    simd: Simd,
    m: Matrix<*const S>,
    (rows, width): (usize, usize),
    staging: &mut [S::Lane],
) -> Matrix<*const S::Lane> {
    if S::IS_LANE {
        return Matrix { at: m.at.cast(), row: m.row, column: 1 };
    }
    for (i, to) in staging.chunks_exact_mut(width.max(1)).take(rows).enumerate() {
        // SAFETY: row `i` of those that the caller guarantees.
        half_rows::upcast(simd, unsafe { std::slice::from_raw_parts(m.offset(i, 0).at, width) }, to);
    }
    Matrix { at: staging.as_ptr(), row: width as isize, column: 1 }
}

/// The accumulators of an output: the output itself, or `staging`, from which [`store_rounded`] stores it.
fn accumulators<S: StoredFloat>(out: Matrix<*mut S>, width: usize, staging: &mut [S::Lane]) -> Matrix<*mut S::Lane> {
    if S::IS_LANE {
        return Matrix { at: out.at.cast(), row: out.row, column: 1 };
    }
    Matrix { at: staging.as_mut_ptr(), row: width as isize, column: 1 }
}

/// Rounds the sums in staging memory into the output.
///
/// # Safety
/// `out` is valid for writes of these rows, which no other thread accesses; `acc` comes from [`accumulators`].
unsafe fn store_rounded<S: StoredFloat>(
    simd: Simd,
    acc: Matrix<*mut S::Lane>,
    out: Matrix<*mut S>,
    (rows, width): (usize, usize),
) {
    if S::IS_LANE {
        return;
    }
    for i in 0..rows {
        // SAFETY: row `i` of the output and of the staging memory, which the caller guarantees.
        unsafe {
            let from = std::slice::from_raw_parts(acc.offset(i, 0).at.cast_const(), width);
            half_rows::round(simd, from, std::slice::from_raw_parts_mut(out.offset(i, 0).at, width));
        }
    }
}

/// The number of keys of a block that each query of a step sees. `first` is the number of the first query if the block
/// extended in both directions, and `last` that of the last query. The number grows by one per query, from 0 at least
/// to `last` at most.
#[derive(Clone, Copy)]
struct Seen {
    first: isize,
    last: usize,
}

impl Seen {
    /// The number of keys that query `i` after the first sees.
    #[inline(always)]
    fn of(self, i: usize) -> usize {
        (self.first + i as isize).clamp(0, self.last as isize) as usize
    }
}

multiversion! {
    /// Computes `cap · tanh` of `n` scores of each row, and its slopes if `slopes` is not empty.
    fn cap_rows<T: (Float)>(s: (&mut [T], usize), slopes: &mut [T], size: (usize, usize), cap: T) {
        let ((s, stride), (rows, n)) = (s, size);
        for i in 0..rows {
            let s = &mut s[i * stride..][..n];
            for x in s.iter_mut() {
                *x = Math::tanh(*x);
            }
            if let Some(slopes) = slopes.get_mut(i * SCORE_STRIDE..i * SCORE_STRIDE + n) {
                for (slope, &x) in slopes.iter_mut().zip(&*s) {
                    *slope = super::one::<T>() - x * x;
                }
            }
            for x in s.iter_mut() {
                *x = *x * cap;
            }
        }
    }
}

/// Consecutive chunks of `0..len`, of `size` each.
fn chunks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    chunks_of(0..len, size)
}

/// Consecutive chunks of a range.
fn chunks_of(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |from| from..range.end.min(from + size))
}

/// The number of positions of a head, out of `len`, that one task takes: a multiple of `least`. The call has `heads`
/// heads and about `tasks` tasks.
fn chunk_len(len: usize, (heads, tasks): (usize, usize), least: usize) -> usize {
    len.div_ceil(tasks.div_ceil(heads.max(1))).next_multiple_of(least).max(least)
}

/// Elements of staging memory: none where elements are stored in the type they are computed in.
const fn staging<S: StoredFloat>(elements: usize) -> usize {
    if S::IS_LANE { 0 } else { elements }
}

/// Scratch memory of one task, in buffers that begin at cache lines.
struct Scratch<T, const N: usize> {
    memory: CpuBuffer,
    sizes: [usize; N],
    _of: std::marker::PhantomData<T>,
}

impl<T: Float, const N: usize> Scratch<T, N> {
    fn new(cpu: &Cpu, sizes: [usize; N]) -> Result<Self> {
        let sizes = sizes.map(|s| s.next_multiple_of(64 / size_of::<T>()));
        let memory = cpu.scratch(sizes.iter().sum::<usize>() * size_of::<T>())?;
        Ok(Scratch { memory, sizes, _of: std::marker::PhantomData })
    }

    fn buffers(&mut self) -> [&mut [T]; N] {
        let base = Base::<T>::new(self.memory.ptr().cast());
        let mut from = 0;
        self.sizes.map(|size| {
            from += size;
            // SAFETY: the buffers do not overlap; the memory is initialised, and borrowed as long as they live.
            unsafe { base.slice_mut((from - size) as isize, size) }
        })
    }
}

/// Runs tasks that may fail; any of their errors is the call's.
fn run(call: &FusedCall<'_>, tasks: usize, task: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let failed = parking_lot::Mutex::new(None);
    call.engine().ranges(tasks, 1, |part| {
        for i in part {
            if let Err(e) = task(i) {
                *failed.lock() = Some(e);
            }
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}
