//! Attention in blocks of queries and keys with an online softmax (Dao, *FlashAttention-2*, 2023): scores exist one block at a time,
//! so memory is linear in the sequence length.
//!
//! Keys and values are packed once per block of keys, and all queries of a task pass over them. Scores are in units of log 2, so that
//! weights are powers of two. Where the diagonal of a causal call passes through a block, only what is below it is computed, a step of
//! rows at a time. Blocks that lie outside of a sliding window are left out; inside of a block what lies before it has
//! scores of `−∞`.
//!
//! **Invariant**: tasks, and with them the order of every sum, are cut by the sizes of the call alone.

mod backward;
mod forward;
mod lost;
#[cfg(target_arch = "x86_64")]
mod tiled;

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use numcore::DType;
use numcore::{Element as _, Layout, Result, Support, fused::Attention};

use super::{Call, Float, Number, lanes, lines};
use crate::{
    Buffer, Cpu, Simd,
    element::Stored,
    gemm::{AOperand, Matrix, PackedB},
    math::{Math, Real},
    operand::{Base, Operand},
    simd::multiversion,
};

/// Keys of one block: sums of so many steps, and their packed keys and values still leave most of an L2 of 1 MiB.
const KEYS: usize = 256;
/// From one row of a block of scores to the next: not a power of two, whose columns would share a few sets of L1. As many
/// numbers follow the last key as a strip has rows at most.
const LINE: usize = KEYS + 16;
/// Queries, or keys, that are computed at once: whole strips at every level, whose scores stay in L1.
const STEP: usize = 24;

/// Outputs and logsumexps.
pub(super) fn forward<S: Number>(call: &Call<'_>, op: &Attention) -> Result<Support> {
    #[cfg(target_arch = "x86_64")]
    match tiled::takes(call, op, &call.ins[1]) {
        Some(DType::BF16) => return forward::tasks(call, op, tiled::queries::<half::bf16, 1>),
        Some(DType::F32) => return forward::tasks(call, op, tiled::queries::<f32, 3>),
        _ => {}
    }
    forward::tasks::<S>(call, op, forward::queries)
}

/// Gradients of queries, keys and values.
pub(super) fn backward<S: Number>(call: &Call<'_>, op: &Attention) -> Result<Support> {
    #[cfg(target_arch = "x86_64")]
    match tiled::takes(call, op, &call.ins[4]) {
        Some(DType::BF16) => return backward::tasks(call, op, true, tiled::keys::<half::bf16, 1>),
        Some(DType::F32) => return backward::tasks(call, op, true, tiled::keys::<f32, 3>),
        _ => {}
    }
    backward::tasks::<S>(call, op, false, backward::keys)
}

/// Sizes and options of a call.
struct Problem {
    heads: usize,
    /// Query heads that share one key head.
    group: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    value_depth: usize,
    /// Where query 0 stands among the keys.
    offset: isize,
    /// How many keys before and after its own position a query sees.
    reach: [Option<usize>; 2],
    scale: f64,
    softcap: Option<f64>,
    mask: Option<Operand>,
}

impl Problem {
    fn new(op: &Attention, [q, k, v]: [&Operand; 3], mask: Option<&Operand>) -> Result<Problem> {
        let (q, k, v) = (q.layout.dims(), k.layout.dims(), v.layout.dims());
        let scores = numcore::Shape::new(&[q[0], q[1], q[2], k[2]])?;
        let mask = mask.map(|m| Ok::<_, numcore::Error>(Operand { layout: m.layout.broadcast_to(scores)?, ..*m }));
        Ok(Problem {
            heads: q[1],
            group: q[1] / k[1],
            queries: q[2],
            keys: k[2],
            depth: q[3],
            value_depth: v[3],
            offset: op.offset(q[2], k[2]),
            // More than all there are is all there are.
            reach: [op.window[0], op.right()].map(|n| n.filter(|&n| n < q[2] + k[2])),
            scale: op.scale,
            softcap: op.softcap,
            mask: mask.transpose()?,
        })
    }

    /// Whether there is more to what a query sees than a triangle from the first query and key.
    fn is_banded(&self) -> bool {
        self.offset != 0 || self.reach[0].is_some() || self.reach[1].is_some_and(|n| n != 0)
    }

    /// How many of these keys lie before the end of what a query sees, if they go on in both directions.
    fn before_end(&self, query: usize, keys: &Range<usize>) -> isize {
        match self.reach[1] {
            Some(right) => query as isize + self.offset + right as isize + 1 - keys.start as isize,
            None => keys.len() as isize,
        }
    }

    /// How many of these keys lie before the end of what a query sees.
    fn seen(&self, query: usize, keys: &Range<usize>) -> usize {
        self.before_end(query, keys).clamp(0, keys.len() as isize) as usize
    }

    /// The same of consecutive queries.
    fn seen_by(&self, rows: &Range<usize>, keys: &Range<usize>) -> Seen {
        Seen { first: self.before_end(rows.start, keys), last: self.seen(rows.end - 1, keys) }
    }

    /// The first key a query sees.
    fn start(&self, query: usize) -> usize {
        self.reach[0].map_or(0, |left| (query as isize + self.offset - left as isize).max(0) as usize)
    }

    /// Whether any of these queries sees any of these keys.
    fn meets(&self, rows: &Range<usize>, keys: &Range<usize>) -> bool {
        self.seen(rows.end - 1, keys) > 0 && self.start(rows.start) < keys.end
    }

    /// The keys that any of these queries sees.
    fn visible(&self, rows: &Range<usize>) -> usize {
        if rows.is_empty() { 0 } else { self.seen(rows.end - 1, &(0..self.keys)) }
    }

    /// Scores of a few queries and those keys of a block that the last of them sees, in units of log 2, [`LINE`]
    /// numbers to a row; with a soft cap its slopes, in as many rows.
    ///
    /// # Safety
    /// These queries lie at `q`, and the block has these keys.
    unsafe fn scores<S: Number>(
        &self,
        (b, h): (usize, usize),
        (rows, q): (&Range<usize>, Matrix<*const S::Lane>),
        (keys, k): (&Range<usize>, PackedB<'_, S::Lane>),
        simd: Simd,
        s: &mut [S::Lane],
        slopes: &mut [S::Lane],
    ) {
        let n = self.seen(rows.end - 1, keys);
        let unit = if self.mask.is_some() { 1.0 } else { std::f64::consts::LOG2_E };
        let scale = S::Lane::from_f64(self.softcap.map_or(self.scale * unit, |cap| self.scale / cap));
        // SAFETY: the caller's promise; the scores are nobody else's.
        unsafe { k.gemm((rows.len(), 0..self.depth, n), AOperand::Strided(q), block(s), scale, false) };
        if let Some(cap) = self.softcap {
            cap_rows(simd, s, slopes, (rows.len(), n), S::Lane::from_f64(cap * unit));
        }
        self.add_mask::<S>((b, h), rows, keys, n, s);
        for (row, s) in rows.clone().zip(s.chunks_exact_mut(LINE)) {
            let hidden = self.start(row).saturating_sub(keys.start).min(n);
            s[..hidden].fill(S::Lane::from_f64(f64::NEG_INFINITY));
        }
    }

    /// Adds the mask, if there is one, to `n` scores of each of these rows, and makes their unit log 2.
    fn add_mask<S: Number>(
        &self,
        (b, h): (usize, usize),
        rows: &Range<usize>,
        keys: &Range<usize>,
        n: usize,
        s: &mut [S::Lane],
    ) {
        let Some(mask) = &self.mask else { return };
        let (along, lowest) = (mask.layout.strides()[3], lowest::<S::Lane>());
        let values: Base<S> = mask.base();
        for (row, s) in rows.clone().zip(s.chunks_exact_mut(LINE)) {
            let first = offset(&mask.layout, [b, h, row, keys.start]);
            for (j, x) in s[..n].iter_mut().enumerate() {
                // SAFETY: a position of the mask, which was broadcast to the scores.
                let score = *x + unsafe { values.get(first + j as isize * along) }.load();
                let log = score * S::Lane::LOG2E;
                // The lowest number hides a key as `−∞` does only where there are others: it must stay a number.
                *x = if score >= lowest && log < lowest { lowest } else { log };
            }
        }
    }
}

/// The lowest finite number.
fn lowest<T: Float>() -> T {
    T::from_f64(if size_of::<T>() == 4 { f32::MIN.into() } else { f64::MIN })
}

fn offset(layout: &Layout, at: [usize; 4]) -> isize {
    layout.strides().iter().zip(at).map(|(s, i)| s * i as isize).sum()
}

/// A block of scores as a matrix.
fn block<T>(s: &mut [T]) -> Matrix<*mut T> {
    Matrix { at: s.as_mut_ptr(), row: LINE as isize, column: 1 }
}

/// The matrix of batch `b` and head `h` of an operand `[B, H, T, D]`.
fn head<S: Stored>(x: &Operand, b: usize, h: usize) -> Matrix<*mut S> {
    let s = x.layout.strides();
    Matrix { at: x.base::<S>().at(b as isize * s[0] + h as isize * s[1]), row: s[2], column: 1 }
}

/// The same, to be read.
fn read<T>(m: Matrix<*mut T>) -> Matrix<*const T> {
    Matrix { at: m.at.cast_const(), row: m.row, column: m.column }
}

/// Rows of a matrix as they are computed with: where they are, or upcast into `aside`.
///
/// # Safety
/// The rows lie in their operand, which nothing writes meanwhile.
unsafe fn wide<S: Number>(
    simd: Simd,
    m: Matrix<*const S>,
    (rows, width): (usize, usize),
    aside: &mut [S::Lane],
) -> Matrix<*const S::Lane> {
    if S::WIDE {
        return Matrix { at: m.at.cast(), row: m.row, column: 1 };
    }
    for (i, to) in aside.chunks_exact_mut(width.max(1)).take(rows).enumerate() {
        // SAFETY: the caller's promise.
        lines::widen(simd, unsafe { std::slice::from_raw_parts(m.offset(i, 0).at, width) }, to);
    }
    Matrix { at: aside.as_ptr(), row: width as isize, column: 1 }
}

/// Where numbers of an output are added up: in it, or in `aside`, from where [`settle`] brings them.
fn sums<S: Number>(out: Matrix<*mut S>, width: usize, aside: &mut [S::Lane]) -> Matrix<*mut S::Lane> {
    if S::WIDE {
        return Matrix { at: out.at.cast(), row: out.row, column: 1 };
    }
    Matrix { at: aside.as_mut_ptr(), row: width as isize, column: 1 }
}

/// Rounds what was added up aside.
///
/// # Safety
/// These rows are the output's, and no other thread accesses them meanwhile; the sums are those of [`sums`].
unsafe fn settle<S: Number>(
    simd: Simd,
    sums: Matrix<*mut S::Lane>,
    out: Matrix<*mut S>,
    (rows, width): (usize, usize),
) {
    if S::WIDE {
        return;
    }
    for i in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            let from = std::slice::from_raw_parts(sums.offset(i, 0).at.cast_const(), width);
            lines::round(simd, from, std::slice::from_raw_parts_mut(out.offset(i, 0).at, width));
        }
    }
}

/// How many keys of a block the queries of a step see: the first, if the block went on in both directions, and the
/// last; from one to the next it is one more, but none before the block and no more than the last.
#[derive(Clone, Copy)]
struct Seen {
    first: isize,
    last: usize,
}

impl Seen {
    /// How many keys the query that comes so many after the first sees.
    #[inline(always)]
    fn of(self, i: usize) -> usize {
        (self.first + i as isize).clamp(0, self.last as isize) as usize
    }
}

multiversion! {
    /// `cap · tanh` of `n` scores of each row, and its slope if there is room for it.
    fn cap_rows<T: (Float)>(s: &mut [T], slopes: &mut [T], size: (usize, usize), cap: T) {
        let (rows, n) = size;
        for i in 0..rows {
            let s = &mut s[i * LINE..][..n];
            for x in s.iter_mut() {
                *x = Math::tanh(*x);
            }
            if let Some(slopes) = slopes.get_mut(i * LINE..i * LINE + n) {
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

/// Consecutive pieces of `0..len`, of `size` each.
fn pieces(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    parts(0..len, size)
}

/// Consecutive pieces of a range.
fn parts(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |from| from..range.end.min(from + size))
}

/// How many of `len` positions of a head a task takes, if a call of so many heads is to have about so many tasks: a multiple of `least`.
fn share(len: usize, (heads, tasks): (usize, usize), least: usize) -> usize {
    len.div_ceil(tasks.div_ceil(heads.max(1))).next_multiple_of(least).max(least)
}

/// Numbers to compute aside: none where they are stored as they are computed with.
const fn aside<S: Number>(numbers: usize) -> usize {
    if S::WIDE { 0 } else { numbers }
}

/// Memory of one task, in parts that begin at cache lines.
struct Scratch<T, const N: usize> {
    memory: Buffer,
    sizes: [usize; N],
    _of: std::marker::PhantomData<T>,
}

impl<T: Float, const N: usize> Scratch<T, N> {
    fn new(cpu: &Cpu, sizes: [usize; N]) -> Result<Self> {
        let sizes = sizes.map(|s| s.next_multiple_of(64 / size_of::<T>()));
        let memory = cpu.scratch(sizes.iter().sum::<usize>() * size_of::<T>())?;
        Ok(Scratch { memory, sizes, _of: std::marker::PhantomData })
    }

    fn parts(&mut self) -> [&mut [T]; N] {
        let base = Base::<T>::new(self.memory.ptr().cast());
        let mut from = 0;
        self.sizes.map(|size| {
            from += size;
            // SAFETY: parts of this memory that do not overlap; it is initialised, and borrowed as long as they live.
            unsafe { base.slice_mut((from - size) as isize, size) }
        })
    }
}

/// Runs tasks that may fail; any of their errors is the call's.
fn run(call: &Call<'_>, tasks: usize, task: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
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
