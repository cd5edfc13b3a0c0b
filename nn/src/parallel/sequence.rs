//! Parts of a sequence: the tokens that one rank has.

use std::ops::Range;

use numcore::{
    Result,
    ops::{Apply, ViewOps, cat},
};

/// The tokens of a sequence on this rank, in order, as ranges of the whole sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencePart {
    tokens: usize,
    ranges: Vec<Range<usize>>,
}

impl SequencePart {
    /// All of a sequence of `tokens` tokens.
    pub fn whole(tokens: usize) -> Self {
        SequencePart::of(tokens, std::iter::once(0..tokens))
    }

    /// The concatenation of `ranges` of a sequence of `tokens` tokens. Adjacent ranges are merged, empty ones dropped.
    pub fn of(tokens: usize, ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match joined.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => joined.push(range),
            }
        }
        SequencePart { tokens, ranges: joined }
    }

    /// Part `k` of `n` equal parts of this part, for a further cut; `n` divides its length.
    pub(crate) fn slice(&self, k: usize, n: usize) -> Self {
        let each = self.len() / n.max(1);
        let (mut skip, mut left) = (k * each, each);
        let ranges = self.ranges.iter().map(|range| {
            let start = range.start + skip.min(range.len());
            let end = start + left.min(range.end - start);
            (skip, left) = (skip.saturating_sub(range.len()), left - (end - start));
            start..end
        });
        SequencePart::of(self.tokens, ranges.collect::<Vec<_>>())
    }

    /// The number of tokens of the whole sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of tokens on this rank.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// True if there is no token on this rank.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// True if all tokens are on this rank, in their order.
    pub fn is_whole(&self) -> bool {
        self.ranges == SequencePart::whole(self.tokens).ranges
    }

    /// The ranges of the whole sequence on this rank, in this rank's order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// This rank's part of a value with all tokens along `dim`; a view if the tokens are consecutive.
    #[track_caller]
    pub fn take<T: Apply>(&self, x: &T, dim: usize) -> Result<T> {
        if self.is_whole() {
            return Ok(x.clone());
        }
        let piece = |range: &Range<usize>| x.narrow(dim as isize, range.start, range.len());
        match &self.ranges[..] {
            [] => x.narrow(dim as isize, 0, 0),
            [range] => piece(range),
            ranges => {
                let pieces = ranges.iter().map(piece).collect::<Result<Vec<_>>>()?;
                cat(&pieces.iter().collect::<Vec<_>>(), dim as isize)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_a_part_are_its_tokens_in_order() {
        let tokens = |part: &SequencePart| part.ranges().iter().cloned().flatten().collect::<Vec<_>>();
        let part = SequencePart::of(24, [3..6, 6..9, 12..12, 15..21]);
        assert_eq!((part.ranges().len(), part.len(), part.tokens()), (2, 12, 24));
        for n in [1, 2, 3, 4, 6, 12] {
            let slices: Vec<usize> = (0..n).flat_map(|k| tokens(&part.slice(k, n))).collect();
            assert_eq!(slices, tokens(&part), "{n}");
            assert!((0..n).all(|k| part.slice(k, n).len() == 12 / n), "{n}");
        }
        assert_eq!(SequencePart::whole(8).slice(1, 2), SequencePart::of(8, std::iter::once(4..8)));
        assert!(SequencePart::whole(8).is_whole() && !part.is_whole() && SequencePart::whole(0).is_empty());
    }
}
