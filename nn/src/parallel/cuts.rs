//! Allowed cuts of parameters, as their layers declare them.

use numcore::{Result, Shape, placement::TensorPlacement};

use super::TensorStyle;

/// The allowed cuts of the rows of a linear layer's weight; rows of one head stay together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCut {
    /// The number of equal parts that were fused into the weight (3 for queries, keys and values). Each part is cut by
    /// itself.
    pub parts: usize,
    /// The number of indivisible pieces of a part: attention heads, each of several rows.
    pub heads: usize,
    /// True if several ranks may share a head where there are more ranks than heads, as with keys and values of grouped
    /// queries.
    pub shared: bool,
    /// The number of heads of keys, and of values, that follow those of queries in a fused weight with fewer of them; 0
    /// without.
    pub keys: usize,
}

impl RowCut {
    /// Allows a cut between any two of `rows` rows.
    pub fn anywhere(rows: usize) -> Self {
        Self::of_heads(rows)
    }

    /// Allows a cut between any two of `heads` heads.
    pub fn of_heads(heads: usize) -> Self {
        RowCut { parts: 1, heads, shared: false, keys: 0 }
    }

    /// The number of indivisible pieces of the weight.
    pub(crate) fn pieces(self) -> usize {
        self.parts * self.heads + 2 * self.keys
    }

    /// The rows of `rank` of `size` ranks, and the number of ranks that have them.
    fn rows(self, shape: Shape, rank: usize, size: usize) -> std::result::Result<(TensorPlacement, usize), String> {
        let words = |piece: Result<TensorPlacement>| piece.map_err(|error| error.to_string());
        let (place, of) = self.piece(rank, size)?;
        if self.keys == 0 {
            return Ok((words(TensorPlacement::part(shape, 0, self.parts, place, of))?, size / of));
        }
        RowCut::of_heads(self.keys).piece(rank, size)?;
        let rows = shape.dims().first().copied().unwrap_or(0) / self.pieces();
        let part = |(first, heads): (usize, usize)| {
            let own = heads / size * rows;
            first * rows + rank * own..first * rows + (rank + 1) * own
        };
        let parts = [(0, self.heads), (self.heads, self.keys), (self.heads + self.keys, self.keys)].map(part);
        let mut ranges: Vec<_> = shape.dims().iter().map(|&dim| std::iter::once(0..dim).collect()).collect();
        ranges[0] = parts.into();
        Ok((words(TensorPlacement::new(shape, ranges))?, 1))
    }

    /// The index of the piece of `rank`, of `size` ranks, and the number of pieces of a part. An error in words if
    /// heads and ranks do not divide evenly.
    fn piece(self, rank: usize, size: usize) -> std::result::Result<(usize, usize), String> {
        let RowCut { heads, shared, .. } = self;
        if heads.is_multiple_of(size) {
            return Ok((rank, size));
        }
        if shared && heads > 0 && size.is_multiple_of(heads) {
            return Ok((rank * heads / size, heads));
        }
        let or = if shared { ", nor the ranks by the heads" } else { "" };
        Err(format!(
            "{heads} rows or heads cannot be shared out among {size} ranks: they are not divisible by the ranks{or}"
        ))
    }
}

/// The allowed cuts of a parameter. The layer that makes the parameter declares them with
/// [`Param::with_cuts`](crate::Param::with_cuts).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cuts {
    /// No cut: norms, convolutions, and parameters without a declaration.
    #[default]
    None,
    /// The weight of a linear layer, `[O, I]`, along its outputs or its inputs.
    Weight(RowCut),
    /// The bias of a linear layer, `[O]`, cut as the weight's outputs are.
    Bias(RowCut),
    /// A table of rows, `[V, C]`, along its rows.
    Table,
    /// The down projection of a low-rank adapter, `[r, I]`, along its inputs, where the weight it adapts is cut so.
    LowRankDown,
    /// The up projection of a low-rank adapter, `[O, r]`, along its outputs, where the weight it adapts is cut so.
    LowRankUp(RowCut),
    /// A parameter that all heads of a layer share. Where heads are cut, each rank has all of it, and a part of its
    /// gradient.
    Shared,
    /// A tensor of all experts of a mixture, `[E, ..]`.
    Experts {
        /// True if tokens compete for places in these experts, or move their bias, so that tokens of all ranks have to
        /// be counted together.
        compete: bool,
    },
}

impl Cuts {
    /// The piece of a parameter that `rank` of `size` ranks has under a style, and the number of ranks with that piece.
    /// An error in words if the layer cannot be cut so.
    pub(super) fn piece(
        self,
        style: TensorStyle,
        shape: Shape,
        rank: usize,
        size: usize,
    ) -> std::result::Result<(TensorPlacement, usize), String> {
        let whole = || Ok((TensorPlacement::whole(shape), size));
        let words = |piece: Result<TensorPlacement>| piece.map_err(|error| error.to_string());
        match (self, style) {
            (_, TensorStyle::Gathered) => self.piece(TensorStyle::Column, shape, rank, size),
            (_, TensorStyle::Replicated) | (Cuts::Bias(_) | Cuts::LowRankUp(_), TensorStyle::Row) => whole(),
            (Cuts::LowRankDown, TensorStyle::Column | TensorStyle::Vocabulary)
            | (Cuts::Shared, TensorStyle::Column) => whole(),
            (Cuts::Weight(_) | Cuts::LowRankDown, TensorStyle::Row) => {
                let inputs = shape.dims().get(1).copied().unwrap_or(0);
                RowCut::anywhere(inputs).piece(rank, size)?;
                Ok((words(TensorPlacement::part(shape, 1, 1, rank, size))?, 1))
            }
            (Cuts::Weight(rows) | Cuts::Bias(rows) | Cuts::LowRankUp(rows), TensorStyle::Column) => {
                rows.rows(shape, rank, size)
            }
            (Cuts::Weight(_) | Cuts::Bias(_) | Cuts::LowRankUp(_) | Cuts::Table, TensorStyle::Vocabulary) => {
                // The first ranks have as many rows as each other, the last fewer or none.
                let start = |rows: usize, rank: usize| (rank * rows.div_ceil(size)).min(rows);
                let range = |(dim, &count): (usize, &usize)| match dim {
                    0 => start(count, rank)..start(count, rank + 1),
                    _ => 0..count,
                };
                let ranges = shape.dims().iter().enumerate().map(|dim| std::iter::once(range(dim)).collect());
                Ok((words(TensorPlacement::new(shape, ranges.collect()))?, 1))
            }
            (Cuts::Experts { .. }, TensorStyle::Experts) => {
                let experts = shape.dims().first().copied().unwrap_or(0);
                if !experts.is_multiple_of(size) {
                    return Err(format!(
                        "{experts} experts cannot be shared out among {size} ranks: they are not divisible by them"
                    ));
                }
                Ok((words(TensorPlacement::part(shape, 0, 1, rank, size))?, 1))
            }
            (Cuts::Experts { .. }, _) => Err("tensors of experts are shared out by `experts`, or not at all".into()),
            (_, TensorStyle::Experts) => Err("only tensors of experts, `[E, ..]`, are shared out by `experts`".into()),
            (Cuts::Table, _) => {
                Err("a table, or a projection to logits, is cut along its vocabulary, or not at all".into())
            }
            (Cuts::None | Cuts::Shared, _) => Err("its layer does not allow it to be cut".into()),
        }
    }

    /// Tells whether the rows form heads of several rows, or fused parts.
    pub(super) fn has_heads(self, shape: Shape) -> bool {
        let rows = shape.dims().first().copied().unwrap_or(0);
        match self {
            Cuts::Weight(cut) | Cuts::Bias(cut) => cut != RowCut::anywhere(rows),
            _ => false,
        }
    }

    /// Tells whether the parameter belongs to an adapter, which is inside the layer that a plan names.
    pub(super) fn is_low_rank(self) -> bool {
        matches!(self, Cuts::LowRankDown | Cuts::LowRankUp(_))
    }

    /// The allowed cuts of the rows of a linear layer's weight or bias; anywhere, if none were declared.
    pub fn rows(self, rows: usize) -> RowCut {
        match self {
            Cuts::Weight(cut) | Cuts::Bias(cut) | Cuts::LowRankUp(cut) => cut,
            _ => RowCut::anywhere(rows),
        }
    }
}
