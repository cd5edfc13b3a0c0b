//! Pieces of attention by programs: queries that are computed together, with the keys that any of them sees.

use std::ops::Range;

/// Consecutive queries with the keys that they see.
pub(super) struct Piece {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// True if the mask hides some of these keys from some of the queries, as far as positions tell.
    pub(super) masked: bool,
    /// The number of scores that its blocks need.
    scores: usize,
}

impl Piece {
    pub(super) fn new(queries: Range<usize>, keys: Range<usize>, masked: bool) -> Self {
        Piece { scores: queries.len() * keys.len(), queries, keys, masked }
    }

    /// Takes the queries of the next piece too, if both see the same keys. Masked pieces may differ in keys that cost
    /// an eighth more scores at most: each piece packs its keys, and writes their gradients, once.
    pub(super) fn takes(&mut self, next: &Piece, may_widen: bool) -> bool {
        let keys = self.keys.start.min(next.keys.start)..self.keys.end.max(next.keys.end);
        let scores = self.scores + next.scores;
        let is_little = (next.queries.end - self.queries.start) * keys.len() <= scores + scores / 8;
        let is_same = self.keys == next.keys && self.masked == next.masked;
        let takes = is_same || may_widen && self.masked && next.masked && is_little;
        if takes {
            *self = Piece { queries: self.queries.start..next.queries.end, keys, masked: next.masked, scores };
        }
        takes
    }
}
