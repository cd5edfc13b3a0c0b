//! The affine layer, `x · Wᵀ + b`.

use autograd::Var;
use numcore::{
    Error, Result, Runtime,
    ops::{MatmulOps, PointwiseOps},
};

use super::{Adapter, AdapterSlot, optional, without_bias};
use crate::{
    Forward, Init, Initializer, Module, Param,
    parallel::{CutLayer, Cuts, Placed, RowCut, SharedInput, TensorStyle},
};

/// The affine layer `x · Wᵀ + b` of `x: [.., I]`, giving `[.., O]`.
#[derive(Debug, Module)]
pub struct Linear<R: Runtime> {
    /// The weight matrix, `[O, I]`.
    pub weight: Param<R>,
    /// The bias vector, `[O]`, if the layer has one.
    pub bias: Option<Param<R>>,
    /// The slot of an adapter, which computes the output in place of the layer.
    #[module(flatten)]
    pub adapter: AdapterSlot<R>,
}

without_bias!(Linear);

impl<R: Runtime> Linear<R> {
    /// Creates a layer with weight and bias uniform in `±1/√inputs`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = init.weight([outputs, inputs], Initializer::by_fan(inputs))?;
        let bias = Some(init.bias([outputs], Initializer::by_fan(inputs))?);
        Ok(Linear { weight, bias, adapter: AdapterSlot::default() }.with_cuts(Cuts::Weight(RowCut::anywhere(outputs))))
    }

    /// Drops the bias unless `keep`.
    pub fn with_bias_if(self, keep: bool) -> Self {
        if keep { self } else { self.without_bias() }
    }

    /// Computes `x · Wᵀ + b + residual`, with `residual: [.., O]` if given, added in the epilogue of the GEMM if the
    /// runtime supports that.
    #[track_caller]
    pub fn forward_onto<'r>(&self, x: &Var<R>, residual: impl Into<Option<&'r Var<R>>>) -> Result<Var<R>> {
        match (self.adapter.get(), residual.into()) {
            (None, residual) => self.product(x, residual),
            (Some(_), None) => self.adapted(x),
            (Some(_), Some(residual)) => self.adapted(x)?.add(residual),
        }
    }

    /// Computes `x · Wᵀ + b` without the adapter, for an input that an [adapter](Adapter::forward) was given.
    #[track_caller]
    pub fn plain(&self, x: &Var<R>) -> Result<Var<R>> {
        match self.weight.placed() {
            Some(placed) if placed.style() == TensorStyle::Row => self.summed(&placed, x, None),
            _ => self.product_here(x, None),
        }
    }

    /// Completes this rank's product `x · Wᵀ`, which an [adapter](Adapter::forward) computed: summed over ranks, if the
    /// layer is cut along its inputs, with the bias.
    #[track_caller]
    pub fn complete(&self, product: Var<R>) -> Result<Var<R>> {
        let product = match self.weight.placed().filter(|placed| placed.style() == TensorStyle::Row) {
            Some(placed) => placed.leave(&product)?,
            None => product,
        };
        plus(product, optional(&self.bias).as_ref())
    }

    /// This rank's share of `count` heads or channels of the uncut layer.
    pub(crate) fn share_of(&self, count: usize) -> usize {
        if !self.is_column() {
            return count;
        }
        let (own, all) = (self.weight.shape()[0], self.weight.logical_shape()[0]);
        (count * own).checked_div(all).unwrap_or(count)
    }

    /// This rank's first head, of `here` ones that it has, where heads are cut over ranks.
    pub(crate) fn first_head(&self, here: usize) -> Option<usize> {
        let placed = self.weight.placed().filter(|placed| placed.style() == TensorStyle::Column)?;
        // A fused weight begins with queries.
        let rows = placed.placement().ranges(0).first()?.clone();
        (rows.start * here).checked_div(rows.len())
    }

    /// Tells whether outputs stay cut.
    pub(crate) fn is_column(&self) -> bool {
        self.weight.placed().is_some_and(|placed| placed.style() == TensorStyle::Column)
    }

    #[track_caller]
    fn product(&self, x: &Var<R>, residual: Option<&Var<R>>) -> Result<Var<R>> {
        let Some(placed) = self.weight.placed() else { return self.product_here(x, residual) };
        match placed.style() {
            // No plan shards a linear layer as experts.
            TensorStyle::Replicated | TensorStyle::Experts => self.product_here(x, residual),
            TensorStyle::Column => {
                match placed.column_in_pieces(x, &self.weight.var(), optional(&self.bias).as_ref())? {
                    Some(here) => plus(here, residual),
                    None => self.product_here(&placed.enter_alone(x)?, residual),
                }
            }
            TensorStyle::Row => self.summed(&placed, x, residual),
            TensorStyle::Gathered => {
                // Added in the product, as on one rank: half precision is rounded once.
                let own = residual.map(|residual| placed.split_channels(residual)).transpose()?;
                placed.rejoin(self.product_here(&placed.enter(x)?, own.as_ref())?)
            }
            TensorStyle::Vocabulary => {
                let here = self.product_here(&placed.enter_alone(x)?, None)?;
                plus(placed.all_logits(&here)?, residual)
            }
        }
    }

    #[track_caller]
    fn product_here(&self, x: &Var<R>, residual: Option<&Var<R>>) -> Result<Var<R>> {
        let (weight, bias) = (self.weight.var(), optional(&self.bias));
        match residual {
            None => x.linear(&weight, bias.as_ref()),
            Some(residual) => x.linear_onto(&weight, bias.as_ref(), residual),
        }
    }

    /// Sums the products of all ranks, for a layer that is cut along its inputs. The bias is added after the sum, so
    /// once.
    #[track_caller]
    fn summed(&self, placed: &Placed<R>, x: &Var<R>, residual: Option<&Var<R>>) -> Result<Var<R>> {
        let sum = placed.row_product(x, &self.weight.var())?;
        plus(plus(sum, optional(&self.bias).as_ref())?, residual)
    }

    /// The adapter's output for `x`, which is complete on all ranks or cut along the sequence. Cut logits are gathered,
    /// and outputs of [`TensorStyle::Gathered`].
    #[track_caller]
    fn adapted(&self, x: &Var<R>) -> Result<Var<R>> {
        let here = self.forward_entered(&self.enter(x)?)?;
        match self.weight.placed() {
            Some(placed) if placed.style() == TensorStyle::Vocabulary => placed.all_logits(&here),
            _ => Ok(here),
        }
    }

    /// Returns this layer for its adapter, or an error if the layer is cut and the adapter does not support that.
    fn adaptable(&self, adapter: &dyn Adapter<R>) -> Result<&Self> {
        match self.weight.placed() {
            Some(placed) if !placed.placement().is_whole() && !adapter.can_be_cut() => {
                let why = "is cut over ranks, and has an adapter that computes with whole weights (`Adapter::can_be_cut`): leave the layer whole in the plan (`sequence`, where the sequence is cut)";
                Err(Error::state(self.weight.leaf().name().to_string(), why))
            }
            _ => Ok(self),
        }
    }
}

#[track_caller]
fn plus<R: Runtime>(x: Var<R>, other: Option<&Var<R>>) -> Result<Var<R>> {
    other.map_or(Ok(x.clone()), |other| x.add(other))
}

impl<R: Runtime> CutLayer<R> for Linear<R> {
    fn with_cuts(self, cuts: Cuts) -> Self {
        let Linear { weight, bias, adapter } = self;
        let of_bias = match cuts {
            Cuts::Weight(rows) => Cuts::Bias(rows),
            cuts => cuts,
        };
        Linear { weight: weight.with_cuts(cuts), bias: bias.map(|bias| bias.with_cuts(of_bias)), adapter }
    }

    #[track_caller]
    fn project_here(&self, x: &Var<R>) -> Result<Var<R>> {
        match self.weight.placed().filter(|placed| placed.style() == TensorStyle::Vocabulary) {
            Some(placed) => self.forward_entered(&placed.enter_alone(x)?),
            None => self.forward_entered(x),
        }
    }
}

impl<R: Runtime> SharedInput<R> for Linear<R> {
    #[track_caller]
    fn enter(&self, x: &Var<R>) -> Result<Var<R>> {
        use TensorStyle::{Column, Gathered, Vocabulary};
        match self.weight.placed() {
            Some(placed) if matches!(placed.style(), Column | Gathered | Vocabulary) => placed.enter(x),
            _ => Ok(x.clone()),
        }
    }

    #[track_caller]
    fn forward_entered(&self, x: &Var<R>) -> Result<Var<R>> {
        let here = match self.adapter.get() {
            Some(adapter) => adapter.forward(self.adaptable(&*adapter)?, x)?,
            None => self.plain(x)?,
        };
        self.weight.placed().map_or(Ok(here.clone()), |placed| placed.rejoin(here))
    }
}

impl<R: Runtime> Forward<R> for Linear<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.forward_onto(x, None::<&Var<R>>)
    }
}
