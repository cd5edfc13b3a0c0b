//! The placement of a parameter, which its layer gets when the model is cut.

use std::sync::{Arc, LazyLock};

use autograd::{Var, autocast_dtype, recomputed, with_recomputation};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, JoinOps, MatmulOps, PointwiseOps, ViewOps, cat},
    placement::TensorPlacement,
    pointwise::Program,
};

use super::{Exchange, TensorGroup, TensorStyle};

/// This rank's piece of a parameter, and the group of ranks that the parameter is cut over.
#[derive(Debug)]
pub struct Placed<R: Runtime> {
    pub(super) name: Arc<str>,
    pub(super) style: TensorStyle,
    /// The piece of each rank of the group.
    pub(super) placements: Vec<TensorPlacement>,
    pub(super) replicas: usize,
    pub(super) partial: bool,
    pub(super) sequence: bool,
    /// True if every sum of a forward pass is that of one rank.
    pub(super) whole_sums: bool,
    /// The number of pieces in which a layer exchanges parts of the sequence in forward.
    pub(super) pieces: usize,
    pub(super) group: Arc<dyn TensorGroup<R>>,
    pub(super) examples: Option<Arc<dyn TensorGroup<R>>>,
}

impl<R: Runtime> Placed<R> {
    /// The style in which the parameter's layer is cut.
    pub fn style(&self) -> TensorStyle {
        self.style
    }

    /// The piece of the parameter that this rank has.
    pub fn placement(&self) -> &TensorPlacement {
        &self.placements[self.group.rank()]
    }

    /// The pieces of the parameter that the ranks of the group have, by rank.
    pub fn placements(&self) -> &[TensorPlacement] {
        &self.placements
    }

    /// Tells whether every rank has the whole parameter.
    pub fn is_whole(&self) -> bool {
        self.placements.iter().all(TensorPlacement::is_whole)
    }

    /// Joins the pieces of all ranks to the whole parameter. `piece` gives that of a rank; of ranks that have the same
    /// piece, only the first is asked.
    ///
    /// # Errors
    /// Errors of `piece`, and an error if a piece has another shape than its placement.
    pub fn join(&self, piece: impl Fn(usize) -> Result<Tensor<R>>) -> Result<Tensor<R>> {
        let logical = self.placements[0].logical();
        let is_cut = |dim: &usize| self.placements.iter().any(|piece| piece.local()[*dim] < logical[*dim]);
        let dim = (0..logical.rank()).find(is_cut).unwrap_or(0);
        let mut parts = Vec::new();
        for (rank, placement) in self.placements.iter().enumerate().step_by(self.replicas) {
            let (value, mut at) = (piece(rank)?.reshape(placement.local())?, 0);
            for range in placement.ranges(dim) {
                parts.push((range.start, value.narrow(dim as isize, at, range.len())?));
                at += range.len();
            }
        }
        parts.sort_by_key(|(start, _)| *start);
        cat(&parts.iter().map(|(_, part)| part).collect::<Vec<_>>(), dim as isize)
    }

    /// The number of consecutive ranks of the group that have this piece.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Tells whether this rank is the first that has this piece: the one that saves it, and whose squares count in a
    /// norm.
    pub fn is_first_replica(&self) -> bool {
        self.group.rank().is_multiple_of(self.replicas)
    }

    /// Tells whether this rank's gradient is a part of a sum over the ranks that have this piece.
    pub fn has_partial_gradient(&self) -> bool {
        self.partial
    }

    /// The ranks that the parameter is cut over.
    pub fn group(&self) -> &Arc<dyn TensorGroup<R>> {
        &self.group
    }

    /// The ranks with different tokens, for parameters of experts, if there are several.
    pub fn examples(&self) -> Option<&Arc<dyn TensorGroup<R>>> {
        self.examples.as_ref()
    }

    /// The name of the parameter, which distinguishes its layer's exchanges from others.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs an exchange of the parameter's layer.
    pub fn exchange(&self, what: Exchange, x: &Var<R>) -> Result<Var<R>> {
        self.group.exchange(what, x, &self.name)
    }

    /// Prepares the input of a layer that is cut along its outputs: gathers the sequence where it is cut, and channels
    /// for [`Gathered`](TensorStyle::Gathered). In backward, sums the gradients of all ranks.
    pub fn enter(&self, x: &Var<R>) -> Result<Var<R>> {
        let what = match self.style {
            TensorStyle::Gathered => Exchange::AllGather(x.dims().len().saturating_sub(1)),
            _ if self.sequence => Exchange::AllGather(sequence_of(x)?),
            _ => Exchange::Copy,
        };
        self.exchange(what, x)
    }

    /// This rank's channels of a value that all ranks have, as [`Gathered`](TensorStyle::Gathered) cuts outputs.
    pub(crate) fn split_channels(&self, x: &Var<R>) -> Result<Var<R>> {
        self.exchange(Exchange::Split(x.dims().len().saturating_sub(1)), x)
    }

    /// The outputs of all ranks of a layer that is cut along them, each once, if several ranks have the same ones. Each
    /// rank uses them differently.
    pub(crate) fn all_channels(&self, here: &Var<R>) -> Result<Var<R>> {
        let (last, own) = (here.dims().len() - 1, here.dims()[here.dims().len() - 1]);
        let all = self.exchange(Exchange::AllGather(last), here)?;
        let ranks = (0..self.group.size()).step_by(self.replicas);
        let parts = ranks.map(|rank| all.narrow(-1, rank * own, own)).collect::<Result<Vec<_>>>()?;
        cat(&parts.iter().collect::<Vec<_>>(), -1)
    }

    /// Tells whether every sum of a forward pass is that of one rank.
    pub(crate) fn has_whole_sums(&self) -> bool {
        self.whole_sums
    }

    /// Gathers the output of a [`Gathered`](TensorStyle::Gathered) layer from all ranks' channels. Outputs of other
    /// styles stay as they are.
    pub(crate) fn rejoin(&self, here: Var<R>) -> Result<Var<R>> {
        let last = here.dims().len().saturating_sub(1);
        if self.style == TensorStyle::Gathered { self.exchange(Exchange::Gather(last), &here) } else { Ok(here) }
    }

    /// Prepares an input as [`enter`](Placed::enter) does, for an input that no other layer shares. Where the sequence
    /// is cut, only this rank's part is kept, and the whole is gathered again for the weight's gradient (Korthikanti et
    /// al. 2022). In mixed precision it travels in the dtype in which the layer reads it.
    ///
    /// The second gather comes after the product for the input gradient, and nothing is computed beside it. A split
    /// backward pass gathers in I, and keeps the gathered input until W. A checkpointed block keeps it from its
    /// recomputation on.
    pub(crate) fn enter_alone(&self, x: &Var<R>) -> Result<Var<R>> {
        if !self.sequence {
            return self.enter(x);
        }
        let (dim, group, name) = (sequence_of(x)?, self.group.clone(), self.name.clone());
        // The cast is inside: a cast outside of the recomputed part would keep the whole sequence.
        let gathered = move |x: &[Var<R>]| group.exchange(Exchange::AllGather(dim), &cast_for_product(&x[0])?, &name);
        // Recomputed on every runtime: sequences are cut because no rank can hold the whole.
        with_recomputation(true, || recomputed(&[x], gathered))
    }

    /// The output of a layer that is cut along its outputs and shares its input with no other layer. It is `None`
    /// unless its gather goes [in pieces](super::TensorPlan::exchange_in_pieces).
    pub(crate) fn column_in_pieces(
        &self,
        x: &Var<R>,
        weight: &Var<R>,
        bias: Option<&Var<R>>,
    ) -> Result<Option<Var<R>>> {
        if !self.sequence || self.pieces < 2 {
            return Ok(None);
        }
        let bias = bias.map(cast_for_product).transpose()?;
        let (x, weight) = (cast_for_product(x)?, cast_for_product(weight)?);
        let what = Exchange::AllGather(sequence_of(&x)?);
        self.group.linear_in_pieces(what, [&x, &weight], bias.as_ref(), self.pieces, &self.name).map(Some)
    }

    /// The sum of all ranks' products, for a layer that is cut along its inputs; [`leave`](Placed::leave) describes the
    /// sum. The exchange goes in pieces if the plan asks for it.
    pub fn row_product(&self, x: &Var<R>, weight: &Var<R>) -> Result<Var<R>> {
        if !self.sequence || self.pieces < 2 {
            return self.leave(&x.linear(weight, None)?);
        }
        let (x, weight) = (cast_for_product(x)?, cast_for_product(weight)?);
        let what = Exchange::ReduceScatter(sequence_of(&x)?);
        self.group.linear_in_pieces(what, [&x, &weight], None, self.pieces, &self.name)
    }

    /// Sums the partial outputs of all ranks, for a layer that is cut along its inputs. Where the sequence is cut,
    /// returns this rank's part of the sum.
    pub fn leave(&self, x: &Var<R>) -> Result<Var<R>> {
        self.exchange(if self.sequence { Exchange::ReduceScatter(sequence_of(x)?) } else { Exchange::AllReduce }, x)
    }

    /// Takes this rank's part of a value that all ranks have, `[.., T, C]`, where the next layers work on parts of the
    /// sequence.
    ///
    /// # Errors
    /// An error if `T` is not divisible by the number of ranks.
    pub fn enter_sequence(&self, x: &Var<R>) -> Result<Var<R>> {
        if !self.sequence {
            return Ok(x.clone());
        }
        let (dim, ranks, shape) = (sequence_of(x)?, self.group.size(), x.spec().shape);
        if !shape[dim].is_multiple_of(ranks) {
            let why = format!(
                "sequences of {} tokens cannot be shared out among {ranks} ranks: pad them to {}, or leave out `sequence_parallel`",
                shape[dim],
                shape[dim].next_multiple_of(ranks)
            );
            return Err(Error::shape("sequence parallelism", &[shape], why));
        }
        self.exchange(Exchange::Split(dim), x)
    }

    /// Gathers a value that [`enter_sequence`](Placed::enter_sequence) has cut along the sequence; all ranks then use
    /// it alike.
    pub fn leave_sequence(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.sequence { self.exchange(Exchange::Gather(sequence_of(x)?), x) } else { Ok(x.clone()) }
    }

    /// The index of this rank's part of the sequence between layers, and the number of parts; `None` if the sequence is
    /// not cut.
    pub fn sequence_part(&self) -> Option<(usize, usize)> {
        self.sequence.then(|| (self.group.rank(), self.group.size()))
    }

    /// The element-wise maximum of all ranks' values.
    pub(crate) fn max(&self, x: &Tensor<R>) -> Result<Tensor<R>> {
        self.group.max(x, &self.name)
    }

    /// The logits of all ranks' rows, `[.., V]`, from those of this rank's. Ranks with fewer rows fill up their part of
    /// the exchange with zeros, which come last and are dropped.
    pub(crate) fn all_logits(&self, here: &Var<R>) -> Result<Var<R>> {
        let LocalRows { count, of, .. } = self.rows();
        let (last, most) = (here.dims().len() - 1, of.div_ceil(self.group.size()));
        let what = Exchange::Gather(last);
        if of.is_multiple_of(self.group.size()) {
            return self.exchange(what, here);
        }
        self.exchange(what, &fill_up(here, last, most - count)?)?.narrow(last as isize, 0, of)
    }

    /// The first row of this rank, the number of its rows, and the number of all rows.
    pub(crate) fn rows(&self) -> LocalRows {
        let of = self.placement().logical()[0];
        let own = self.placement().ranges(0).first().cloned().unwrap_or(0..0);
        LocalRows { first: own.start, count: own.len(), of }
    }
}

/// A value with `count` zeros more at the end of dimension `dim`.
pub(crate) fn fill_up<R: Runtime>(x: &Var<R>, dim: usize, count: usize) -> Result<Var<R>> {
    let mut pads = vec![(0, 0); x.dims().len()];
    pads[dim].1 = count;
    x.pad(&pads, 0.0)
}

/// Casts a value to the dtype in which a matrix product reads it in mixed precision.
fn cast_for_product<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    match autocast_dtype().filter(|_| x.dtype() == DType::F32 || x.dtype().is_half()) {
        Some(half) => x.to_dtype(half),
        None => Ok(x.clone()),
    }
}

/// The dimension of `[.., T, C]` along which a sequence is cut.
fn sequence_of<R: Runtime>(x: &Var<R>) -> Result<usize> {
    let shape = x.spec().shape;
    let wrong = || Error::shape("sequence parallelism", &[shape], "needs [.., T, C], to cut it along T");
    shape.rank().checked_sub(2).ok_or_else(wrong)
}

/// Consecutive rows of a vocabulary on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalRows {
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) of: usize,
}

/// Finds the `indices` of rows on this rank: a mask, and the position of each among this rank's rows, 0 for other
/// indices. An index outside of the table counts for the nearest rank, whose look-up rejects it as an uncut table does.
pub(crate) fn local_rows<R: Runtime>(indices: &Var<R>, own: LocalRows) -> Result<(Var<R>, Var<R>)> {
    let LocalRows { first, count, of } = own;
    let end = first + count;
    let above = if first == 0 { i64::MIN } else { first as i64 };
    let below = if end == of { i64::MAX } else { end as i64 };
    static HERE: LazyLock<Program> =
        LazyLock::new(|| Program::new("rows_here", |[i], [above, below]| [i.ge(above) & i.lt(below)]));
    static PLACE: LazyLock<Program> = LazyLock::new(|| {
        Program::build("row_place", 1, 3, |b, i, s| {
            let here = i[0].ge(s[0]) & i[0].lt(s[1]);
            vec![here.select(i[0] - s[2], b.int(0).cast_like(i[0]))]
        })
    });
    let here = indices.apply_program(&HERE, &[], &[above.into(), below.into()])?;
    let place = indices.apply_program(&PLACE, &[], &[above.into(), below.into(), (first as i64).into()])?;
    Ok((here, place))
}
