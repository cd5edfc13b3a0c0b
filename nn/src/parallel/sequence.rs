//! Parts of a sequence: which of its tokens a rank has.

use std::ops::Range;

use numcore::{
    Result,
    ops::{Apply, ViewOps, cat},
};

/// Which tokens of a sequence are here, in order: ranges of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencePart {
    tokens: usize,
    ranges: Vec<Range<usize>>,
}

impl SequencePart {
    /// All of a sequence of so many tokens.
    pub fn whole(tokens: usize) -> Self {
        SequencePart::of(tokens, std::iter::once(0..tokens))
    }

    /// These ranges of a sequence of so many tokens, one after another. Ranges that meet are joined, empty ones left out.
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

    /// Part `k` of `n` equal ones of this part, whose length `n` divides, where it is cut further.
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

    /// The tokens of the whole sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The tokens that are here.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// Whether no token is here.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether all tokens are here, in their order.
    pub fn is_whole(&self) -> bool {
        self.ranges == SequencePart::whole(self.tokens).ranges
    }

    /// Ranges of the whole sequence, in the order in which they are here.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// What is here of a value with all tokens along `dim`: a view, where the tokens follow one another.
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
