//! Gradients, in the same blocks: weights are computed again from the scores and their logsumexp.
//!
//! A task owns keys: a key head's, or a part of them where there are few heads. It adds up their gradients over all queries and over
//! all heads that share them, and the queries' gradients over its keys. Tasks that share queries have a gradient each, and those are
//! added up last, in the order of the keys. (A second pass over queries instead would compute the scores and two products again.)

use std::ops::Range;

use numcore::{Result, Support, fused::Attention};

use super::{super::one, *};
use crate::{math::Math, simd::leveled};

/// Queries of one block: sums of so many steps for the gradients of keys and values.
const QUERIES: usize = 128;
/// Tasks of a call that has fewer key heads, about: as many gradients of its queries there may be.
const TASKS: usize = 16;

/// Matrices of one query head and its key head, and the head's logsumexps.
struct Head<'a, T> {
    at: (usize, usize),
    g: Matrix<*const T>,
    o: Matrix<*const T>,
    lse: &'a [T],
    q: Matrix<*const T>,
    k: Matrix<*const T>,
    v: Matrix<*const T>,
    dq: Matrix<*mut T>,
    dk: Matrix<*mut T>,
    dv: Matrix<*mut T>,
}

pub(in super::super) fn backward<T: Float>(call: &Call<'_>, op: &Attention) -> Result<Support> {
    let [g, o, lse, q, k, v] = [0, 1, 2, 3, 4, 5].map(|i| &call.ins[i]);
    if !lse.layout.is_contiguous() {
        return Ok(Support::Decompose);
    }
    let p = Problem::new(op, [q, k, v], call.ins.get(6))?;
    let key_heads = k.layout.dims()[1];
    let owners = q.layout.dims()[0] * key_heads;
    let size = share(p.keys, (owners, TASKS), 2 * KEYS);
    let shares = p.keys.div_ceil(size).max(1);
    let numbers = owners * p.group * p.queries * p.depth;
    let others = call.cpu.scratch((shares - 1) * numbers * size_of::<T>())?;
    let others = Base::<T>::new(others.ptr().cast());
    run(call, owners * shares, |task| {
        // The first keys are seen by most queries: they go first.
        let (owner, share) = (task % owners, task / owners);
        let (b, kv) = (owner / key_heads, owner % key_heads);
        let mine = share * size..p.keys.min((share + 1) * size);
        let [dk, dv] = [1, 2].map(|i| head(&call.outs[i], b, kv));
        // SAFETY: gradients of keys and values that are this task's alone.
        unsafe {
            zero(dk, mine.clone(), p.depth);
            zero(dv, mine.clone(), p.value_depth);
        }
        let heads = (kv * p.group..(kv + 1) * p.group).map(|h| {
            let first = (b * p.heads + h) * p.queries;
            let dq = match share {
                0 => head(&call.outs[0], b, h),
                _ => {
                    let at = others.at(((share - 1) * numbers + first * p.depth) as isize);
                    Matrix { at, row: p.depth as isize, column: 1 }
                }
            };
            let [g, o, q] = [g, o, q].map(|x| read(head(x, b, h)));
            let [k, v] = [k, v].map(|x| read(head(x, b, kv)));
            // SAFETY: the logsumexps of this head.
            let lse = unsafe { call.input::<T>(2).slice(first as isize, p.queries) };
            Head { at: (b, h), g, o, lse, q, k, v, dq, dk, dv }
        });
        keys(call, &p, heads, mine)
    })?;
    add_up(call, (shares - 1, others), numbers);
    Ok(Support::Done)
}

/// Adds what the other shares of the keys gave to the first one's.
fn add_up<T: Float>(call: &Call<'_>, (others, from): (usize, Base<T>), numbers: usize) {
    if others == 0 {
        return;
    }
    call.engine().ranges(numbers, 1 << 14, |part| {
        // SAFETY: a part of the output, which is this task's alone, and of the others' memory.
        let to = unsafe { call.output::<T>(0).slice_mut(part.start as isize, part.len()) };
        for i in 0..others {
            // SAFETY: as above.
            let from = unsafe { from.slice((i * numbers + part.start) as isize, part.len()) };
            to.iter_mut().zip(from).for_each(|(t, &f)| *t = *t + f);
        }
    });
}

/// `len` numbers of a row.
///
/// # Safety
/// The row has them, and nothing writes them meanwhile.
unsafe fn row<'a, T>(m: Matrix<*const T>, i: usize, len: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(m.part(i, 0).at, len) }
}

/// Zeros in these rows of `width` numbers.
///
/// # Safety
/// They are rows of a gradient, and nothing else sees them.
unsafe fn zero<T: Float>(m: Matrix<*mut T>, rows: Range<usize>, width: usize) {
    for i in rows {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(m.part(i, 0).at, width) }.fill(T::default());
    }
}

/// One task: these keys, and all heads that share them.
fn keys<'a, T: Float>(
    call: &Call<'_>,
    p: &Problem,
    heads: impl Iterator<Item = Head<'a, T>> + Clone,
    mine: Range<usize>,
) -> Result<()> {
    let simd = call.engine().simd;
    let packed = [
        Packed::<T>::room(p.depth, KEYS),
        Packed::<T>::room(p.value_depth, KEYS),
        Packed::<T>::room(KEYS, p.depth),
        Packed::<T>::room(QUERIES, p.value_depth),
        Packed::<T>::room(QUERIES, p.depth),
    ];
    let rest = [QUERIES * LINE, QUERIES * LINE, p.group * p.queries];
    let mut scratch =
        Scratch::new(call.cpu, std::array::from_fn::<_, 8, _>(|i| if i < 5 { packed[i] } else { rest[i - 5] }))?;
    let [kt, vt, k, gp, qp, s, ds, dots] = scratch.parts();
    for (h, dots) in heads.clone().zip(dots.chunks_mut(p.queries.max(1))) {
        // SAFETY: a gradient that is this task's alone.
        unsafe { zero(h.dq, 0..p.queries, p.depth) };
        dot_rows(simd, h.g, h.o, p.value_depth, &mut dots[..p.queries]);
    }
    for keys in parts(mine, KEYS) {
        let Some(any) = heads.clone().next() else { break };
        let n = keys.len();
        // SAFETY: these keys of the operands.
        let right = unsafe {
            let [key, value] = [any.k, any.v].map(|m| m.part(keys.start, 0));
            Right {
                kt: Packed::new(simd, key.turned(), (p.depth, n), kt),
                vt: Packed::new(simd, value.turned(), (p.value_depth, n), vt),
                k: Packed::new(simd, key, (n, p.depth), k),
            }
        };
        for (h, dots) in heads.clone().zip(dots.chunks(p.queries.max(1))) {
            for rows in pieces(p.queries, QUERIES).filter(|rows| p.seen(rows.end - 1, &keys) > 0) {
                // SAFETY: these queries of the operands.
                let left = unsafe {
                    let (g, q) = (h.g.part(rows.start, 0), h.q.part(rows.start, 0));
                    let g = Packed::new(simd, g, (rows.len(), p.value_depth), gp);
                    [g, Packed::new(simd, q, (rows.len(), p.depth), qp)]
                };
                block_of(call, p, &h, (&rows, &keys), (&right, left), (s, ds, dots));
            }
        }
    }
    Ok(())
}

/// Keys and values, packed.
struct Right<'a, T> {
    kt: Packed<'a, T>,
    vt: Packed<'a, T>,
    k: Packed<'a, T>,
}

/// What one block of queries and keys adds to the gradients.
fn block_of<T: Float>(
    call: &Call<'_>,
    p: &Problem,
    h: &Head<'_, T>,
    (rows, keys): (&Range<usize>, &Range<usize>),
    (right, [g, q]): (&Right<'_, T>, [Packed<'_, T>; 2]),
    (s, ds, dots): (&mut [T], &mut [T], &[T]),
) {
    let most = p.seen(rows.end - 1, keys);
    for step in parts(rows.clone(), STEP) {
        let n = p.seen(step.end - 1, keys);
        let at = (step.start - rows.start) * LINE..(step.end - rows.start) * LINE;
        let (s, ds) = (&mut s[at.clone()], &mut ds[at]);
        // SAFETY: these queries of the operands, and their gradients, which are this task's alone.
        unsafe {
            p.scores(h.at, (&step, h.q), (keys, right.kt), s);
            let upstream = Left::Strided(h.g.part(step.start, 0));
            right.vt.times((step.len(), 0..p.value_depth, n), upstream, block(ds), one(), false);
            score_grads(
                call.engine().simd,
                s,
                ds,
                &h.lse[step.clone()],
                &dots[step.clone()],
                Seen { first: p.seen(step.start, keys), last: most },
            );
            let (ds, dq) = (Left::Strided(read(block(ds))), h.dq.part(step.start, 0));
            right.k.times((step.len(), 0..n, p.depth), ds, dq, T::from_f64(p.scale), true);
        }
    }
    for step in parts(keys.start..keys.start + most, STEP) {
        // Queries before this one see none of the step.
        let from = if p.causal { step.start.saturating_sub(rows.start) } else { 0 };
        let turned = |s: &mut [T]| Left::Turned(read(block(s)).part(from, step.start - keys.start).turned());
        let sizes = |columns| (step.len(), from..rows.len(), columns);
        // SAFETY: gradients of keys that are this task's alone.
        unsafe {
            g.times(sizes(p.value_depth), turned(s), h.dv.part(step.start, 0), one(), true);
            q.times(sizes(p.depth), turned(ds), h.dk.part(step.start, 0), T::from_f64(p.scale), true);
        }
    }
}

leveled! {
    /// Scores become weights, gradients of weights become gradients of scores before they are scaled; both are 0 where a query sees
    /// no key. `seen` goes up to the most that a query of the block sees.
    fn score_grads<T: (Float)>(s: &mut [T], ds: &mut [T], lse: &[T], dots: &[T], seen: Seen) {
        for (i, (&lse, &dot)) in lse.iter().zip(dots).enumerate() {
            let (here, most) = (seen.of(i), seen.last);
            let end = here.next_multiple_of(lanes::LANES);
            let (s, ds) = (&mut s[i * LINE..][..KEYS], &mut ds[i * LINE..][..KEYS]);
            if here < end.max(most) {
                s[here..end].fill(T::from_f64(f64::NEG_INFINITY));
                s[end.min(most)..most].fill(T::default());
                ds[here..end.max(most)].fill(T::default());
            }
            // A query that saw nothing has no finite logsumexp, and no weight.
            let none = lse == T::from_f64(f64::NEG_INFINITY);
            let (unit, base) = if none { (T::default(), T::default()) } else { (one(), lse * T::LOG2E) };
            for (s, d) in s[..end].iter_mut().zip(&mut ds[..end]) {
                *s = Math::exp2_flushed(*s - base) * unit;
                *d = *s * (*d - dot);
            }
        }
    }

    /// The products of each query's upstream gradient with its output.
    fn dot_rows<T: (Float)>(g: Matrix<*const T>, o: Matrix<*const T>, width: usize, dots: &mut [T]) {
        for (i, dot) in dots.iter_mut().enumerate() {
            // SAFETY: rows of operands that `numcore` checked, one for each query.
            *dot = unsafe { lanes::sum2(row(g, i, width), row(o, i, width), |g, o| g * o) };
        }
    }
}
