//! Bags of rows of a table, reduced to one row each.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Tensor, Within,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::Embedding;
use crate::{Init, Module};

/// The reduction of a bag's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BagMode {
    /// The mean of the rows.
    #[default]
    Mean,
    /// The sum of the rows, each times its weight if weights are given.
    Sum,
    /// The largest value of each channel.
    Max,
}

/// An embedding of bags of indices: the mean, sum or maximum of rows of a table, `[N, D]`. An empty bag gives zeros.
///
/// The rows of all bags are in memory at once, each bag filled up to the longest.
#[derive(Debug, Module)]
pub struct EmbeddingBag<R: Runtime> {
    /// The table, `[V, D]`, under the name `weight`.
    #[module(flatten)]
    pub table: Embedding<R>,
    /// The reduction of each bag.
    #[module(skip)]
    pub mode: BagMode,
    padding: Option<i64>,
}

impl<R: Runtime> EmbeddingBag<R> {
    /// A table of `rows` standard normal vectors.
    #[track_caller]
    pub fn new(init: &Init<R>, rows: usize, width: usize, mode: BagMode) -> Result<Self> {
        Ok(EmbeddingBag { table: Embedding::new(init, rows, width)?, mode, padding: None })
    }

    /// Leaves an index out of its bags, and sets its row to 0.
    ///
    /// # Errors
    /// An error if the table has no such row.
    #[track_caller]
    pub fn with_padding_idx(self, index: usize) -> Result<Self> {
        Ok(EmbeddingBag { table: self.table.with_padding_idx(index)?, padding: Some(index as i64), ..self })
    }

    /// Reduces bags of one length, `indices: [N, L]` (`i64`). With `weights: [N, L]`, each row is multiplied by its
    /// weight.
    ///
    /// # Errors
    /// An error if a mode other than the sum is given weights.
    #[track_caller]
    pub fn forward(&self, indices: &Var<R>, weights: Option<&Var<R>>) -> Result<Var<R>> {
        let shape = indices.spec().shape;
        if shape.rank() != 2 {
            return Err(Error::shape("embedding_bag", &[shape], "needs indices [N, L]")).at_caller();
        }
        let here = match self.padding {
            Some(padding) => indices.ne(padding as f64)?,
            None => Var::new(Tensor::full(indices.runtime(), shape, DType::Bool, true)?),
        };
        self.reduced(indices, &here, weights).at_caller()
    }

    /// Reduces bags of any lengths. Bag `n` begins at `offsets[n]` of `indices: [T]` (`i64`), and ends where the next
    /// begins. With `weights: [T]`, each row is multiplied by its weight.
    ///
    /// # Errors
    /// An error if offsets do not begin with 0, decrease, or lie beyond the indices.
    #[doc(alias = "offsets")]
    #[track_caller]
    pub fn forward_bags(&self, indices: &Var<R>, offsets: &[usize], weights: Option<&Var<R>>) -> Result<Var<R>> {
        let (shape, rt) = (indices.spec().shape, indices.runtime());
        let fits = shape.rank() == 1 && offsets.first().is_none_or(|&first| first == 0) && offsets.is_sorted();
        let total = shape.numel();
        if !fits || offsets.is_empty() && total > 0 || offsets.last().is_some_and(|&last| last > total) {
            let why = format!("needs indices [T], and offsets that begin with 0 and do not decrease; got {offsets:?}");
            return Err(Error::shape("embedding_bag", &[shape], why)).at_caller();
        }
        let ends = offsets.iter().skip(1).copied().chain([total]);
        let bags: Vec<_> = offsets.iter().zip(ends).map(|(&start, end)| start..end).collect();
        let longest = bags.iter().map(|bag| bag.len()).max().unwrap_or(0).max(usize::from(total > 0));
        let places: Vec<i64> = bags
            .iter()
            .flat_map(|bag| (0..longest).map(|k| if k < bag.len() { (bag.start + k) as i64 } else { 0 }))
            .collect();
        let filled: Vec<bool> = bags.iter().flat_map(|bag| (0..longest).map(|k| k < bag.len())).collect();
        let bagged = [bags.len(), longest];
        let places = Var::new(Tensor::from_slice(rt, [places.len()], &places)?);
        let taken = |x: &Var<R>| x.index_select(0, &places)?.reshape(bagged);
        let (indices, weights) = (taken(indices).at_caller()?, weights.map(taken).transpose().at_caller()?);
        let filled = Var::new(Tensor::from_slice(rt, bagged, &filled)?);
        let here = match self.padding {
            Some(padding) => filled.logical_and(&indices.ne(padding as f64)?)?,
            None => filled,
        };
        self.reduced(&indices, &here, weights.as_ref()).at_caller()
    }

    /// Reduces the rows of `indices: [N, L]` that `here: [N, L]` says are of the bag.
    #[track_caller]
    fn reduced(&self, indices: &Var<R>, here: &Var<R>, weights: Option<&Var<R>>) -> Result<Var<R>> {
        if let (Some(weights), BagMode::Mean | BagMode::Max) = (weights, self.mode) {
            let why = "are of sums alone: leave them out, or take `BagMode::Sum`";
            return Err(Error::shape("embedding_bag", &[weights.spec().shape], format!("weights {why}")));
        }
        let rows = crate::Forward::forward(&self.table, indices)?;
        let rows = match weights {
            Some(weights) if weights.spec().shape != indices.spec().shape => {
                let shapes = [indices.spec().shape, weights.spec().shape];
                return Err(Error::shape("embedding_bag", &shapes, "needs a weight for each index"));
            }
            Some(weights) => rows.mul(&weights.unsqueeze(-1)?)?,
            None => rows,
        };
        let mask = here.unsqueeze(-1)?;
        let sum = |rows: Var<R>| rows.where_cond(&mask, 0.0)?.sum(&[1]);
        match self.mode {
            // A bag without any place has no largest value.
            BagMode::Max if indices.spec().shape[1] == 0 => sum(rows),
            BagMode::Sum => sum(rows),
            BagMode::Mean => {
                let count = here.to_dtype(rows.dtype())?.sum_keepdim(&[1])?.maximum(1.0)?;
                sum(rows)?.div(&count)
            }
            BagMode::Max => {
                let largest = rows.where_cond(&mask, f64::NEG_INFINITY)?.amax(&[1])?;
                largest.where_cond(&here.any_keepdim(&[1])?, 0.0)
            }
        }
    }
}
