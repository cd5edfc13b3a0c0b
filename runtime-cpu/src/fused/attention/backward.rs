//! Gradients, in the same blocks: weights are recomputed from the scores and their logsumexp.
//!
//! A task owns keys: a key head's, or a part of them where there are few heads. It accumulates their gradients over all
//! queries and over all heads that share them, and the queries' gradients over its keys. Tasks that share queries have
//! partial gradients, which are added last, in the order of the keys. (A second pass over queries instead would
//! recompute the scores and two GEMMs.)

use std::ops::Range;

use numcore::{
    Element as _, Result, Support,
    fused::{Attention, AttentionGrad},
};

use smallvec::SmallVec;

use super::{super::one, shares::Shares, *};
use crate::{math::Math, simd::multiversion};

/// Queries of one block: the depth `k` of the GEMMs for gradients of keys and values.
pub(super) const QUERIES: usize = 128;
/// Tasks of a call that has fewer key heads, about: as many gradients of its queries there may be.
const TASKS: usize = 16;

/// Matrices of one query head and its key head, and the head's logsumexps.
pub(super) struct BackwardHead<'a, S: Stored> {
    pub at: (usize, usize),
    pub task: usize,
    pub g: Matrix<*const S>,
    pub o: Matrix<*const S>,
    pub lse: &'a [S::Lane],
    pub q: Matrix<*const S>,
    pub k: Matrix<*const S>,
    pub v: Matrix<*const S>,
    /// Accumulators of the queries' gradients.
    pub dq: Matrix<*mut S::Lane>,
    /// The output of the queries' gradients, if this task alone accumulates them.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "the AMX path alone does so"))]
    pub rounded: Option<Matrix<*mut S>>,
    pub dk: Matrix<*mut S>,
    pub dv: Matrix<*mut S>,
}

/// Partitions a call into key heads and chunks of their keys. `keys` computes one; if it `rounds`, it also stores
/// gradients of queries whose keys are all in its chunk.
pub(super) fn tasks<S: StoredFloat>(
    call: &FusedCall<'_>,
    op: &Attention,
    program: Option<(&ScoredAttentionGrad, ScoreProgram)>,
    rounds: bool,
    keys: impl Fn(&FusedCall<'_>, &AttentionProblem, &[BackwardHead<'_, S>], Range<usize>) -> Result<()> + Sync,
) -> Result<Support> {
    let [g, o, lse] = [AttentionGrad::GRAD, AttentionGrad::OUTPUT, AttentionGrad::LSE].map(|i| &call.ins[i]);
    let [q, k, v] = [AttentionGrad::QUERIES, AttentionGrad::KEYS, AttentionGrad::VALUES].map(|i| &call.ins[i]);
    if !lse.layout.is_contiguous() {
        return Ok(Support::Decompose);
    }
    let mask = call.ins.get(AttentionGrad::MASK).filter(|_| op.masked);
    let mut p = AttentionProblem::new(op, [q, k, v], mask)?;
    let (grad, program) = program.unzip();
    p.program = program;
    // Tasks write the contributions of their query heads to keys: without query heads, no task would write zeros.
    if p.group == 0 || lost::loses_weights::<S>(call, &p) {
        return Ok(Support::Decompose);
    }
    let key_heads = k.layout.dims()[1];
    let owners = q.layout.dims()[0] * key_heads;
    let size = chunk_len(p.keys, (owners, TASKS), 2 * KEYS);
    let count = p.keys.div_ceil(size).max(1);
    if let Some((grad, mut program)) = grad.zip(p.program.take()) {
        program.make_sums(call, grad, &p, (owners, count, size.min(p.keys)))?;
        p.program = Some(program);
    }
    let elements = owners * p.group * p.queries * p.depth;
    let separate = count - usize::from(S::IS_LANE || rounds && count == 1);
    let memory = call.cpu.scratch(separate * elements * size_of::<S::Lane>())?;
    let shares = Shares::<S> { count, separate, elements, memory: Base::new(memory.ptr().cast()) };
    run(call, owners * count, |task| {
        if let Some(program) = &p.program {
            // SAFETY: the sums of this task.
            unsafe { program.zero_sums(task) };
        }
        // The first keys of a head are seen by most queries: they go first.
        let (owner, share) = (task / count, task % count);
        let (b, kv) = (owner / key_heads, owner % key_heads);
        let mine = share * size..p.keys.min((share + 1) * size);
        let [dk, dv] = [1, 2].map(|i| head::<S>(&call.outs[i], b, kv));
        let heads = (kv * p.group..(kv + 1) * p.group).map(|h| {
            let first = (b * p.heads + h) * p.queries;
            let out = head(&call.outs[0], b, h);
            let rounded = (shares.separate == 0).then_some(out);
            let dq = shares.accumulators(share, out, first * p.depth, p.depth);
            let [g, o, q] = [g, o, q].map(|x| read(head(x, b, h)));
            let [k, v] = [k, v].map(|x| read(head(x, b, kv)));
            // SAFETY: the logsumexps of this head.
            let lse = unsafe { call.input::<S::Lane>(AttentionGrad::LSE).slice(first as isize, p.queries) };
            BackwardHead { at: (b, h), task, g, o, lse, q, k, v, dq, rounded, dk, dv }
        });
        keys(call, &p, &heads.collect::<SmallVec<[_; 4]>>(), mine)
    })?;
    shares.reduce(call, &p);
    if let Some(program) = &p.program {
        program.store::<S::Lane>(call, &p);
    }
    Ok(Support::Done)
}

/// The first `len` elements of row `i`.
///
/// # Safety
/// `m` is valid for them, and nothing writes them meanwhile.
unsafe fn row<'a, T>(m: Matrix<*const T>, i: usize, len: usize) -> &'a [T] {
    // SAFETY: the caller guarantees `len` elements of row `i`.
    unsafe { std::slice::from_raw_parts(m.offset(i, 0).at, len) }
}

/// Zeroes `rows` rows of `width` elements.
///
/// # Safety
/// `m` is valid for writes of these rows, which no other thread accesses.
unsafe fn zero<T: Float>(m: Matrix<*mut T>, (rows, width): (usize, usize)) {
    for i in 0..rows {
        // SAFETY: row `i` of those that the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(m.offset(i, 0).at, width) }.fill(T::default());
    }
}

/// The dot products of each query's upstream gradient with its output.
///
/// # Safety
/// The head's matrices have all queries.
pub(super) unsafe fn dots_of<S: StoredFloat>(
    simd: Simd,
    p: &AttentionProblem,
    h: &BackwardHead<'_, S>,
    [g_staging, o_staging]: [&mut [S::Lane]; 2],
    dots: &mut [S::Lane],
) {
    for rows in chunks(p.queries, QUERIES) {
        let size = (rows.len(), p.value_depth);
        // SAFETY: the caller guarantees that the head's matrices have all queries.
        unsafe {
            let g = upcast(simd, h.g.offset(rows.start, 0), size, g_staging);
            let o = upcast(simd, h.o.offset(rows.start, 0), size, o_staging);
            dot_rows(simd, g, o, p.value_depth, &mut dots[rows]);
        }
    }
}

/// Runs one task: these keys, and all heads that share them.
pub(super) fn keys<S: StoredFloat>(
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    heads: &[BackwardHead<'_, S>],
    mine: Range<usize>,
) -> Result<()> {
    let simd = call.engine().simd;
    let (depth, value_depth) = (p.depth, p.value_depth);
    let packed = PackedB::<S::Lane>::len;
    let mut scratch = Scratch::<S::Lane, _>::new(
        call.cpu,
        [
            packed(depth, KEYS),
            packed(value_depth, KEYS),
            packed(KEYS, depth),
            packed(QUERIES, value_depth),
            packed(QUERIES, depth),
            QUERIES * SCORE_STRIDE,
            QUERIES * SCORE_STRIDE,
            p.group * p.queries,
            staging::<S>(KEYS * depth.max(value_depth)),
            staging::<S>(QUERIES * value_depth),
            staging::<S>(QUERIES * depth.max(value_depth)),
            staging::<S>(KEYS * depth),
            staging::<S>(KEYS * value_depth),
            if p.softcap.is_some() || p.keeps_raw() { ROWS * SCORE_STRIDE } else { 0 },
            p.program.as_ref().map_or(0, ScoreProgram::learned) * ROWS * SCORE_STRIDE,
        ],
    )?;
    let [kt, vt, k, gp, qp, s, ds, dots, keys_staging, g_staging, q_staging, dk, dv, slopes, others] =
        scratch.buffers();
    // The first block overwrites, later ones accumulate, and queries that the first does not reach are zeroed. (Zeros
    // everywhere before took 1.4 % of a decoder's training step: gradients are in neither L1 nor L2.)
    let first = |keys: &Range<usize>| chunks(p.queries, QUERIES).find(|rows| p.seen(rows.end - 1, keys) > 0);
    // Where blocks in between are left out, everything is zeroed, and added to.
    let banded = p.is_banded();
    let unseen = first(&mine).filter(|_| !banded).map_or(p.queries, |rows| rows.start);
    for (h, dots) in heads.iter().zip(dots.chunks_mut(p.queries.max(1))) {
        // SAFETY: a gradient that is this task's alone, and these queries of the operands.
        unsafe {
            zero(h.dq, (unseen, depth));
            dots_of(simd, p, h, [g_staging, q_staging], dots);
        }
    }
    let mut add = Adds { dq: Old::added(banded), dk: Old::added(banded) };
    for keys in chunks_of(mine, KEYS) {
        let Some(any) = heads.first() else { break };
        let n = keys.len();
        let [dk_out, dv_out] = [any.dk, any.dv].map(|m| m.offset(keys.start, 0));
        let (dk, dv) = (accumulators(dk_out, depth, &mut *dk), accumulators(dv_out, value_depth, &mut *dv));
        // SAFETY: these keys of the operands, and gradients of them that are this task's alone.
        let right = unsafe {
            let written = first(&keys).filter(|_| !banded).map_or(0, |rows| p.seen(rows.end - 1, &keys));
            zero(dk.offset(written, 0), (n - written, depth));
            zero(dv.offset(written, 0), (n - written, value_depth));
            let key = upcast(simd, any.k.offset(keys.start, 0), (n, depth), keys_staging);
            let (kt, k) =
                (PackedB::new(simd, key.transposed(), (depth, n), kt), PackedB::new(simd, key, (n, depth), k));
            let value = upcast(simd, any.v.offset(keys.start, 0), (n, value_depth), keys_staging);
            Right { dk, dv, kt, k, vt: PackedB::new(simd, value.transposed(), (value_depth, n), vt) }
        };
        add.dk = Old::added(banded);
        for (h, dots) in heads.iter().zip(dots.chunks(p.queries.max(1))) {
            for rows in chunks(p.queries, QUERIES).filter(|rows| p.meets(rows, &keys)) {
                // SAFETY: these queries of the operands.
                let left = unsafe {
                    let g = upcast(simd, h.g.offset(rows.start, 0), (rows.len(), value_depth), g_staging);
                    let q = upcast(simd, h.q.offset(rows.start, 0), (rows.len(), depth), q_staging);
                    Left {
                        g,
                        q,
                        packed_g: PackedB::new(simd, g, (rows.len(), value_depth), gp),
                        packed_q: PackedB::new(simd, q, (rows.len(), depth), qp),
                    }
                };
                block_grads(call, p, h, (&rows, &keys), (&right, &left), ([s, ds, slopes, others], dots), add);
                add.dk = Old::Added;
            }
        }
        add.dq = Old::Added;
        // SAFETY: these keys' gradients, which are this task's alone.
        unsafe {
            store_rounded(simd, dk, dk_out, (n, depth));
            store_rounded(simd, dv, dv_out, (n, value_depth));
        }
    }
    Ok(())
}

/// The keys and values, packed, and the accumulators of their gradients.
struct Right<'a, T> {
    dk: Matrix<*mut T>,
    dv: Matrix<*mut T>,
    kt: PackedB<'a, T>,
    vt: PackedB<'a, T>,
    k: PackedB<'a, T>,
}

/// A block's upstream gradients and queries: as A operands against keys and values, and packed as B operands for sums
/// over queries.
struct Left<'a, T> {
    g: Matrix<*const T>,
    q: Matrix<*const T>,
    packed_g: PackedB<'a, T>,
    packed_q: PackedB<'a, T>,
}

/// The gradients to which a block adds its contribution; it overwrites the old values of the others.
#[derive(Clone, Copy)]
struct Adds {
    dq: Old,
    /// The use of the old gradients of keys and of values.
    dk: Old,
}

/// Computes what one block of queries and keys contributes to the gradients.
fn block_grads<S: StoredFloat>(
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    h: &BackwardHead<'_, S>,
    (rows, keys): (&Range<usize>, &Range<usize>),
    (right, left): (&Right<'_, S::Lane>, &Left<'_, S::Lane>),
    ([s, ds, slopes, others], dots): ([&mut [S::Lane]; 4], &[S::Lane]),
    add: Adds,
) {
    let most = p.seen(rows.end - 1, keys);
    for step in chunks_of(rows.clone(), ROWS).filter(|step| p.seen(step.end - 1, keys) > 0) {
        let (n, first) = (p.seen(step.end - 1, keys), step.start - rows.start);
        let at = first * SCORE_STRIDE..(step.end - rows.start) * SCORE_STRIDE;
        let (s, ds) = (&mut s[at.clone()], &mut ds[at]);
        // SAFETY: these queries of the operands, and their gradients, which are this task's alone.
        unsafe {
            let (q, to, simd) = (left.q.offset(first, 0), (&mut *s, SCORE_STRIDE), call.engine().simd);
            p.scores::<S>(h.at, (&step, q), (keys, right.kt), simd, to, slopes);
            let upstream = AOperand::Strided(left.g.offset(first, 0));
            right.vt.gemm((step.len(), 0..p.value_depth, n), upstream, block(ds), one(), Old::Overwritten);
            score_grads(
                call.engine().simd,
                s,
                ds,
                &h.lse[step.clone()],
                &dots[step.clone()],
                Seen { last: most, ..p.seen_by(&step, keys) },
                p.most(),
            );
            if p.softcap.is_some() {
                scale_by_slopes(call.engine().simd, ds, slopes, p.seen_by(&step, keys), step.len());
            }
            if let Some(program) = p.program.as_ref().filter(|program| program.keeps_raw()) {
                let of = ScoreBlock { at: h.at, rows: &step, first_key: keys.start, keys: n };
                let to = (block(slopes), block(ds));
                program.slopes(call.engine().simd, (&of, p.seen_by(&step, keys)), to, others, (p.group, h.task));
            }
            let (ds, dq) = (AOperand::Strided(read(block(ds))), h.dq.offset(step.start, 0));
            right.k.gemm((step.len(), 0..n, p.depth), ds, dq, S::Lane::from_f64(p.scale), add.dq);
        }
    }
    for step in chunks_of(keys.start..keys.start + most, ROWS) {
        // Queries before this one see none of the step.
        let sees = |right| step.start as isize - p.offset - right as isize - rows.start as isize;
        let from = p.reach[1].map_or(0, |right| sees(right).clamp(0, rows.len() as isize) as usize);
        let first = step.start - keys.start;
        let transposed = |s: &mut [S::Lane]| AOperand::Transposed(read(block(s)).offset(from, first).transposed());
        let sizes = |columns| (step.len(), from..rows.len(), columns);
        let scale = S::Lane::from_f64(p.scale);
        // SAFETY: gradients of keys that are this task's alone.
        unsafe {
            left.packed_g.gemm(sizes(p.value_depth), transposed(s), right.dv.offset(first, 0), one(), add.dk);
            left.packed_q.gemm(sizes(p.depth), transposed(ds), right.dk.offset(first, 0), scale, add.dk);
        }
    }
}

multiversion! {
    /// Turns scores into weights, and gradients of weights into unscaled gradients of scores; both are 0 where a query
    /// sees no key. `seen` extends to the largest number of keys that a query of the block sees.
    fn score_grads<T: (Float)>(s: &mut [T], ds: &mut [T], lse: &[T], dots: &[T], seen: Seen, far: T) {
        for (i, (&lse, &dot)) in lse.iter().zip(dots).enumerate() {
            let (here, most) = (seen.of(i), seen.last);
            let end = here.next_multiple_of(row_reduce::LANES);
            let (s, ds) = (&mut s[i * SCORE_STRIDE..][..KEYS], &mut ds[i * SCORE_STRIDE..][..KEYS]);
            if here < end.max(most) {
                s[here..end].fill(T::from_f64(f64::NEG_INFINITY));
                s[end.min(most)..most].fill(T::default());
                ds[here..end.max(most)].fill(T::default());
            }
            // A query that saw nothing has no finite logsumexp, and no weight; where the weights are lost, so is the
            // upstream gradient 0.
            let none = lse == T::from_f64(f64::NEG_INFINITY) || lse < -far || lse > far;
            let (unit, base) = if none { (T::default(), T::default()) } else { (one(), lse) };
            for (s, d) in s[..end].iter_mut().zip(&mut ds[..end]) {
                *s = Math::exp2_flushed((*s - base) * T::LOG2E) * unit;
                *d = *s * (*d - dot);
            }
        }
    }

    /// Multiplies gradients of capped scores by the cap's slopes.
    fn scale_by_slopes<T: (Float)>(ds: &mut [T], slopes: &[T], seen: Seen, rows: usize) {
        for i in 0..rows {
            let here = seen.of(i);
            for (d, &slope) in ds[i * SCORE_STRIDE..][..here].iter_mut().zip(&slopes[i * SCORE_STRIDE..][..here]) {
                *d = *d * slope;
            }
        }
    }

    /// The dot products of each query's upstream gradient with its output.
    fn dot_rows<T: (Float)>(g: Matrix<*const T>, o: Matrix<*const T>, width: usize, dots: &mut [T]) {
        for (i, dot) in dots.iter_mut().enumerate() {
            // SAFETY: rows of operands that `numcore` checked, one for each query.
            let (g, o) = unsafe { (row(g, i, width), row(o, i, width)) };
            *dot = row_reduce::sum2(g, o, [row_reduce::Prefetch::behind(g), row_reduce::Prefetch::behind(o)], |g, o| g * o);
        }
    }
}
