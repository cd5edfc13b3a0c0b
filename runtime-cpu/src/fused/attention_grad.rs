//! Gradients of attention, in the same blocks: probabilities are computed again from the scores and their logsumexp. One task
//! owns one key head, with all query heads that share it, so every gradient is added up in a fixed order.

use std::ops::Range;

use numcore::{Result, Support, fused::Attention};

use super::{
    Call, Float,
    attention::{KEYS, Matrix, Problem, QUERIES, blocks, head, product},
    lanes, one,
};
use crate::{math::Math, operand::Base, simd::leveled};

/// Matrices of one query head and its key head.
struct Head<T> {
    at: (usize, usize),
    g: Matrix<T>,
    o: Matrix<T>,
    q: Matrix<T>,
    k: Matrix<T>,
    v: Matrix<T>,
    dq: Matrix<T>,
    dk: Matrix<T>,
    dv: Matrix<T>,
}

pub(super) fn backward<T: Float>(call: &Call<'_>, op: &Attention) -> Result<Support> {
    let [g, o, _, q, k, v] = [0, 1, 2, 3, 4, 5].map(|i| &call.ins[i]);
    if !call.ins[2].layout.is_contiguous() {
        return Ok(Support::Decompose);
    }
    let problem = Problem::new(op, q, k, v, call.ins.get(6))?;
    let (batches, key_heads) = (q.layout.dims()[0], k.layout.dims()[1]);
    let failed = parking_lot::Mutex::new(None);
    call.engine().ranges(batches * key_heads, 1, |part| {
        for task in part {
            let (b, kv) = (task / key_heads, task % key_heads);
            for h in kv * problem.group..(kv + 1) * problem.group {
                let [dq, dk, dv] = [(0, h), (1, kv), (2, kv)].map(|(i, h)| head::<T>(&call.outs[i], b, h));
                let heads = Head {
                    at: (b, h),
                    g: head(g, b, h),
                    o: head(o, b, h),
                    q: head(q, b, h),
                    k: head(k, b, kv),
                    v: head(v, b, kv),
                    dq,
                    dk,
                    dv,
                };
                if let Err(e) = one_head(call, &problem, &heads, h == kv * problem.group) {
                    *failed.lock() = Some(e);
                }
            }
        }
    });
    failed.into_inner().map_or(Ok(Support::Done), Err)
}

/// `rows` rows of `width` elements of an output.
fn zero<T: Float>(m: Matrix<T>, rows: usize, width: usize) {
    for i in 0..rows {
        // SAFETY: a row of an output head, which is this task's alone.
        unsafe { std::slice::from_raw_parts_mut(m.at(i).start, width) }.fill(T::default());
    }
}

fn one_head<T: Float>(call: &Call<'_>, p: &Problem, h: &Head<T>, first: bool) -> Result<()> {
    let memory = call.cpu.scratch((2 * QUERIES * KEYS + QUERIES) * size_of::<T>())?;
    let base = Base::<T>::new(memory.ptr().cast());
    let block = (QUERIES * KEYS) as isize;
    // SAFETY: three parts of scratch memory of this size, initialised, which nothing else sees.
    let (s, ds, dots) = unsafe {
        (base.slice_mut(0, QUERIES * KEYS), base.slice_mut(block, QUERIES * KEYS), base.slice_mut(2 * block, QUERIES))
    };
    zero(h.dq, p.queries, p.depth);
    if first {
        zero(h.dk, p.keys, p.depth);
        zero(h.dv, p.keys, p.value_depth);
    }
    let lse = (h.at.0 * p.heads + h.at.1) * p.queries;
    for rows in blocks(p.queries, QUERIES) {
        // SAFETY: the logsumexp of these queries.
        let lse = unsafe { call.input::<T>(2).slice((lse + rows.start) as isize, rows.len()) };
        for (i, dot) in dots.iter_mut().enumerate().take(rows.len()) {
            // SAFETY: rows of the upstream gradient and of the output.
            let (g, o) =
                unsafe { (row(h.g.at(rows.start + i), p.value_depth), row(h.o.at(rows.start + i), p.value_depth)) };
            *dot = lanes::sum2(g, o, |g, o| g * o);
        }
        for keys in blocks(p.visible(&rows), KEYS) {
            one_block(call, p, h, (&rows, &keys), (s, ds), (lse, dots));
        }
    }
    Ok(())
}

/// # Safety
/// The row has `len` elements that nothing writes meanwhile.
unsafe fn row<'a, T>(m: Matrix<T>, len: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(m.start, len) }
}

fn one_block<T: Float>(
    call: &Call<'_>,
    p: &Problem,
    h: &Head<T>,
    (rows, keys): (&Range<usize>, &Range<usize>),
    (s, ds): (&mut [T], &mut [T]),
    (lse, dots): (&[T], &[T]),
) {
    let (m, n, simd) = (rows.len(), keys.len(), call.engine().simd);
    let block = |x: &mut [T]| (x.as_mut_ptr(), n as isize, 1);
    let across = |x: &mut [T]| (x.as_mut_ptr(), 1, n as isize);
    let down = |m: Matrix<T>, at: usize| (m.at(at).start, m.row, 1);
    let turned = |m: Matrix<T>, at: usize| (m.at(at).start, 1, m.row);
    p.scores(simd, h.at, (rows, h.q), (keys, h.k), s);
    product(simd, [m, p.value_depth, n], block(ds), down(h.g, rows.start), turned(h.v, keys.start), one::<T>(), false);
    let scale = T::from_f64(p.scale);
    for i in 0..m {
        let at = i * n..(i + 1) * n;
        score_grads(simd, &mut s[at.clone()], &mut ds[at], lse[i], dots[i], scale);
    }
    product(simd, [n, m, p.value_depth], down(h.dv, keys.start), across(s), down(h.g, rows.start), one::<T>(), true);
    product(simd, [m, n, p.depth], down(h.dq, rows.start), block(ds), down(h.k, keys.start), one::<T>(), true);
    product(simd, [n, m, p.depth], down(h.dk, keys.start), across(ds), down(h.q, rows.start), one::<T>(), true);
}

leveled! {
    /// Scores become probabilities, gradients of probabilities become gradients of raw scores.
    fn score_grads<T: (Float)>(s: &mut [T], ds: &mut [T], lse: T, dot: T, scale: T) {
        // A query that saw nothing has no finite logsumexp, and no probability.
        let seen = if lse == T::from_f64(f64::NEG_INFINITY) { T::default() } else { one::<T>() };
        let base = if seen == one::<T>() { lse } else { T::default() };
        for (s, d) in s.iter_mut().zip(ds) {
            *s = Math::exp(*s - base) * seen;
            *d = *s * (*d - dot) * scale;
        }
    }
}
