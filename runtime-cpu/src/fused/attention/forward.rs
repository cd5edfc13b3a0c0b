//! Attention forward: outputs and logsumexps.

use std::ops::Range;

use numcore::{Result, Support, fused::Attention};

use smallvec::SmallVec;

use super::{super::one, super::softmax::finite, *};
use crate::{gemm::Old, machine::Machine, math::Math, simd::multiversion};

/// The smallest number of queries of one task, which share the packed keys and values.
const QUERIES: usize = 256;
/// Tasks of a call that has fewer heads, about.
const TASKS: usize = 32;
/// Steps of [`ROWS`] queries that share a block of keys where all keys and values do not fit into L2.
const LONG_STEPS: usize = 4;

/// The most bytes of packed keys and values that a task keeps for its next queries.
const KEPT: usize = 8 << 20;
/// The largest number of keys over which outputs are summed key by key, so that their bits do not depend on where a
/// block begins. A longer chain of additions would lose digits: blocks of more keys are summed one by one.
const CHAINED: usize = 2048;

/// Matrices of one query head and its key head.
pub(super) struct ForwardHead<S> {
    pub at: (usize, usize),
    pub q: Matrix<*const S>,
    pub k: Matrix<*const S>,
    pub v: Matrix<*const S>,
    pub o: Matrix<*mut S>,
}

/// Partitions a call into heads and groups of their queries; `queries` computes one, and its logsumexps.
pub(super) fn tasks<S: StoredFloat>(
    call: &FusedCall<'_>,
    op: &Attention,
    program: Option<ScoreProgram>,
    queries: impl Fn(&FusedCall<'_>, &AttentionProblem, &ForwardHead<S>, Range<usize>, &mut [S::Lane]) -> Result<()> + Sync,
) -> Result<Support> {
    let [q, k, v] = [Attention::QUERIES, Attention::KEYS, Attention::VALUES].map(|i| &call.ins[i]);
    let mask = call.ins.get(Attention::MASK).filter(|_| op.masked);
    let p = AttentionProblem { program, ..AttentionProblem::new(op, [q, k, v], mask)? };
    let heads = q.layout.dims()[0] * p.heads;
    let size = chunk_len(p.queries, (heads, TASKS), QUERIES);
    let groups = p.queries.div_ceil(size);
    run(call, heads * groups, |task| {
        // The last queries of a head see most keys: they go first.
        let (i, group) = (task / groups, groups - 1 - task % groups);
        let (b, h) = (i / p.heads, i % p.heads);
        let [q, k, v] = [head(q, b, h), head(k, b, h / p.group), head(v, b, h / p.group)].map(read);
        let h = ForwardHead { at: (b, h), q, k, v, o: head::<S>(&call.outs[Attention::OUTPUT], b, h) };
        let rows = group * size..p.queries.min((group + 1) * size);
        // SAFETY: these queries' elements of the output, which no other task accesses.
        let lse = unsafe {
            call.output::<S::Lane>(Attention::LSE).slice_mut((i * p.queries + rows.start) as isize, rows.len())
        };
        queries(call, &p, &h, rows, lse)
    })?;
    Ok(Support::Done)
}

/// Computes these queries against all keys they see. All scores of a few queries exist before their largest is known,
/// and with it their weights. Outputs are accumulated in scratch memory, since their rows may be far apart, and
/// half-precision ones are rounded once.
pub(super) fn queries<S: StoredFloat>(
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    h: &ForwardHead<S>,
    rows: Range<usize>,
    lse: &mut [S::Lane],
) -> Result<()> {
    let simd = call.engine().simd;
    let visible = p.visible(&rows);
    let packed = [PackedB::<S::Lane>::len(p.depth, KEYS), PackedB::<S::Lane>::len(KEYS, p.value_depth)];
    // The first key of the first block that a query sees.
    let origin = p.start(rows.start).min(visible) / KEYS * KEYS;
    let blocks = (visible - origin).div_ceil(KEYS).max(1);
    let old = if p.keys <= CHAINED { Old::Continued } else { Old::Added };
    // Keys and values beyond L2 are read for more queries at a time.
    let bytes = blocks * (packed[0] + packed[1]) * size_of::<S::Lane>();
    let most = if bytes <= Machine::get().l2 / 2 { 1 } else { LONG_STEPS };
    let group = (most * ROWS).min(rows.len());
    // Blocks that one group alone reads are packed where the next ones will be. So are more than can be kept.
    let kept = if group == rows.len() || bytes > KEPT { 1 } else { blocks };
    let stride = blocks * KEYS + (SCORE_STRIDE - KEYS);
    let mut scratch = Scratch::<S::Lane, _>::new(
        call.cpu,
        [
            kept * packed[0],
            kept * packed[1],
            group.next_multiple_of(ROWS) * stride,
            group * p.value_depth,
            group,
            group,
            staging::<S>(KEYS * p.depth.max(p.value_depth)),
            staging::<S>(ROWS * p.depth),
        ],
    )?;
    let [keys_packed, values_packed, s, o, top, sum, keys_staging, queries_staging] = scratch.buffers();
    let mut is_packed: SmallVec<[[bool; 2]; 32]> = SmallVec::from_elem([false; 2], blocks);
    for group in chunks_of(rows.clone(), group.max(1)) {
        let len = group.len();
        let blocks = || chunks(visible, KEYS).filter(|keys| p.meets(&group, keys));
        let steps = |keys: Range<usize>| chunks_of(group.clone(), ROWS).filter(move |step| p.meets(step, &keys));
        for keys in blocks() {
            let (n, i) = (keys.len(), (keys.start - origin) / KEYS);
            let to = &mut keys_packed[i % kept * packed[0]..][..packed[0]];
            if kept == 1 || !std::mem::replace(&mut is_packed[i][0], true) {
                // SAFETY: these keys of the operand.
                unsafe {
                    let k = upcast(simd, h.k.offset(keys.start, 0), (n, p.depth), keys_staging);
                    PackedB::new(simd, k.transposed(), (p.depth, n), to);
                }
            }
            let k = PackedB::of_packed(simd, (p.depth, n), to);
            for step in steps(keys.clone()) {
                let s = &mut s[(step.start - group.start) * stride + keys.start - origin..];
                // SAFETY: these queries of the operand.
                unsafe {
                    let q = upcast(simd, h.q.offset(step.start, 0), (step.len(), p.depth), queries_staging);
                    p.scores::<S>(h.at, (&step, q), (&keys, k), simd, (s, stride), &mut []);
                }
            }
        }
        let (top, sum) = (&mut top[..len], &mut sum[..len]);
        for step in chunks_of(group.clone(), ROWS) {
            let at = step.start - group.start..step.end - group.start;
            // The blocks that have a key that a query of the step sees.
            let (start, end) = (p.start(step.start), p.visible(&step));
            let all = if start < end { start / KEYS * KEYS..end } else { 0..0 };
            let s = &mut s[at.start * stride + all.start.max(origin) - origin..];
            weights(simd, (s, stride), &mut top[at.clone()], &mut sum[at], p.seen_by(&step, &all));
        }
        let o = &mut o[..len * p.value_depth];
        o.fill(S::Lane::default());
        for keys in blocks() {
            let (n, i) = (keys.len(), (keys.start - origin) / KEYS);
            let to = &mut values_packed[i % kept * packed[1]..][..packed[1]];
            if kept == 1 || !std::mem::replace(&mut is_packed[i][1], true) {
                // SAFETY: these values of the operand.
                unsafe {
                    let v = upcast(simd, h.v.offset(keys.start, 0), (n, p.value_depth), keys_staging);
                    PackedB::new(simd, v, (n, p.value_depth), to);
                }
            }
            let v = PackedB::of_packed(simd, (n, p.value_depth), to);
            for step in steps(keys.clone()) {
                let first = step.start - group.start;
                let weights =
                    Matrix { at: s[first * stride + keys.start - origin..].as_ptr(), row: stride as isize, column: 1 };
                let to = &mut o[first * p.value_depth..];
                let to = Matrix { at: to.as_mut_ptr(), row: p.value_depth as isize, column: 1 };
                let size = (step.len(), 0..p.seen(step.end - 1, &keys), p.value_depth);
                // SAFETY: weights of these queries, and their rows of the output.
                unsafe { v.gemm(size, AOperand::Strided(weights), to, one(), old) };
            }
        }
        let lse = &mut lse[group.start - rows.start..][..len];
        finish(simd, o, h.o.offset(group.start, 0), lse, top, sum);
    }
    Ok(())
}

multiversion! {
    /// Turns scores into weights relative to the largest of their row, whose sums have no order.
    fn weights<T: (Float)>(s: (&mut [T], usize), top: &mut [T], sum: &mut [T], seen: Seen) {
        let (s, stride) = s;
        // Rows are independent: first all largest scores are found, then all weights.
        for (i, top) in top.iter_mut().enumerate() {
            let here = seen.of(i);
            let row = &mut s[i * stride..][..here.next_multiple_of(row_reduce::LANES)];
            row[here..].fill(T::from_f64(f64::NEG_INFINITY));
            *top = row_reduce::greatest(T::from_f64(f64::NEG_INFINITY), row);
        }
        for (i, (&top, sum)) in top.iter().zip(sum).enumerate() {
            let end = seen.of(i).next_multiple_of(row_reduce::LANES);
            let row = &mut s[i * stride..][..end.max(seen.last)];
            let base = finite(top);
            *sum = row_reduce::update_exact_sum(&mut row[..end], |x| Math::exp2_flushed((x - base) * T::LOG2E));
            row[end..].fill(T::default());
        }
    }

    /// Divides by the sums of the weights; `out` has the rows of these queries, which are this task's alone.
    fn finish<S: (StoredFloat)>(
        o: &[S::Lane], out: Matrix<*mut S>, lse: &mut [S::Lane], top: &[S::Lane], sum: &[S::Lane],
    ) {
        let (zero, width) = (S::Lane::default(), o.len() / top.len());
        for (i, (&top, &sum)) in top.iter().zip(sum).enumerate() {
            lse[i] = finite(top) + Math::log(sum);
            let inverse = if sum == zero { zero } else { one::<S::Lane>() / sum };
            // SAFETY: a row of the output.
            let to = unsafe { std::slice::from_raw_parts_mut(out.offset(i, 0).at, width) };
            for (to, &x) in to.iter_mut().zip(&o[i * width..]) {
                *to = S::store(x * inverse);
            }
        }
    }
}
