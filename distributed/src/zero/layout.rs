//! The layout of a unit's parameters in one buffer, and its cut into shards. Pure arithmetic.

use std::ops::Range;

use numcore::{ALIGN, DType, FlatLayout, Result, Shape};

/// Parameters one after another, each at a multiple of 256 bytes, cut into shards that start at such multiples too.
///
/// Shards are equal, by padding at the end, and a cut may go through a parameter. For rules that need whole parameters,
/// each parameter is in one shard, and shards have different lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    full: FlatLayout,
    parameters: usize,
    shards: Vec<usize>,
    cuts: bool,
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
    /// The layout of parameters over `ranks` equal shards.
    pub fn new(dtype: DType, parameters: impl IntoIterator<Item = (String, Shape)>, ranks: usize) -> Self {
        let (full, ranks) = (FlatLayout::new(dtype, parameters), ranks.max(1));
        let numel = full.numel().next_multiple_of(ranks * ALIGN / dtype.size());
        UnitLayout {
            parameters: full.len(),
            full: full.extended(numel),
            shards: vec![numel / ranks; ranks],
            cuts: true,
        }
    }

    /// The layout of parameters that are not cut over `ranks` shards. Each has the rank of its shard, in ascending
    /// order.
    pub(super) fn uncut(
        dtype: DType,
        parameters: impl IntoIterator<Item = (usize, String, Shape)>,
        ranks: usize,
    ) -> Self {
        let (mut shards, unit) = (vec![0; ranks], ALIGN / dtype.size());
        let named = parameters.into_iter().map(|(owner, name, shape)| {
            shards[owner] += shape.numel().next_multiple_of(unit);
            (name, shape)
        });
        let full = FlatLayout::new(dtype, named);
        UnitLayout { parameters: full.len(), full, shards, cuts: false }
    }

    /// The unsharded layout: a range for each parameter, then padding.
    pub fn full(&self) -> &FlatLayout {
        &self.full
    }

    /// The number of elements of each shard.
    pub fn shards(&self) -> &[usize] {
        &self.shards
    }

    /// Tells whether a cut may go through a parameter. Shards are equal then.
    pub(super) fn cuts(&self) -> bool {
        self.cuts
    }

    /// The elements of the unsharded buffer that are shard `rank`.
    pub fn span(&self, rank: usize) -> Range<usize> {
        let start = self.shards[..rank].iter().sum();
        start..start + self.shards[rank]
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
    /// Uncut parameters have their shapes, pieces are rows.
    pub fn shard_layout(&self, rank: usize) -> Result<FlatLayout> {
        let pieces = self.pieces(rank);
        let row = |p: &Piece| {
            let shape =
                if self.cuts { Shape::new(&[p.elements.len()])? } else { *self.full.range(p.parameter).shape() };
            Ok((self.full.name(p.parameter).to_string(), shape))
        };
        let rows = pieces.iter().map(row).collect::<Result<Vec<_>>>()?;
        Ok(FlatLayout::new(self.full.dtype(), rows).extended(self.shards[rank]))
    }
}

/// Chooses the shard of each of a unit's uncut parameters: the largest first, each to the shard with the fewest
/// elements of the unit. Among equal ones it is the shard with the fewest in `loads`, to which the unit is added.
pub(super) fn owners(sizes: &[usize], loads: &mut [usize]) -> Vec<usize> {
    let (mut own, mut owners) = (vec![0; loads.len()], vec![0; sizes.len()]);
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(sizes[i]));
    for i in order {
        let to = (0..loads.len()).min_by_key(|&rank| (own[rank], loads[rank])).unwrap_or(0);
        (owners[i], own[to], loads[to]) = (to, own[to] + sizes[i], loads[to] + sizes[i]);
    }
    owners
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
                assert_eq!(layout.shards(), vec![layout.full().numel() / ranks; ranks]);
                let mut seen: Vec<usize> = vec![0; sizes.len()];
                for rank in 0..ranks {
                    let (pieces, shard) = (layout.pieces(rank), layout.shard_layout(rank).unwrap());
                    assert_eq!(shard.numel(), layout.shards()[rank]);
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
        assert_eq!((layout.full().numel(), layout.shards()), (5 * 64, &[64; 5][..]));
    }

    #[test]
    fn uncut_parameters_are_in_one_shard_each() {
        let mut loads = vec![0; 3];
        assert_eq!(owners(&[9, 100, 70, 30], &mut loads), [2, 0, 1, 2]);
        assert_eq!(owners(&[50, 8], &mut loads), [2, 1], "the ranks with the fewest so far");
        assert_eq!((loads, owners(&[], &mut [])), (vec![100, 78, 89], vec![]));
        let shape = |dims: &[usize]| Shape::new(dims).unwrap();
        let parameters = [(0, [10, 10]), (1, [7, 10]), (3, [0, 4]), (3, [3, 10]), (3, [9, 1])];
        let named = parameters.map(|(owner, dims)| (owner, format!("{dims:?}"), shape(&dims)));
        let layout = UnitLayout::uncut(DType::F32, named, 4);
        assert_eq!((layout.shards(), layout.full().numel()), (&[128, 128, 0, 128][..], 384));
        for rank in 0..4 {
            let own = layout.shard_layout(rank).unwrap();
            let of_rank = parameters.iter().filter(|(owner, [a, _])| *owner == rank && *a > 0);
            let shapes: Vec<Shape> = (0..own.len()).map(|k| *own.range(k).shape()).collect();
            assert_eq!(shapes, of_rank.map(|(_, dims)| shape(dims)).collect::<Vec<_>>());
            assert_eq!(own.numel(), layout.shards()[rank]);
        }
    }
}
