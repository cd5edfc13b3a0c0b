//! Pieces of a tensor: their completeness, and the overlap of two of them.

use std::ops::Range;

use numcore::{
    Error, Result,
    placement::{PieceRun, TensorPlacement},
};

use super::manifest::{Region, TensorEntry};

impl TensorEntry {
    /// The piece of the tensor that a region's elements belong to.
    pub(super) fn piece_of(&self, region: &Region) -> TensorPlacement {
        region.piece.clone().unwrap_or_else(|| TensorPlacement::whole(self.shape))
    }

    /// Sorts regions by piece and place. An error unless every element of the tensor exists exactly once. The regions
    /// of a piece must follow one another, no two pieces may overlap, and together they must have as many elements as
    /// the tensor.
    pub(super) fn check_complete(&mut self, name: &str) -> Result<()> {
        let first = |region: &Region| region.piece.as_ref().map(|piece| piece.boxes().next());
        self.regions.sort_by_cached_key(|r| (first(r).map(key), r.start, r.len));
        let wrong = |why: String| Err(Error::state(name, why));
        let (mut pieces, mut count): (Vec<TensorPlacement>, usize) = (Vec::new(), 0);
        for regions in self.regions.chunk_by(|a, b| a.piece == b.piece) {
            let (piece, mut at) = (self.piece_of(&regions[0]), 0);
            for region in regions {
                if region.start != at {
                    let of = if piece.is_whole() { String::new() } else { format!(" of the piece {piece}") };
                    return wrong(format!("element {}{of} is in no part, or in two", at.min(region.start)));
                }
                at += region.len;
            }
            let all = piece.local().numel();
            if at != all {
                return wrong(format!("{at} of {all} elements are there"));
            }
            if let Some(other) = pieces.iter().find(|other| overlap(other, &piece)) {
                return wrong(format!("the pieces {other} and {piece} overlap"));
            }
            count += all;
            pieces.push(piece);
        }
        let all = self.shape.numel();
        if count == all { Ok(()) } else { wrong(format!("{count} of {all} elements are there")) }
    }
}

/// The sort key of a piece: its first box.
fn key(first: Option<Vec<Range<usize>>>) -> Vec<(usize, usize)> {
    first.into_iter().flatten().map(|range| (range.start, range.end)).collect()
}

/// Tells whether two pieces of a tensor have an element in common: true if their ranges overlap along every dimension.
fn overlap(a: &TensorPlacement, b: &TensorPlacement) -> bool {
    let touch = |x: &Range<usize>, y: &Range<usize>| x.start < y.end && y.start < x.end;
    let along = |dim| a.ranges(dim).iter().any(|x| b.ranges(dim).iter().any(|y| touch(x, y)));
    (0..a.logical().rank()).all(along)
}

/// A run of elements that a saved and a wanted piece have in common, consecutive in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shared {
    /// The run's start in the saved piece.
    pub(super) saved: usize,
    /// The run's start in the wanted piece.
    pub(super) wanted: usize,
    pub(super) len: usize,
}

/// The runs that two element ranges, of two pieces of one tensor, have in common, in order.
pub(super) fn shared(
    (saved, from): (&TensorPlacement, Range<usize>),
    (wanted, to): (&TensorPlacement, Range<usize>),
) -> Vec<Shared> {
    let mut all = Vec::new();
    if !overlap(saved, wanted) {
        return all;
    }
    // Both ascend in the whole tensor, so one pass over both finds every run.
    let (mut theirs, mut ours) = (saved.runs(from).peekable(), wanted.runs(to).peekable());
    while let (Some(&a), Some(&b)) = (theirs.peek(), ours.peek()) {
        let (start, end) = (a.logical.max(b.logical), ends(a).min(ends(b)));
        if start < end {
            let place = |run: PieceRun| run.local + (start - run.logical);
            all.push(Shared { saved: place(a), wanted: place(b), len: end - start });
        }
        if ends(a) <= ends(b) {
            theirs.next()
        } else {
            ours.next()
        };
    }
    all
}

fn ends(run: PieceRun) -> usize {
    run.logical + run.len
}

#[cfg(test)]
mod tests {
    use super::*;
    use numcore::{DType, Shape};

    fn part(dims: &[usize], dim: usize, parts: usize, place: usize, of: usize) -> TensorPlacement {
        TensorPlacement::part(Shape::new(dims).unwrap(), dim, parts, place, of).unwrap()
    }

    /// The element of the whole tensor that each element of a piece is.
    fn elements(piece: &TensorPlacement) -> Vec<usize> {
        piece.runs(0..usize::MAX).flat_map(|run| run.logical..run.logical + run.len).collect()
    }

    #[test]
    fn what_two_pieces_share_is_what_their_elements_say() {
        let dims = [12, 6];
        let mut pieces = vec![TensorPlacement::whole(Shape::new(&dims).unwrap())];
        pieces.extend(
            [(0, 3, 2), (0, 1, 3), (1, 1, 2), (1, 3, 2)]
                .into_iter()
                .flat_map(|(dim, parts, of)| (0..of).map(move |place| part(&dims, dim, parts, place, of))),
        );
        for saved in &pieces {
            for wanted in &pieces {
                let (theirs, ours) = (elements(saved), elements(wanted));
                let (from, to) = (2..theirs.len() - 1, 1..ours.len() - 3);
                let mut found = Vec::new();
                for Shared { saved: a, wanted: b, len } in shared((saved, from.clone()), (wanted, to.clone())) {
                    assert_eq!(theirs[a..a + len], ours[b..b + len]);
                    found.extend(ours[b..b + len].iter().copied());
                }
                let expected: Vec<usize> =
                    ours[to].iter().copied().filter(|i| theirs[from.clone()].contains(i)).collect();
                assert_eq!(found, expected, "{saved} and {wanted}");
            }
        }
    }

    fn complete(regions: &[(Option<TensorPlacement>, usize, usize)]) -> Result<()> {
        let region = |(rank, (piece, start, len)): (usize, &(Option<TensorPlacement>, usize, usize))| Region {
            rank,
            key: String::new(),
            piece: piece.clone(),
            start: *start,
            len: *len,
            checksum: 0,
        };
        let regions = regions.iter().enumerate().map(region).collect();
        TensorEntry { shape: Shape::new(&[4, 6]).unwrap(), dtype: DType::F32, regions }.check_complete("w")
    }

    #[test]
    fn every_element_is_there_once_or_it_is_an_error() {
        let [left, right] = [0, 1].map(|place| Some(part(&[4, 6], 1, 1, place, 2)));
        let top = Some(part(&[4, 6], 0, 1, 0, 2));
        complete(&[(None, 10, 14), (None, 0, 10)]).unwrap();
        complete(&[(right.clone(), 5, 7), (left.clone(), 0, 12), (right.clone(), 0, 5)]).unwrap();
        let why = |regions: &[_]| complete(regions).unwrap_err().to_string();
        assert!(why(&[(left.clone(), 0, 12)]).contains("12 of 24"));
        assert!(why(&[(left.clone(), 0, 12), (right.clone(), 0, 11)]).contains("11 of 12"));
        assert!(why(&[(left.clone(), 0, 12), (right.clone(), 1, 11)]).contains("element 0 of the piece"));
        assert!(why(&[(left.clone(), 0, 12), (top, 0, 12)]).contains("overlap"));
        assert!(why(&[(left.clone(), 0, 12), (left, 0, 12), (right, 0, 12)]).contains("in no part, or in two"));
    }
}
