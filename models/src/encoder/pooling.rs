//! [`Pooling`]: one vector for the states of a text's tokens.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

/// The way to one vector `[C]` from the states `[T, C]` of a text's tokens, as in sentence-transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The state of the first token.
    Cls,
    /// The greatest value of each feature.
    Max,
    /// The mean.
    Mean,
    /// The sum, divided by the square root of the number of tokens.
    MeanSqrt,
    /// The mean with weights 1, 2, … in order of the tokens.
    WeightedMean,
    /// The state of the last token, as embeddings of decoders use it.
    Last,
}

impl Pooling {
    /// Pools states `[B, T, C]` of the tokens whose `mask: [B, T]` is not 0; the result is `[B, C]`. Rows without a
    /// token give zeros, but for [`Cls`](Pooling::Cls), which reads the first place. Padding may be on either side.
    ///
    /// # Errors
    /// Fails if the shapes differ, or there are no places.
    #[track_caller]
    pub fn apply<R: Runtime>(self, states: &Var<R>, mask: &Var<R>) -> Result<Var<R>> {
        let (shape, seen) = (states.spec().shape, mask.spec().shape);
        if shape.rank() != 3 || shape[..2] != seen[..] || shape[1] == 0 {
            let why = "states must be [B, T, C] with at least one place, and the mask [B, T]";
            return Err(Error::shape("Pooling::apply", &[shape, seen], why)).at_caller();
        }
        match self {
            Pooling::Cls => states.select(1, 0),
            Pooling::Max => {
                let absent = mask.eq(0.0)?;
                let most = states.masked_fill(&absent.unsqueeze(2)?, f64::NEG_INFINITY)?.amax(&[1])?;
                most.masked_fill(&absent.all(&[1])?.unsqueeze(1)?, 0.0)
            }
            _ => {
                // Halves hold neither the numbers of many places nor their sum.
                let wide = states.to_dtype(states.dtype().compute())?;
                let weights = self.weights(&mask.ne(0.0)?.to_dtype(wide.dtype())?)?;
                weights.unsqueeze(1)?.matmul(&wide)?.squeeze(1)?.to_dtype(states.dtype())
            }
        }
    }

    /// The weight of each state, `[B, T]`, from a mask of 0 and 1.
    fn weights<R: Runtime>(self, mask: &Var<R>) -> Result<Var<R>> {
        let count = mask.sum_keepdim(&[1])?.maximum(1.0)?;
        let places = Tensor::arange(mask.runtime(), 1.0, 1.0, mask.dims()[1], mask.dtype())?;
        let order = mask.mul(&Var::new(places))?;
        match self {
            Pooling::MeanSqrt => mask.div(&count.sqrt()?),
            Pooling::WeightedMean => order.div(&order.sum_keepdim(&[1])?.maximum(1.0)?),
            Pooling::Last => order.eq(&order.amax_keepdim(&[1])?)?.to_dtype(mask.dtype())?.mul(mask),
            _ => mask.div(&count),
        }
    }
}
