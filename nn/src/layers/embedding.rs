//! Embeddings: rows of a table by index.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, IndexOps, PointwiseOps, ViewOps, cat},
};

use crate::{Forward, Init, Initializer, Module, Param};

/// An embedding: rows of a table named by indices `[..]` (`i64`), giving `[.., D]`.
#[derive(Debug, Module)]
pub struct Embedding<R: Runtime> {
    /// One row per token: `[V, D]`.
    pub weight: Param<R>,
    frozen_row: Option<usize>,
}

impl<R: Runtime> Embedding<R> {
    /// A table of `rows` standard normal vectors.
    pub fn new(init: &Init<R>, rows: usize, width: usize) -> Result<Self> {
        let weight = init.weight([rows, width], Initializer::Normal { mean: 0.0, std: 1.0 })?;
        Ok(Embedding { weight, frozen_row: None })
    }

    /// Makes row `index` the padding token: it is 0, and no gradient flows to it.
    pub fn with_padding_idx(mut self, index: usize) -> Result<Self> {
        self.check_row(index)?;
        let shape = self.weight.shape();
        self.weight.set(without_row(&self.weight.value()?, index, shape)?)?;
        self.frozen_row = Some(index);
        Ok(self)
    }

    /// Keeps row `index` as it is: no gradient flows to it. What a pretrained padding token has is kept.
    pub fn with_frozen_row(mut self, index: usize) -> Result<Self> {
        self.check_row(index)?;
        self.frozen_row = Some(index);
        Ok(self)
    }

    fn check_row(&self, index: usize) -> Result<()> {
        match self.weight.shape()[0] {
            rows if index < rows => Ok(()),
            rows => Err(Error::argument("embedding", format!("padding index {index} of a table with {rows} rows"))),
        }
    }
}

fn without_row<R: Runtime>(table: &Tensor<R>, row: usize, shape: Shape) -> Result<Tensor<R>> {
    let zero = Tensor::zeros(table.runtime(), [1, shape[1]], table.dtype())?;
    cat(&[&table.narrow(0, 0, row)?, &zero, &table.narrow(0, row + 1, shape[0] - row - 1)?], 0)
}

impl<R: Runtime> Forward<R> for Embedding<R> {
    #[track_caller]
    fn forward(&self, indices: &Var<R>) -> Result<Var<R>> {
        let rows = self.weight.var().embedding(indices).at_caller()?;
        match self.frozen_row {
            None => Ok(rows),
            Some(p) => rows.where_cond(&indices.ne(p as f64)?.unsqueeze(-1)?, &rows.detach()),
        }
    }
}
