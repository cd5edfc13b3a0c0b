//! The layout of a unit's parameters in one buffer, and its cut into equal shards. Pure arithmetic.

use std::ops::Range;

use numcore::{ALIGN, DType, FlatLayout, Result, Shape};

/// Parameters one after another, each at a multiple of 256 bytes. Padding at the end makes equal shards, which start at
/// multiples of 256 bytes as well. A cut may go through a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    full: FlatLayout,
    parameters: usize,
    ranks: usize,
}

/// A part of a parameter that lies in one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of the parameter in the unit.
    pub parameter: usize,
    /// The elements of the parameter, in row-major order.
    pub elements: Range<usize>,
}

impl UnitLayout {
    /// The layout of parameters over `ranks` shards.
    pub fn new(dtype: DType, parameters: impl IntoIterator<Item = (String, Shape)>, ranks: usize) -> Self {
        let (full, ranks) = (FlatLayout::new(dtype, parameters), ranks.max(1));
        let numel = full.numel().next_multiple_of(ranks * ALIGN / dtype.size());
        UnitLayout { parameters: full.len(), full: full.extended(numel), ranks }
    }

    /// The unsharded layout: a range for each parameter, then padding.
    pub fn full(&self) -> &FlatLayout {
        &self.full
    }

    /// The number of elements of a shard.
    pub fn shard(&self) -> usize {
        self.full.numel() / self.ranks
    }

    /// The elements of the unsharded buffer that are shard `rank`.
    pub fn span(&self, rank: usize) -> Range<usize> {
        rank * self.shard()..(rank + 1) * self.shard()
    }

    /// The pieces in a shard, in order.
    pub fn pieces(&self, rank: usize) -> Vec<Piece> {
        let span = self.span(rank);
        let piece = |parameter: usize| {
            let range = self.full.range(parameter);
            let (start, end) = (range.offset(), range.offset() + range.numel());
            let elements = span.start.max(start)..span.end.min(end);
            (elements.start < elements.end)
                .then(|| Piece { parameter, elements: elements.start - start..elements.end - start })
        };
        (0..self.parameters).filter_map(piece).collect()
    }

    /// The layout of a shard: a range for each piece, under its parameter's name, at its place in the unsharded buffer.
    pub fn shard_layout(&self, rank: usize) -> Result<FlatLayout> {
        let pieces = self.pieces(rank);
        let row = |p: &Piece| Ok((self.full.name(p.parameter).to_string(), Shape::new(&[p.elements.len()])?));
        let rows = pieces.iter().map(row).collect::<Result<Vec<_>>>()?;
        Ok(FlatLayout::new(self.full.dtype(), rows).extended(self.shard()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(sizes: &[usize], ranks: usize) -> UnitLayout {
        let parameters = sizes.iter().enumerate().map(|(i, &n)| (format!("p{i}"), Shape::new(&[n]).unwrap()));
        UnitLayout::new(DType::F32, parameters, ranks)
    }

    #[test]
    fn shards_are_equal_and_pieces_cover_every_element_once() {
        for ranks in [1, 2, 3, 4, 5, 8] {
            for sizes in [&[9, 7, 5, 3][..], &[1000, 1, 64, 640], &[0, 5], &[]] {
                let layout = layout(sizes, ranks);
                assert_eq!(layout.shard() * ranks, layout.full().numel());
                let mut seen: Vec<usize> = vec![0; sizes.len()];
                for rank in 0..ranks {
                    let (pieces, shard) = (layout.pieces(rank), layout.shard_layout(rank).unwrap());
                    assert_eq!(shard.numel(), layout.shard());
                    for (k, piece) in pieces.iter().enumerate() {
                        assert_eq!(piece.elements.start, seen[piece.parameter]);
                        seen[piece.parameter] = piece.elements.end;
                        // A piece has equal places in the shard and in the unsharded buffer.
                        let whole = layout.full().range(piece.parameter).offset() + piece.elements.start;
                        assert_eq!(layout.span(rank).start + shard.range(k).offset(), whole);
                    }
                }
                assert_eq!(seen, sizes);
            }
        }
    }

    #[test]
    fn padding_is_at_most_one_aligned_unit_a_rank() {
        let layout = layout(&[9, 7, 5, 3], 5);
        assert_eq!((layout.full().numel(), layout.shard()), (5 * 64, 64));
    }
}
