//! The adapter of a linear layer, and its computation.

use std::{any::Any, sync::Arc};

use autograd::{Var, no_grad};
use nn::{
    Adapter, AdapterSlot, Dropout, Init, Initializer, Linear, Module, Param,
    parallel::{ContextSlot, Cuts, Exchange, Placed, SequencePart, TensorStyle},
};
use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::LoraConfig;

/// The adapter of a linear layer, which computes `W x + s · B A x`. With a magnitude `m` for each output (DoRA, Liu et
/// al. 2024) it computes `m / ‖W + s B A‖ · (W + s B A) x`, with the norm as a constant in backward.
#[derive(Debug, Module)]
pub struct LoraAdapter<R: Runtime> {
    /// The projection down, `[r, I]`.
    #[module(rename = "lora_A")]
    pub a: LowRank<R>,
    /// The projection up, `[O, r]`.
    #[module(rename = "lora_B")]
    pub b: LowRank<R>,
    /// The magnitude of each output, `[O]`, for DoRA.
    #[module(rename = "lora_magnitude_vector")]
    pub magnitude: Option<Param<R>>,
    dropout: Dropout,
    /// The ranks that sequences are cut over: dropout masks are those of full sequences.
    context: ContextSlot<R>,
    scale: f64,
    /// The adapter below this one, which computes the layer in place of its weight: a weight in four bits.
    #[module(skip)]
    base: AdapterSlot<R>,
}

/// One of the two matrices of an adapter.
#[derive(Debug, Module)]
pub struct LowRank<R: Runtime> {
    /// The matrix.
    pub weight: Param<R>,
}

impl<R: Runtime> LoraAdapter<R> {
    pub(super) fn new(
        init: &Init<R>,
        weight: &Param<R>,
        base: AdapterSlot<R>,
        config: &LoraConfig,
        theirs: &str,
    ) -> Result<Self> {
        let (shape, rank) = (weight.shape(), config.rank_of(theirs));
        let (outputs, inputs) = (shape[0], shape[1]);
        let rows = weight.cuts().rows(outputs);
        let a = init.param([rank, inputs], Initializer::by_fan(inputs))?.with_cuts(Cuts::LowRankDown);
        let b = init.param([outputs, rank], Initializer::Zeros)?.with_cuts(Cuts::LowRankUp(rows));
        let adapter = LoraAdapter {
            a: LowRank { weight: a },
            b: LowRank { weight: b },
            magnitude: None,
            dropout: Dropout::new(config.dropout)?,
            context: ContextSlot::locates(),
            scale: config.scale_of(theirs),
            base,
        };
        if !config.dora {
            return Ok(adapter);
        }
        // The norms are the weight's own, since B is 0.
        let magnitude = init.param([outputs], Initializer::Ones)?.with_cuts(Cuts::Bias(rows));
        magnitude.leaf().put(row_norms(weight, &weight.value()?.to_dtype(magnitude.dtype())?)?)?;
        Ok(LoraAdapter { magnitude: Some(magnitude), ..adapter })
    }

    /// The adapter below this one, if any; see the field.
    pub(super) fn base(&self) -> Option<Arc<dyn Adapter<R>>> {
        self.base.get()
    }

    /// The layer's output without this adapter.
    fn plain(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        match self.base.get() {
            Some(base) => base.forward(layer, x),
            None => layer.plain(x),
        }
    }

    /// The update of the weight, `s · B A`, in the adapter's element type.
    pub(super) fn update(&self) -> Result<Tensor<R>> {
        self.b.weight.value()?.matmul(&self.a.weight.value()?)?.mul(self.scale)
    }

    /// The layer's input after dropout. The dropped elements are those that one rank with all of the input would drop.
    fn dropped(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        let (dims, placed) = (x.dims(), layer.weight.placed());
        let mut parts = Vec::new();
        if self.dropout.is_identity() {
            return Ok(x.clone());
        }
        if dims.len() >= 2 {
            // Between layers, sequences may be cut. A layer that is not cut then computes a part of the sequence, and a
            // part of its gradient.
            let is_part = |p: &Arc<Placed<R>>| p.style() == TensorStyle::Replicated && p.has_partial_gradient();
            let within = placed.clone().filter(is_part).and_then(|placed| placed.sequence_part());
            let part = self.context.part_of_values(dims[dims.len() - 2], within)?;
            if dims.len() == 2 && part.is_some() {
                let why = format!(
                    "sequences are cut over ranks, and [N, C] does not show where one of them ends: give `{}`, which has an adapter, [.., T, C]",
                    layer.weight.leaf().name()
                );
                return Err(Error::shape("dropout", &[x.spec().shape], why));
            }
            parts.extend(part.map(|part| (dims.len() - 2, part)));
        }
        if let Some(placed) = placed.filter(|placed| is_row(placed)) {
            let (inputs, here) = (placed.placement().logical()[1], placed.placement().ranges(1));
            parts.push((dims.len() - 1, SequencePart::of(inputs, here.iter().cloned())));
        }
        self.dropout.forward_piece(x, &parts.iter().map(|(dim, part)| (*dim, part)).collect::<Vec<_>>())
    }

    /// `s · B A x`, in the element type of `x`. `B` is cut with a layer that is cut along its outputs, `A` with one
    /// that is cut along its inputs. The products of `A` are then summed over the ranks, while they have only `r`
    /// elements a token.
    fn low_rank(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        let [a, b] = [&self.a.weight, &self.b.weight];
        let style = |p: &Param<R>| p.placed().map(|placed| placed.style());
        let due = style(&layer.weight);
        if let Some(other) = [b, a].into_iter().find(|p| style(p) != due) {
            let why = format!(
                "is cut by {:?}, and its layer by {due:?}: let a line of the plan name the layer, and not a parameter of it",
                style(other)
            );
            return Err(Error::state(other.leaf().name().to_string(), why));
        }
        let (x_own, weight) = (x.to_dtype(a.dtype())?, a.var());
        let down = match a.placed().filter(|placed| is_row(placed)) {
            Some(placed) => placed.row_product(&x_own, &weight)?,
            None => x_own.linear(&weight, None)?,
        };
        down.mul(self.scale)?.linear(&b.var(), None)?.to_dtype(x.dtype())
    }

    /// The gains `m / ‖W + s B A‖`, `[O]`, whose gradient reaches `m` alone.
    fn gains(&self, magnitude: &Param<R>, weight: &Param<R>) -> Result<Var<R>> {
        let norms = no_grad(|| {
            let update = self.update()?;
            row_norms(weight, &weight.value()?.to_dtype(update.dtype())?.add(&update)?)
        })?;
        magnitude.var().div(&Var::new(norms))
    }
}

impl<R: Runtime> Adapter<R> for LoraAdapter<R> {
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        let plain = self.plain(layer, x)?;
        let dropped = self.dropped(layer, x)?;
        let update = self.low_rank(layer, &dropped)?;
        let Some(magnitude) = &self.magnitude else { return plain.add(&update) };
        let gains = self.gains(magnitude, &layer.weight)?.to_dtype(x.dtype())?;
        // The magnitude does not scale the bias. With dropout, the base output that it scales is computed from dropped
        // inputs, as peft defines it.
        let whole = if self.dropout.is_identity() { plain.clone() } else { self.plain(layer, &dropped)? };
        let base = match &layer.bias {
            Some(bias) => whole.sub(&bias.var())?,
            None => whole,
        };
        plain.add(&gains.sub(1.0)?.mul(&base)?)?.add(&gains.mul(&update)?)
    }

    fn can_be_cut(&self) -> bool {
        self.base.get().is_none_or(|base| base.can_be_cut())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Tells whether a parameter is of a layer that is cut along its inputs.
fn is_row<R: Runtime>(placed: &Placed<R>) -> bool {
    placed.style() == TensorStyle::Row
}

/// The Euclidean norm of each row of `value`, which has the layout of the parameter `of`. Where that is cut along its
/// inputs, each rank has a part of every row, and squares are summed over ranks.
pub(super) fn row_norms<R: Runtime>(of: &Param<R>, value: &Tensor<R>) -> Result<Tensor<R>> {
    let squares = value.square()?.sum(&[1])?.flatten(0, -1)?;
    match of.placed().filter(|placed| is_row(placed)) {
        Some(placed) => no_grad(|| placed.exchange(Exchange::AllReduce, &Var::new(squares))?.value())?.sqrt(),
        None => squares.sqrt(),
    }
}
