//! Embeddings: rows of a table by index.

use std::sync::Arc;

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ViewOps, cat},
};

use crate::{
    Forward, Init, Initializer, Module, Param,
    parallel::{CutLayer, Cuts, Exchange, Placed, TensorStyle, fill_up, local_rows},
};

/// An embedding: maps indices `[..]` (`i64`) to rows of a table, giving `[.., D]`.
#[derive(Debug, Module)]
pub struct Embedding<R: Runtime> {
    /// The table with one row per token, `[V, D]`.
    pub weight: Param<R>,
    frozen_row: Option<usize>,
}

impl<R: Runtime> Embedding<R> {
    /// Creates a table of `rows` standard normal vectors.
    #[track_caller]
    pub fn new(init: &Init<R>, rows: usize, width: usize) -> Result<Self> {
        let weight = init.weight([rows, width], Initializer::Normal { mean: 0.0, std: 1.0 })?;
        Ok(Embedding { weight: weight.with_cuts(Cuts::Table), frozen_row: None })
    }

    /// Creates a table of the sinusoidal encodings of positions (Vaswani et al. 2017), frozen. Even channels have
    /// `sin(p ω)`, and odd ones `cos(p ω)`, with `ω = 10000^(−2i/D)` for channels `2i` and `2i + 1`.
    #[doc(alias("PositionalEncoding", "positional"))]
    #[track_caller]
    pub fn sinusoidal(init: &Init<R>, positions: usize, width: usize) -> Result<Self> {
        let mut element = 0;
        let next = || {
            let (position, channel) = (element / width, element % width);
            element += 1;
            let angle = position as f64 * 10000f64.powf(-((channel - channel % 2) as f64) / width as f64);
            if channel.is_multiple_of(2) { angle.sin() } else { angle.cos() }
        };
        let weight = init.param([positions, width], Initializer::Zeros)?;
        weight.set(Tensor::from_f64_fn(init.runtime(), [positions, width], weight.dtype(), next)?)?;
        weight.set_requires_grad(false);
        Ok(Embedding { weight: weight.with_cuts(Cuts::Table), frozen_row: None })
    }

    /// Uses a parameter, which other layers may share, as the table.
    pub fn of(weight: Param<R>) -> Self {
        Embedding { weight, frozen_row: None }
    }

    /// Makes row `index` the padding token: sets it to 0 and stops gradients to it.
    ///
    /// # Errors
    /// An error if the table has no such row.
    #[track_caller]
    pub fn with_padding_idx(mut self, index: usize) -> Result<Self> {
        self.check_row(index)?;
        let shape = self.weight.shape();
        self.weight.set(without_row(&self.weight.value()?, index, shape)?)?;
        self.frozen_row = Some(index);
        Ok(self)
    }

    /// Freezes row `index`: no gradient flows to it, and its values are kept, as for a pretrained padding token.
    ///
    /// # Errors
    /// An error if the table has no such row.
    #[track_caller]
    pub fn with_frozen_row(mut self, index: usize) -> Result<Self> {
        self.check_row(index)?;
        self.frozen_row = Some(index);
        Ok(self)
    }

    /// Computes `x · Wᵀ`, `[.., V]`: the logits of a head tied to this table. Where the table is cut, every rank gets
    /// all logits.
    #[track_caller]
    pub fn project(&self, x: &Var<R>) -> Result<Var<R>> {
        let here = self.project_here(x)?;
        match self.cut() {
            None => Ok(here),
            Some(placed) => placed.all_logits(&here),
        }
    }

    /// The placement of the table, if it is cut along its rows.
    fn cut(&self) -> Option<Arc<Placed<R>>> {
        self.weight.placed().filter(|placed| placed.style() == TensorStyle::Vocabulary)
    }

    /// Looks up rows of a table that is cut along them: each rank adds the rows it has, and zeros for others, to a sum.
    fn summed(&self, placed: &Placed<R>, indices: &Var<R>) -> Result<Var<R>> {
        let (here, place) = local_rows(indices, placed.rows())?;
        // A rank without rows reads one of zeros, which no index means.
        let none = usize::from(placed.rows().count == 0);
        let rows = fill_up(&self.weight.var(), 0, none)?.embedding(&place)?.where_cond(&here.unsqueeze(-1)?, 0.0)?;
        placed.exchange(Exchange::AllReduce, &rows)
    }

    #[track_caller]
    fn check_row(&self, index: usize) -> Result<()> {
        match self.weight.logical_shape()[0] {
            rows if index < rows => Ok(()),
            rows => {
                let allowed = format!("in 0..{rows}, the rows of the table");
                Err(Error::range("embedding", "padding index", index, allowed)).at_caller()
            }
        }
    }
}

fn without_row<R: Runtime>(table: &Tensor<R>, row: usize, shape: Shape) -> Result<Tensor<R>> {
    let zero = Tensor::zeros(table.runtime(), [1, shape[1]], table.dtype())?;
    cat(&[&table.narrow(0, 0, row)?, &zero, &table.narrow(0, row + 1, shape[0] - row - 1)?], 0)
}

impl<R: Runtime> CutLayer<R> for Embedding<R> {
    fn with_cuts(self, cuts: Cuts) -> Self {
        Embedding { weight: self.weight.with_cuts(cuts), ..self }
    }

    #[track_caller]
    fn project_here(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.cut().map_or(Ok(x.clone()), |placed| placed.enter_alone(x))?;
        x.linear(&self.weight.var(), None)
    }
}

impl<R: Runtime> Forward<R> for Embedding<R> {
    #[track_caller]
    fn forward(&self, indices: &Var<R>) -> Result<Var<R>> {
        let rows = match self.cut() {
            None => self.weight.var().embedding(indices).at_caller()?,
            Some(placed) => self.summed(&placed, indices)?,
        };
        match self.frozen_row {
            None => Ok(rows),
            Some(p) => rows.where_cond(&indices.ne(p as f64)?.unsqueeze(-1)?, &rows.detach()),
        }
    }
}
