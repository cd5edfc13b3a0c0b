//! Attention forward: outputs and logsumexps.

use std::ops::Range;

use numcore::{Element as _, Result, Support, fused::Attention};

use super::{super::one, super::softmax::finite, *};
use crate::{
    math::{Math, Real as _},
    simd::multiversion,
};

/// The smallest number of queries of one task, which share the packed keys and values.
const QUERIES: usize = 256;
/// Tasks of a call that has fewer heads, about.
const TASKS: usize = 32;

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
    queries: impl Fn(&FusedCall<'_>, &AttentionProblem, &ForwardHead<S>, Range<usize>, &mut [S::Lane]) -> Result<()> + Sync,
) -> Result<Support> {
    let [q, k, v] = [Attention::QUERIES, Attention::KEYS, Attention::VALUES].map(|i| &call.ins[i]);
    let p = AttentionProblem::new(op, [q, k, v], call.ins.get(Attention::MASK))?;
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

/// Computes these queries against all keys they see. Outputs are accumulated in scratch memory, since their rows may be
/// far apart, and half-precision ones are rounded once.
pub(super) fn queries<S: StoredFloat>(
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    h: &ForwardHead<S>,
    rows: Range<usize>,
    lse: &mut [S::Lane],
) -> Result<()> {
    let simd = call.engine().simd;
    let mut scratch = Scratch::<S::Lane, _>::new(
        call.cpu,
        [
            PackedB::<S::Lane>::len(p.depth, KEYS),
            PackedB::<S::Lane>::len(KEYS, p.value_depth),
            ROWS * SCORE_STRIDE,
            rows.len() * p.value_depth,
            rows.len(),
            rows.len(),
            staging::<S>(KEYS * p.depth.max(p.value_depth)),
            staging::<S>(ROWS * p.depth),
        ],
    )?;
    let [keys_packed, values_packed, s, o, top, sum, keys_staging, queries_staging] = scratch.buffers();
    let [top, sum] = [top, sum].map(|x| &mut x[..rows.len()]);
    let o = &mut o[..rows.len() * p.value_depth];
    top.fill(S::Lane::from_f64(f64::NEG_INFINITY));
    sum.fill(S::Lane::default());
    o.fill(S::Lane::default());
    for keys in chunks(p.visible(&rows), KEYS).filter(|keys| p.meets(&rows, keys)) {
        let n = keys.len();
        // SAFETY: these keys of the operands.
        let (k, v) = unsafe {
            let k = upcast(simd, h.k.offset(keys.start, 0), (n, p.depth), keys_staging);
            let k = PackedB::new(simd, k.transposed(), (p.depth, n), keys_packed);
            let v = upcast(simd, h.v.offset(keys.start, 0), (n, p.value_depth), keys_staging);
            (k, PackedB::new(simd, v, (n, p.value_depth), values_packed))
        };
        for step in chunks_of(rows.clone(), ROWS).filter(|step| p.meets(step, &keys)) {
            // SAFETY: these queries of the operand.
            unsafe {
                let q = upcast(simd, h.q.offset(step.start, 0), (step.len(), p.depth), queries_staging);
                p.scores::<S>(h.at, (&step, q), (&keys, k), simd, s, &mut []);
            }
            let at = step.start - rows.start..step.end - rows.start;
            let seen = p.seen_by(&step, &keys);
            let o = &mut o[at.start * p.value_depth..at.end * p.value_depth];
            weights(simd, s, o, &mut top[at.clone()], &mut sum[at], seen);
            let o = Matrix { at: o.as_mut_ptr(), row: p.value_depth as isize, column: 1 };
            // SAFETY: weights of these queries, and their rows of the output.
            unsafe {
                v.gemm((step.len(), 0..seen.last, p.value_depth), AOperand::Strided(read(block(s))), o, one(), true)
            };
        }
    }
    finish(simd, o, h.o.offset(rows.start, 0), lse, top, sum);
    Ok(())
}

multiversion! {
    /// Turns scores into weights relative to the largest score so far, and rescales the outputs so far.
    fn weights<T: (Float)>(s: &mut [T], o: &mut [T], top: &mut [T], sum: &mut [T], seen: Seen) {
        let width = o.len() / top.len();
        let mut before = [T::default(); ROWS];
        // Rows are independent: first all largest scores are found, then all weights.
        for (i, top) in top.iter_mut().enumerate() {
            let here = seen.of(i);
            let row = &mut s[i * SCORE_STRIDE..][..here.next_multiple_of(row_reduce::LANES)];
            row[here..].fill(T::from_f64(f64::NEG_INFINITY));
            before[i] = *top;
            *top = row_reduce::greatest(*top, row);
        }
        for (i, (&top, sum)) in top.iter().zip(sum).enumerate() {
            let row = &mut s[i * SCORE_STRIDE..][..KEYS];
            let end = seen.of(i).next_multiple_of(row_reduce::LANES);
            let base = finite(top);
            let row_sum = row_reduce::update_sum(&mut row[..end], |x| Math::exp2_flushed(x - base));
            if end < seen.last {
                row[end..seen.last].fill(T::default());
            }
            if before[i] != top {
                let factor = Math::exp2_flushed(before[i] - base);
                for x in &mut o[i * width..(i + 1) * width] {
                    *x = *x * factor;
                }
                *sum = *sum * factor;
            }
            *sum = *sum + row_sum;
        }
    }

    /// Divides by the sums of the weights; `out` has the rows of these queries, which are this task's alone.
    fn finish<S: (StoredFloat)>(
        o: &[S::Lane], out: Matrix<*mut S>, lse: &mut [S::Lane], top: &[S::Lane], sum: &[S::Lane],
    ) {
        let (zero, width, low) = (S::Lane::default(), o.len() / top.len(), lowest::<S::Lane>());
        for (i, (&top, &sum)) in top.iter().zip(sum).enumerate() {
            // Scores that were the lowest finite value before the change of units must still be.
            lse[i] = if top == low { low } else { finite(top) * S::Lane::LN2 + Math::log(sum) };
            let inverse = if sum == zero { zero } else { one::<S::Lane>() / sum };
            // SAFETY: a row of the output.
            let to = unsafe { std::slice::from_raw_parts_mut(out.offset(i, 0).at, width) };
            for (to, &x) in to.iter_mut().zip(&o[i * width..]) {
                *to = S::store(x * inverse);
            }
        }
    }
}
