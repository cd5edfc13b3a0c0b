//! How a parameter can be cut: what its layer says of it.

use numcore::{Result, Shape, placement::TensorPlacement};

use super::TensorStyle;

/// How the rows of a linear layer's weight can be cut: what is computed from them stays together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCut {
    /// How many equal parts were fused into the weight (queries, keys and values: 3). Each is cut by itself.
    pub parts: usize,
    /// How many pieces a part consists of that no cut goes through: attention heads, each of several rows.
    pub heads: usize,
    /// Whether ranks may share a head, where there are more ranks than heads: those of keys and values that several heads of queries use.
    pub shared: bool,
}

impl RowCut {
    /// A cut between any two rows, of which there are so many.
    pub fn anywhere(rows: usize) -> Self {
        RowCut { parts: 1, heads: rows, shared: false }
    }

    /// Which of how many pieces of a part `rank` of `size` ranks has; an error in words where they do not come out even.
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

/// What can be cut of a parameter. The layer that makes a parameter says it by [`Param::with_cuts`](crate::Param::with_cuts).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cuts {
    /// Nothing: norms, convolutions, and whatever nobody has spoken of.
    #[default]
    None,
    /// The weight of a linear layer, `[O, I]`, along its outputs or its inputs.
    Weight(RowCut),
    /// The bias of a linear layer, `[O]`, with the weight's outputs.
    Bias(RowCut),
    /// A table of rows, `[V, C]`.
    Table,
    /// The projection down of a low-rank adapter, `[r, I]`: along its inputs, where its layer is.
    LowRankDown,
    /// The projection up of a low-rank adapter, `[O, r]`: along its outputs, where its layer is.
    LowRankUp(RowCut),
    /// A tensor of all experts of a mixture, `[E, ..]`; whether tokens compete for these, or move a bias, so that those of all ranks count together.
    Experts {
        /// Whether they do.
        compete: bool,
    },
}

impl Cuts {
    /// The piece that `rank` of `size` has of a parameter in a style, and how many ranks have the same one; an error in words where the
    /// layer cannot be cut so.
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
            (_, TensorStyle::Replicated) | (Cuts::Bias(_) | Cuts::LowRankUp(_), TensorStyle::Row) => whole(),
            (Cuts::LowRankDown, TensorStyle::Column | TensorStyle::Vocabulary) => whole(),
            (Cuts::Weight(_) | Cuts::LowRankDown, TensorStyle::Row) => {
                let inputs = shape.dims().get(1).copied().unwrap_or(0);
                RowCut::anywhere(inputs).piece(rank, size)?;
                Ok((words(TensorPlacement::part(shape, 1, 1, rank, size))?, 1))
            }
            (Cuts::Weight(rows) | Cuts::Bias(rows) | Cuts::LowRankUp(rows), TensorStyle::Column) => {
                let (place, of) = rows.piece(rank, size)?;
                Ok((words(TensorPlacement::part(shape, 0, rows.parts, place, of))?, size / of))
            }
            (Cuts::Weight(_) | Cuts::Bias(_) | Cuts::LowRankUp(_) | Cuts::Table, TensorStyle::Vocabulary) => {
                let rows = shape.dims().first().copied().unwrap_or(0);
                if !rows.is_multiple_of(size) {
                    let padded = rows.next_multiple_of(size);
                    return Err(format!(
                        "{rows} rows cannot be shared out among {size} ranks: pad the vocabulary to {padded}"
                    ));
                }
                Ok((words(TensorPlacement::part(shape, 0, 1, rank, size))?, 1))
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
            (Cuts::None, _) => Err("its layer does not allow it to be cut".into()),
        }
    }

    /// Whether what is computed from the rows is in heads, of several rows or parts each.
    pub(super) fn has_heads(self, shape: Shape) -> bool {
        let rows = shape.dims().first().copied().unwrap_or(0);
        match self {
            Cuts::Weight(cut) | Cuts::Bias(cut) => cut != RowCut::anywhere(rows),
            _ => false,
        }
    }

    /// Whether the parameter is of an adapter, which stands within the layer that a plan names.
    pub(super) fn is_low_rank(self) -> bool {
        matches!(self, Cuts::LowRankDown | Cuts::LowRankUp(_))
    }

    /// How the rows of a linear layer's weight or bias can be cut; anywhere, where nobody has spoken of it.
    pub fn rows(self, rows: usize) -> RowCut {
        match self {
            Cuts::Weight(cut) | Cuts::Bias(cut) | Cuts::LowRankUp(cut) => cut,
            _ => RowCut::anywhere(rows),
        }
    }
}
