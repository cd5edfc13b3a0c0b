//! One adapter, and what it computes.

use std::{any::Any, sync::Arc};

use autograd::{Var, no_grad};
use nn::{Adapter, AdapterSlot, Dropout, Forward, Init, Initializer, Linear, Module, Param, parallel::ContextSlot};
use numcore::{
    Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::LoraConfig;

/// The adapter of a linear layer: `W x + s · B A x`, or with a magnitude `m` for each output (DoRA, Liu et al. 2024)
/// `m / ‖W + s B A‖ · (W + s B A) x`, the norm taken as a constant in backward.
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
    /// Where there is dropout: the ranks that sequences are cut over, by which masks are those of whole sequences.
    context: Option<ContextSlot<R>>,
    scale: f64,
    /// What computes the layer without this adapter, if not its weight: the weight in four bits.
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
        let b = LowRank { weight: init.param([outputs, rank], Initializer::Zeros)? };
        let adapter = LoraAdapter {
            a: LowRank { weight: init.param([rank, inputs], Initializer::by_fan(inputs))? },
            b,
            magnitude: None,
            dropout: Dropout::new(config.dropout)?,
            context: (config.dropout > 0.0).then(ContextSlot::attends),
            scale: config.scale_of(theirs),
            base,
        };
        if !config.dora {
            return Ok(adapter);
        }
        // B is 0: the norms are the weight's own.
        let magnitude = init.param([outputs], Initializer::Ones)?;
        magnitude.leaf().put(row_norms(&weight.value()?.to_dtype(magnitude.dtype())?)?)?;
        Ok(LoraAdapter { magnitude: Some(magnitude), ..adapter })
    }

    /// What computes the layer without this adapter, if not its weight.
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

    /// The layer's input after dropout.
    fn dropped(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        let Some(context) = self.context.as_ref().filter(|_| x.dims().len() >= 2) else {
            return self.dropout.forward(x);
        };
        let within = layer.weight.placed().and_then(|placed| placed.sequence_part());
        let part = context.part_of_values(x.dims()[x.dims().len() - 2], within)?;
        self.dropout.forward_part(x, part.as_ref())
    }

    /// `s · B A x`, in the element type of `x`.
    fn low_rank(&self, x: &Var<R>) -> Result<Var<R>> {
        let own = self.a.weight.dtype();
        let down = x.to_dtype(own)?.linear(&self.a.weight.var(), None)?;
        down.mul(self.scale)?.linear(&self.b.weight.var(), None)?.to_dtype(x.dtype())
    }

    /// `m / ‖W + s B A‖`, of which the gradient sees `m` alone.
    fn gains(&self, magnitude: &Param<R>, weight: &Param<R>) -> Result<Var<R>> {
        let norms = no_grad(|| {
            let update = self.update()?;
            row_norms(&weight.value()?.to_dtype(update.dtype())?.add(&update)?)
        })?;
        magnitude.var().div(&Var::new(norms))
    }
}

impl<R: Runtime> Adapter<R> for LoraAdapter<R> {
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        let plain = self.plain(layer, x)?;
        let dropped = self.dropped(layer, x)?;
        let update = self.low_rank(&dropped)?;
        let Some(magnitude) = &self.magnitude else { return plain.add(&update) };
        let gains = self.gains(magnitude, &layer.weight)?.to_dtype(x.dtype())?;
        // The bias has no magnitude. With dropout, so has the part that is always there: peft's definition.
        let whole = if self.dropout.is_identity() { plain.clone() } else { self.plain(layer, &dropped)? };
        let base = match &layer.bias {
            Some(bias) => whole.sub(&bias.var())?,
            None => whole,
        };
        plain.add(&gains.sub(1.0)?.mul(&base)?)?.add(&gains.mul(&update)?)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The Euclidean norm of each row.
pub(super) fn row_norms<R: Runtime>(weight: &Tensor<R>) -> Result<Tensor<R>> {
    weight.square()?.sum(&[1], false)?.sqrt()?.flatten(0, -1)
}
