//! Attention in blocks of queries and keys with an online softmax (Dao 2023): scores exist one block at a time, so memory is
//! linear in the sequence length.

use std::ops::Range;

use numcore::{Layout, Result, Support, fused::Attention};

use super::{Call, Float, lanes, one, softmax::finite};
use crate::{
    Simd,
    math::Math,
    matmul,
    operand::{Base, Operand},
    simd::leveled,
};

/// Queries of one block.
pub(super) const QUERIES: usize = 128;
/// Keys of one block.
pub(super) const KEYS: usize = 256;

/// Sizes and operands of a call.
pub(super) struct Problem {
    pub heads: usize,
    /// Query heads that share one key head.
    pub group: usize,
    pub queries: usize,
    pub keys: usize,
    pub depth: usize,
    pub value_depth: usize,
    pub causal: bool,
    pub scale: f64,
    pub mask: Option<Operand>,
}

/// One head's matrix: `row` elements from one row to the next, neighbours in a row.
#[derive(Clone, Copy)]
pub(super) struct Matrix<T> {
    pub start: *mut T,
    pub row: isize,
}

impl<T> Matrix<T> {
    pub(super) fn at(self, row: usize) -> Matrix<T> {
        Matrix { start: self.start.wrapping_offset(row as isize * self.row), row: self.row }
    }
}

/// The matrix of batch `b` and head `h` of an operand `[B, H, T, D]`.
pub(super) fn head<T: Float>(x: &Operand, b: usize, h: usize) -> Matrix<T> {
    let s = x.layout.strides();
    let start = x.base::<T>().at(b as isize * s[0] + h as isize * s[1]);
    Matrix { start, row: s[2] }
}

impl Problem {
    pub(super) fn new(
        op: &Attention,
        q: &Operand,
        k: &Operand,
        v: &Operand,
        mask: Option<&Operand>,
    ) -> Result<Problem> {
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
            causal: op.causal,
            scale: op.scale,
            mask: mask.transpose()?,
        })
    }

    /// The keys that queries `rows` may see.
    pub(super) fn visible(&self, rows: &Range<usize>) -> usize {
        if self.causal { self.keys.min(rows.end) } else { self.keys }
    }

    /// Scaled and masked scores of a block of queries and keys, row by row into `s`, `keys.len()` to a row.
    pub(super) fn scores<T: Float>(
        &self,
        simd: Simd,
        (b, h): (usize, usize),
        (rows, q): (&Range<usize>, Matrix<T>),
        (keys, k): (&Range<usize>, Matrix<T>),
        s: &mut [T],
    ) {
        let n = keys.len();
        product(
            simd,
            [rows.len(), self.depth, n],
            (s.as_mut_ptr(), n as isize, 1),
            (q.at(rows.start).start, q.row, 1),
            (k.at(keys.start).start, 1, k.row),
            T::from_f64(self.scale),
            false,
        );
        for (i, row) in s.chunks_exact_mut(n).take(rows.len()).enumerate() {
            if let Some(mask) = &self.mask {
                let strides = mask.layout.strides();
                let first = offset(&mask.layout, [b, h, rows.start + i, keys.start]);
                let mask: Base<T> = mask.base();
                for (j, x) in row.iter_mut().enumerate() {
                    // SAFETY: a position of the mask, which was broadcast to the scores.
                    *x = *x + unsafe { mask.get(first + j as isize * strides[3]) };
                }
            }
            if self.causal {
                let seen = (rows.start + i + 1).saturating_sub(keys.start).min(n);
                row[seen..].fill(T::from_f64(f64::NEG_INFINITY));
            }
        }
    }
}

fn offset(layout: &Layout, at: [usize; 4]) -> isize {
    layout.strides().iter().zip(at).map(|(s, i)| s * i as isize).sum()
}

/// `c = scale · a · b (+ c)` for `a: [m, k]`, `b: [k, n]`, each as its start and its strides along rows and columns.
pub(super) fn product<T: Float>(
    simd: Simd,
    sizes: [usize; 3],
    c: (*mut T, isize, isize),
    a: (*mut T, isize, isize),
    b: (*mut T, isize, isize),
    scale: T,
    add: bool,
) {
    let factor = |(at, row, column): (*mut T, isize, isize)| matmul::Matrix { at: at.cast_const(), row, column };
    let out = matmul::Matrix { at: c.0, row: c.1, column: c.2 };
    // SAFETY: callers pass blocks of operands checked by `numcore`, or of scratch memory, of these sizes; `c` overlaps neither.
    unsafe { matmul::product(simd, sizes, out, factor(a), factor(b), scale, add) }
}

/// Blocks of `size` of `0..len`.
pub(super) fn blocks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(size)).map(move |i| i * size..len.min((i + 1) * size))
}

pub(super) fn forward<T: Float>(call: &Call<'_>, op: &Attention) -> Result<Support> {
    let [q, k, v] = [0, 1, 2].map(|i| &call.ins[i]);
    let problem = Problem::new(op, q, k, v, call.ins.get(3))?;
    let batches = q.layout.dims()[0];
    let per_head = problem.queries.div_ceil(QUERIES);
    let lse = call.output::<T>(1);
    let failed = parking_lot::Mutex::new(None);
    call.engine().ranges(batches * problem.heads * per_head, 1, |part| {
        for task in part {
            let (block, head_at) = (task % per_head, task / per_head);
            let (b, h) = (head_at / problem.heads, head_at % problem.heads);
            let rows = block * QUERIES..problem.queries.min((block + 1) * QUERIES);
            let matrices = [head::<T>(q, b, h), head(k, b, h / problem.group), head(v, b, h / problem.group)];
            let out = head::<T>(&call.outs[0], b, h);
            // SAFETY: these queries' places of the output, which are this task's alone.
            let lse = unsafe { lse.slice_mut((head_at * problem.queries + rows.start) as isize, rows.len()) };
            if let Err(e) = queries(call, &problem, (b, h), rows, matrices, out, lse) {
                *failed.lock() = Some(e);
            }
        }
    });
    failed.into_inner().map_or(Ok(Support::Done), Err)
}

/// One block of queries against all keys it may see.
fn queries<T: Float>(
    call: &Call<'_>,
    p: &Problem,
    at: (usize, usize),
    rows: Range<usize>,
    [q, k, v]: [Matrix<T>; 3],
    out: Matrix<T>,
    lse: &mut [T],
) -> Result<()> {
    let simd = call.engine().simd;
    let memory = call.cpu.scratch(QUERIES * (KEYS + 2) * size_of::<T>())?;
    let base = Base::<T>::new(memory.ptr().cast());
    // SAFETY: scratch memory of this size, initialised, which nothing else sees; three parts of it.
    let (s, top, sum) = unsafe {
        let end = (QUERIES * KEYS) as isize;
        (
            base.slice_mut(0, QUERIES * KEYS),
            base.slice_mut(end, rows.len()),
            base.slice_mut(end + QUERIES as isize, rows.len()),
        )
    };
    top.fill(T::from_f64(f64::NEG_INFINITY));
    sum.fill(T::default());
    for i in 0..rows.len() {
        // SAFETY: this block's rows of the output, which are this task's alone.
        unsafe { std::slice::from_raw_parts_mut(out.at(rows.start + i).start, p.value_depth) }.fill(T::default());
    }
    for keys in blocks(p.visible(&rows), KEYS) {
        let n = keys.len();
        p.scores(simd, at, (&rows, q), (&keys, k), s);
        for (i, row) in s.chunks_exact_mut(n).take(rows.len()).enumerate() {
            // SAFETY: as above.
            let o = unsafe { std::slice::from_raw_parts_mut(out.at(rows.start + i).start, p.value_depth) };
            online(simd, row, o, &mut top[i], &mut sum[i]);
        }
        let o = (out.at(rows.start).start, out.row, 1);
        product(
            simd,
            [rows.len(), n, p.value_depth],
            o,
            (s.as_mut_ptr(), n as isize, 1),
            (v.at(keys.start).start, v.row, 1),
            one::<T>(),
            true,
        );
    }
    for i in 0..rows.len() {
        lse[i] = finite(top[i]) + Math::log(sum[i]);
        // SAFETY: as above.
        let o = unsafe { std::slice::from_raw_parts_mut(out.at(rows.start + i).start, p.value_depth) };
        let inverse = if sum[i] == T::default() { T::default() } else { one::<T>() / sum[i] };
        o.iter_mut().for_each(|x| *x = *x * inverse);
    }
    Ok(())
}

leveled! {
    /// Turns a row of scores into weights relative to the largest score so far, and rescales what was gathered before.
    fn online<T: (Float)>(row: &mut [T], out: &mut [T], top: &mut T, sum: &mut T) {
        let new = lanes::larger(*top, lanes::max(row));
        let base = finite(new);
        let before = Math::exp(*top - base);
        for x in row.iter_mut() {
            *x = Math::exp(*x - base);
        }
        if *top != new {
            for o in out.iter_mut() {
                *o = *o * before;
            }
            *sum = *sum * before;
        }
        *sum = *sum + lanes::sum(row);
        *top = new;
    }
}
