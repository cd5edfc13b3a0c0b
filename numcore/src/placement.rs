//! Placement of tensor shards, as data: the ranges of a whole tensor, in every dimension, that one rank holds.
//!
//! A [`TensorPlacement`] knows nothing of ranks and communication. Layers, trainers, checkpoints and file converters
//! use it to describe a shard of a weight. It has the shard's part of the whole, its shape, and the position of each
//! element in the whole.

use std::{fmt, ops::Range};

use crate::{
    Error, Result, Shape, Within,
    ops::{Apply, ViewOps, cat},
};

/// A piece of a tensor: the Cartesian product of a list of ranges for each dimension.
///
/// The piece is itself a dense tensor, of shape [`local`](TensorPlacement::local), in which the ranges of a dimension
/// follow one another. A weight fused of three, each of them sharded, has three ranges along that dimension.
///
/// ```
/// use numcore::{Shape, placement::TensorPlacement};
/// # fn main() -> numcore::Result<()> {
/// // Rows of queries, keys and values, four each: the second of two ranks has the last two of each.
/// let piece = TensorPlacement::part(Shape::new(&[12, 5])?, 0, 3, 1, 2)?;
/// assert_eq!(piece.ranges(0), [2..4, 6..8, 10..12]);
/// assert_eq!(piece.local(), Shape::new(&[6, 5])?);
/// let runs: Vec<_> = piece.runs(8..22).map(|run| (run.local, run.logical, run.len)).collect();
/// assert_eq!(runs, [(8, 18, 2), (10, 30, 10), (20, 50, 2)]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorPlacement {
    logical: Shape,
    dims: Vec<Vec<Range<usize>>>,
}

/// A run of elements that are consecutive both in a piece and in the whole tensor, each in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRun {
    /// The position of the first element in the piece.
    pub local: usize,
    /// The position of the first element in the whole tensor.
    pub logical: usize,
    /// The number of elements.
    pub len: usize,
}

impl TensorPlacement {
    /// The piece that is the whole tensor.
    pub fn whole(logical: Shape) -> Self {
        let dims = logical.dims().iter().map(|&size| std::iter::once(0..size).collect()).collect();
        TensorPlacement { logical, dims }.joined()
    }

    /// The piece of a tensor of shape `logical` with these ranges along each dimension. Ranges that touch are merged.
    ///
    /// # Errors
    /// Fails if there is not one list per dimension, or if its ranges are not ascending and disjoint within the tensor.
    #[track_caller]
    pub fn new(logical: Shape, dims: Vec<Vec<Range<usize>>>) -> Result<Self> {
        if dims.len() != logical.rank() {
            let why = format!("{} lists of ranges for {} dimensions", dims.len(), logical.rank());
            return Err(Error::shape("placement", &[logical], why)).at_caller();
        }
        for (dim, ranges) in dims.iter().enumerate() {
            let mut at = 0;
            for range in ranges {
                if range.start < at || range.end < range.start || range.end > logical[dim] {
                    let why =
                        format!("the ranges {ranges:?} of dimension {dim} must ascend within 0..{}", logical[dim]);
                    return Err(Error::shape("placement", &[logical], why)).at_caller();
                }
                at = range.end;
            }
        }
        Ok(TensorPlacement { logical, dims }.joined())
    }

    /// Piece `place` of `of` equal pieces along `dim`, where each of `parts` equal parts of that dimension is cut
    /// separately.
    ///
    /// # Errors
    /// Fails if `dim` or `place` does not exist, if the parts are not equal, or if `of` does not divide each.
    #[track_caller]
    pub fn part(logical: Shape, dim: usize, parts: usize, place: usize, of: usize) -> Result<Self> {
        let wrong = |why: String| Err(Error::shape("placement", &[logical], why));
        if dim >= logical.rank() || place >= of || parts == 0 {
            return wrong(format!("there is no piece {place} of {of} in {parts} parts of dimension {dim}"));
        }
        let size = logical[dim];
        if !size.is_multiple_of(parts * of) {
            return wrong(format!(
                "{parts} parts of dimension {dim}, which has {size}, do not make {of} equal pieces each"
            ));
        }
        let (part, piece) = (size / parts, size / parts / of);
        let mut dims = TensorPlacement::whole(logical).dims;
        dims[dim] = (0..parts).map(|k| k * part + place * piece..k * part + (place + 1) * piece).collect();
        TensorPlacement::new(logical, dims)
    }

    /// The shape of the whole tensor.
    pub fn logical(&self) -> Shape {
        self.logical
    }

    /// The shape of the piece.
    pub fn local(&self) -> Shape {
        let size = |ranges: &Vec<Range<usize>>| ranges.iter().map(Range::len).sum();
        self.dims.iter().map(size).enumerate().fold(self.logical, |shape, (dim, size)| shape.with(dim, size))
    }

    /// The ranges along a dimension, in order; no two of them touch.
    pub fn ranges(&self, dim: usize) -> &[Range<usize>] {
        &self.dims[dim]
    }

    /// Tells whether the piece is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.local() == self.logical
    }

    /// The boxes of the whole tensor that make up the piece, in row-major order: one range per dimension each.
    pub fn boxes(&self) -> impl Iterator<Item = Vec<Range<usize>>> + '_ {
        let counts: Vec<usize> = self.dims.iter().map(Vec::len).collect();
        let total: usize = counts.iter().product();
        (0..total).map(move |mut k| {
            let mut own: Vec<Range<usize>> = Vec::with_capacity(counts.len());
            for (ranges, &count) in self.dims.iter().zip(&counts).rev() {
                own.push(ranges[k % count].clone());
                k /= count;
            }
            own.reverse();
            own
        })
    }

    /// The positions in the whole tensor of `elements` of the piece, counted in row-major order, as runs in order. Each
    /// line along the last sharded dimension has one run per range of it.
    pub fn runs(&self, elements: Range<usize>) -> impl Iterator<Item = PieceRun> + '_ {
        let local = self.local();
        let elements = elements.start..elements.end.min(local.numel());
        // Dimensions after the last sharded one are complete, and only make its runs longer.
        let cut = (0..self.dims.len()).rev().find(|&dim| local[dim] != self.logical[dim]).unwrap_or(0);
        let size = |shape: &Shape, dim: usize| shape.dims().get(dim).copied().unwrap_or(1);
        let tail: usize = local.dims().iter().skip(cut + 1).product();
        let line = size(&local, cut) * tail;
        let lines =
            if line == 0 || elements.is_empty() { 0..0 } else { elements.start / line..elements.end.div_ceil(line) };
        let ranges = self.dims.get(cut).cloned().unwrap_or_else(|| std::iter::once(0..1).collect());
        lines.flat_map(move |number| {
            let first = self.line(number, cut) * size(&self.logical, cut);
            let mut at = number * line;
            let elements = elements.clone();
            ranges.clone().into_iter().filter_map(move |range| {
                let (start, len) = (at, range.len() * tail);
                at += len;
                let (from, to) = (elements.start.max(start), elements.end.min(start + len));
                let logical = (first + range.start) * tail + from.saturating_sub(start);
                (from < to).then(|| PieceRun { local: from, logical, len: to - from })
            })
        })
    }

    /// Cuts this piece from `whole`: a view, or a concatenation of views if a dimension has several ranges.
    ///
    /// # Errors
    /// Fails if the shape of `whole` is not `logical`.
    #[track_caller]
    pub fn take<T: Apply>(&self, whole: &T) -> Result<T> {
        let shape = whole.spec().shape;
        if shape != self.logical {
            let why = "a piece of the second shape cannot be taken of the first";
            return Err(Error::shape("placement", &[shape, self.logical], why)).at_caller();
        }
        let mut piece = whole.clone();
        for (dim, ranges) in self.dims.iter().enumerate() {
            let axis = dim as isize;
            let narrow = |range: &Range<usize>| piece.narrow(axis, range.start, range.len());
            piece = match &ranges[..] {
                [] => piece.narrow(axis, 0, 0)?,
                [one] => narrow(one)?,
                several => {
                    let parts = several.iter().map(narrow).collect::<Result<Vec<T>>>()?;
                    cat(&parts.iter().collect::<Vec<_>>(), axis)?
                }
            };
        }
        Ok(piece)
    }

    /// Merges ranges that touch, and drops empty ones.
    fn joined(mut self) -> Self {
        for ranges in &mut self.dims {
            let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
            for range in ranges.drain(..).filter(|range| !range.is_empty()) {
                match joined.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => joined.push(range),
                }
            }
            *ranges = joined;
        }
        self
    }

    /// The position in the whole tensor of a line of the piece; both have only dimensions `0..dims` here.
    fn line(&self, mut number: usize, dims: usize) -> usize {
        let (mut place, mut stride) = (0, 1);
        for (dim, ranges) in self.dims[..dims.min(self.dims.len())].iter().enumerate().rev() {
            let size = ranges.iter().map(Range::len).sum::<usize>().max(1);
            let mut index = number % size;
            number /= size;
            for range in ranges {
                if index < range.len() {
                    place += (range.start + index) * stride;
                    break;
                }
                index -= range.len();
            }
            stride *= self.logical[dim];
        }
        place
    }
}

impl fmt::Display for TensorPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_whole() {
            return write!(f, "{}", self.logical);
        }
        let dims = self.dims.iter().map(|ranges| {
            let ranges: Vec<String> = ranges.iter().map(|r| format!("{}..{}", r.start, r.end)).collect();
            ranges.join(" and ")
        });
        write!(f, "[{}] of {}", dims.collect::<Vec<_>>().join(", "), self.logical)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what a placement has")]
mod tests {
    use super::*;

    fn shape(dims: &[usize]) -> Shape {
        Shape::new(dims).unwrap()
    }

    /// The position of each element of a piece, by definition: every index of every dimension, the last one fastest.
    fn by_definition(piece: &TensorPlacement) -> Vec<usize> {
        let mut places = vec![0];
        for dim in 0..piece.logical().rank() {
            let own: Vec<usize> = piece.ranges(dim).iter().cloned().flatten().collect();
            places = places.iter().flat_map(|p| own.iter().map(move |i| p * piece.logical()[dim] + i)).collect();
        }
        places
    }

    fn pieces() -> Vec<TensorPlacement> {
        let cut = |dims: &[usize], ranges: &[&[Range<usize>]]| {
            TensorPlacement::new(shape(dims), ranges.iter().map(|r| r.to_vec()).collect()).unwrap()
        };
        vec![
            TensorPlacement::whole(shape(&[])),
            TensorPlacement::whole(shape(&[3, 0])),
            TensorPlacement::whole(shape(&[3, 4, 2])),
            TensorPlacement::part(shape(&[12, 5]), 0, 3, 1, 2).unwrap(),
            TensorPlacement::part(shape(&[4, 6]), 1, 1, 2, 3).unwrap(),
            cut(&[4, 6, 3], &[&[1..2, 3..4], &[0..2, 4..6], &[0..3]]),
            cut(&[4, 6, 3], &[&[0..4], &[2..5], &[0..1, 2..3]]),
            cut(&[4, 6], &[&[], &[1..2]]),
            cut(&[4, 6], &[&[0..2, 2..4], &[0..3, 3..3]]),
        ]
    }

    #[test]
    fn runs_are_what_the_definition_says_from_anywhere_to_anywhere() {
        for piece in pieces() {
            let places = by_definition(&piece);
            assert_eq!(places.len(), piece.local().numel(), "{piece}");
            for start in 0..=places.len() {
                for end in start..=places.len() {
                    let runs: Vec<PieceRun> = piece.runs(start..end).collect();
                    let found = runs.iter().flat_map(|run| run.logical..run.logical + run.len);
                    assert!(found.eq(places[start..end].iter().copied()), "{piece} {start}..{end}: {runs:?}");
                    let mut at = start;
                    for run in &runs {
                        assert_eq!(run.local, at);
                        at += run.len;
                    }
                }
            }
        }
    }

    #[test]
    fn boxes_have_every_element_once() {
        for piece in pieces() {
            let volume = |own: Vec<Range<usize>>| own.iter().map(Range::len).product::<usize>();
            assert_eq!(piece.boxes().map(volume).sum::<usize>(), piece.local().numel(), "{piece}");
        }
        let piece = TensorPlacement::part(shape(&[8, 3]), 0, 2, 0, 2).unwrap();
        assert_eq!(piece.boxes().collect::<Vec<_>>(), [vec![0..2, 0..3], vec![4..6, 0..3]]);
    }

    #[test]
    fn equal_pieces_cover_a_tensor() {
        for of in [1, 2, 3, 4, 6] {
            let mut seen = vec![0; 24 * 5];
            for place in 0..of {
                let piece = TensorPlacement::part(shape(&[24, 5]), 0, 2, place, of).unwrap();
                piece
                    .runs(0..usize::MAX)
                    .for_each(|run| (run.logical..run.logical + run.len).for_each(|i| seen[i] += 1));
            }
            assert!(seen.iter().all(|&n| n == 1), "{of}");
        }
    }

    #[test]
    fn what_is_no_piece_is_refused_with_the_numbers() {
        let message = |piece: Result<TensorPlacement>| piece.unwrap_err().to_string();
        let uneven = message(TensorPlacement::part(shape(&[10, 4]), 0, 3, 0, 2));
        assert!(uneven.contains("3 parts of dimension 0, which has 10"), "{uneven}");
        assert!(message(TensorPlacement::part(shape(&[4]), 0, 1, 2, 2)).contains("no piece 2 of 2"));
        assert!(message(TensorPlacement::new(shape(&[4]), vec![])).contains("0 lists of ranges for 1 dimensions"));
        for ranges in [vec![1..5], vec![2..3, 0..1], vec![Range { start: 3, end: 1 }]] {
            assert!(message(TensorPlacement::new(shape(&[4]), vec![ranges])).contains("must ascend within 0..4"));
        }
    }

    #[test]
    fn a_piece_says_what_it_is() {
        assert_eq!(
            TensorPlacement::part(shape(&[12, 5]), 0, 3, 1, 2).unwrap().to_string(),
            "[2..4 and 6..8 and 10..12, 0..5] of [12, 5]"
        );
    }
}
