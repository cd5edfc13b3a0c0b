//! Gradients of queries that several tasks have a share in.

use super::{super::grain, *};

/// The memory in which gradients of queries are accumulated. The first chunk of keys uses the output, if the output is
/// stored in the type of computation. Other chunks use workspace, `[chunks, heads, queries, depth]`.
pub(super) struct Shares<S: Stored> {
    pub count: usize,
    /// The number of chunks that have memory of their own.
    pub separate: usize,
    pub elements: usize,
    pub memory: Base<S::Lane>,
}

impl<S: StoredFloat> Shares<S> {
    /// The accumulators of a chunk of keys, for a head's queries, whose output is `out` and whose first element has
    /// index `first`.
    pub(super) fn accumulators(
        &self,
        share: usize,
        out: Matrix<*mut S>,
        first: usize,
        depth: usize,
    ) -> Matrix<*mut S::Lane> {
        match share.checked_sub(self.count - self.separate) {
            Some(i) => {
                Matrix { at: self.memory.at((i * self.elements + first) as isize), row: depth as isize, column: 1 }
            }
            None => Matrix { at: out.at.cast(), row: out.row, column: 1 },
        }
    }

    /// Adds the partial gradients of all chunks in order, and rounds the result.
    pub(super) fn reduce(&self, call: &FusedCall<'_>, p: &AttentionProblem) {
        if self.separate == 0 {
            return;
        }
        let rows = self.elements / p.depth.max(1);
        call.engine().ranges(rows, grain(p.depth), |part| {
            half_rows::each::<S, 1>(part, p.depth, |row, [staging]| {
                let (i, at) = (row / p.queries, row % p.queries);
                let out = head::<S>(&call.outs[0], i / p.heads, i % p.heads).offset(at, 0);
                // SAFETY: a row of the output, which no other task writes, and of the workspace.
                let (to, from) = unsafe {
                    let part = |i| self.memory.slice((i * self.elements + row * p.depth) as isize, p.depth);
                    (std::slice::from_raw_parts_mut(out.at, p.depth), (0..self.separate).map(part))
                };
                half_rows::write(call.engine().simd, to, staging, |to| {
                    for (i, from) in from.enumerate() {
                        match i {
                            0 if !S::IS_LANE => to.copy_from_slice(from),
                            _ => to.iter_mut().zip(from).for_each(|(t, &f)| *t = *t + f),
                        }
                    }
                });
            });
        });
    }
}
