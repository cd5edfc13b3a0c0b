//! What a parameter is told when its model is cut.

use std::sync::{Arc, LazyLock};

use autograd::{Var, autocast_dtype, recomputed, with_recomputation};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, MatmulOps, PointwiseOps},
    placement::TensorPlacement,
    pointwise::Program,
};

use super::{Exchange, TensorGroup, TensorStyle};

/// What this rank has of a parameter, and the group of ranks that it is cut over.
#[derive(Debug)]
pub struct Placed<R: Runtime> {
    pub(super) name: Arc<str>,
    pub(super) style: TensorStyle,
    pub(super) placement: TensorPlacement,
    pub(super) replicas: usize,
    pub(super) partial: bool,
    pub(super) sequence: bool,
    /// In how many pieces a layer exchanges parts of the sequence in forward.
    pub(super) pieces: usize,
    pub(super) group: Arc<dyn TensorGroup<R>>,
    pub(super) examples: Option<Arc<dyn TensorGroup<R>>>,
}

impl<R: Runtime> Placed<R> {
    /// How the parameter's layer is cut.
    pub fn style(&self) -> TensorStyle {
        self.style
    }

    /// The piece that this rank has.
    pub fn placement(&self) -> &TensorPlacement {
        &self.placement
    }

    /// How many consecutive ranks of the group have this piece.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Whether this is the first of the ranks that have this piece: the one that saves it, and whose squares count in a norm.
    pub fn is_first_replica(&self) -> bool {
        self.group.rank().is_multiple_of(self.replicas)
    }

    /// Whether the gradient here is a part of a sum over the ranks that have this piece.
    pub fn has_partial_gradient(&self) -> bool {
        self.partial
    }

    /// The ranks.
    pub fn group(&self) -> &Arc<dyn TensorGroup<R>> {
        &self.group
    }

    /// The ranks that examples are shared out among, of the parameters of experts, where there are several.
    pub fn examples(&self) -> Option<&Arc<dyn TensorGroup<R>>> {
        self.examples.as_ref()
    }

    /// The name of the parameter, by which the exchanges of its layer are told apart.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// An exchange of the parameter's layer.
    pub fn exchange(&self, what: Exchange, x: &Var<R>) -> Result<Var<R>> {
        self.group.exchange(what, x, &self.name)
    }

    /// A layer's input, for a layer that is cut along its outputs: all of the sequence, and in backward the sum of all ranks' gradients.
    pub fn enter(&self, x: &Var<R>) -> Result<Var<R>> {
        self.exchange(if self.sequence { Exchange::AllGather(sequence_of(x)?) } else { Exchange::Copy }, x)
    }

    /// The input of one layer alone, which is cut along its outputs, as [`enter`](Placed::enter) has it. Where the sequence is cut, the whole of
    /// it is gathered again for the gradient of the weight, and only this rank's part is kept until then (Korthikanti et al. 2022). In mixed
    /// precision it travels in the type in which the layer reads it.
    ///
    /// That gather comes after the product that is the gradient of the input, and nothing is computed beside it. A split backward pass makes it
    /// in I, and keeps the whole until W; a checkpointed block gathers a third time.
    pub fn enter_alone(&self, x: &Var<R>) -> Result<Var<R>> {
        if !self.sequence {
            return self.enter(x);
        }
        let (dim, group, name) = (sequence_of(x)?, self.group.clone(), self.name.clone());
        // Cast here: the cast of a value that is recomputed would be kept, of the whole sequence.
        let gathered = move |x: &[Var<R>]| group.exchange(Exchange::AllGather(dim), &cast_for_product(&x[0])?, &name);
        // On every runtime: sequences are cut because no rank holds the whole.
        with_recomputation(true, || recomputed(&[x], gathered))
    }

    /// The output of one layer alone that is cut along its outputs, where what it gathers is [in pieces](super::TensorPlan::exchange_in_pieces): none
    /// where it is not.
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

    /// The sum of all ranks' products of a layer that is cut along its inputs, as [`leave`](Placed::leave) has it of the product; in pieces, if they are
    /// asked for.
    pub fn row_product(&self, x: &Var<R>, weight: &Var<R>) -> Result<Var<R>> {
        if !self.sequence || self.pieces < 2 {
            return self.leave(&x.linear(weight, None)?);
        }
        let (x, weight) = (cast_for_product(x)?, cast_for_product(weight)?);
        let what = Exchange::ReduceScatter(sequence_of(&x)?);
        self.group.linear_in_pieces(what, [&x, &weight], None, self.pieces, &self.name)
    }

    /// The sum of all ranks' partial outputs, of a layer that is cut along its inputs: this rank's part of the sequence, where that is cut.
    pub fn leave(&self, x: &Var<R>) -> Result<Var<R>> {
        self.exchange(if self.sequence { Exchange::ReduceScatter(sequence_of(x)?) } else { Exchange::AllReduce }, x)
    }

    /// This rank's part of a value that all ranks have, `[.., T, C]`, where what follows works on parts of the sequence.
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

    /// The whole of a value that is cut along the sequence where [`enter_sequence`](Placed::enter_sequence) has cut it; all ranks go on with
    /// it alike.
    pub fn leave_sequence(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.sequence { self.exchange(Exchange::Gather(sequence_of(x)?), x) } else { Ok(x.clone()) }
    }

    /// Which part of the sequence values between layers are, and of how many; none where they are whole.
    pub fn sequence_part(&self) -> Option<(usize, usize)> {
        self.sequence.then(|| (self.group.rank(), self.group.size()))
    }

    /// The largest of all ranks' values, element by element.
    pub(crate) fn max(&self, x: &Tensor<R>) -> Result<Tensor<R>> {
        self.group.max(x, &self.name)
    }

    /// Where this rank's rows begin, and how many of how many it has.
    pub(crate) fn rows(&self) -> RowsHere {
        let of = self.placement.logical()[0];
        let own = self.placement.ranges(0).first().cloned().unwrap_or(0..0);
        RowsHere { first: own.start, count: own.len(), of }
    }
}

/// A value as a matrix product reads it in mixed precision.
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

/// Consecutive rows of a vocabulary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsHere {
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) of: usize,
}

/// Which of `indices` name rows that are here, and where those lie among them; 0 for others. An index that names no row at all is one
/// of the nearest rank's, whose look-up refuses it as that of a whole table does.
pub(crate) fn own_rows<R: Runtime>(indices: &Var<R>, own: RowsHere) -> Result<(Var<R>, Var<R>)> {
    let RowsHere { first, count, of } = own;
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
