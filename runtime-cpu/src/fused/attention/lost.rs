//! Queries whose weights cannot be recomputed from a score and their logsumexp. A mask shifted all their scores so far
//! that the logarithm of the sum of weights is lost in rounding. (Every key is padding, and the mask is finite.)

use numcore::Element as _;

use super::*;

impl AttentionProblem {
    /// Tells whether all scores of a query may be shifted by one number.
    fn shifts(&self) -> bool {
        self.mask.is_some() || self.program.is_some()
    }

    /// The score magnitude above which a query's logsumexp determines its weights to fewer than three digits, if a mask
    /// shifted the scores there.
    pub(super) fn most<T: Float>(&self) -> T {
        T::from_f64(match (self.shifts(), size_of::<T>()) {
            (false, _) => f64::INFINITY,
            (true, 4) => 2f64.powi(13),
            (true, _) => 2f64.powi(42),
        })
    }
}

/// Tells whether there is a query with a nonzero gradient whose weights cannot be recomputed from its logsumexp. A mask
/// that shifts all scores of a query far away (every key is padding) loses the logarithm of the sum of weights in
/// rounding.
pub(super) fn loses_weights<S: StoredFloat>(call: &FusedCall<'_>, p: &AttentionProblem) -> bool {
    let (g, most) = (&call.ins[AttentionGrad::GRAD], p.most::<S::Lane>());
    if !p.shifts() {
        return false;
    }
    let head_loses = |i: usize| {
        let g = read(head::<S>(g, i / p.heads, i % p.heads));
        // SAFETY: this head's logsumexps and rows of the upstream gradient.
        let (lse, row) = unsafe {
            let row = move |at| std::slice::from_raw_parts(g.offset(at, 0).at, p.value_depth);
            (call.input::<S::Lane>(AttentionGrad::LSE).slice((i * p.queries) as isize, p.queries), row)
        };
        let lost = |&lse: &S::Lane| (lse > most || lse < -most) && lse != S::Lane::from_f64(f64::NEG_INFINITY);
        let moves = |at: usize| row(at).iter().any(|g| g.load() != S::Lane::default());
        lse.iter().enumerate().any(|(at, lse)| lost(lse) && moves(at))
    };
    (0..call.ins[AttentionGrad::QUERIES].layout.dims()[0] * p.heads).any(head_loses)
}
