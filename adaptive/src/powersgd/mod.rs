//! PowerSGD: gradients travel as products of two thin matrices (Vogels, Karimireddy, Jaggi, *PowerSGD*, 2019,
//! algorithms 1 and 2).
//!
//! A gradient `M: [m, n]` becomes `P̂·Qᵀ`. `P = M·Q`, with the last step's `Q: [n, r]`, is summed over ranks and made
//! orthonormal (`P̂`); `Q = Mᵀ·P̂` is summed. So `(m + n)·r` elements are sent in place of `m·n`. Each rank adds the
//! residual that it could not send, `M − P̂·(Mᵀ·P̂)ᵀ`, to its next gradient (error feedback). Sums serve as well as the
//! paper's means, because making `P` orthonormal takes any factor out.
//!
//! Residuals are in units of the mean gradient. A step's sums are divided by the total weight of its losses on all
//! ranks, loss scale included, before a residual is added. Otherwise the residual of a batch of a thousand tokens would
//! count a hundredfold in one of ten.
//!
//! **Invariant**: the sent gradients, plus all ranks' residuals after the step, equal the gradients plus the residuals
//! before it. A skipped step leaves residuals unchanged, and so does a parameter that no rank used.

mod checkpoint;
mod matrix;
mod orthonormal;
mod reducer;

use distributed::{
    buckets::BucketReducer,
    comm::{Collectives, Comm},
};
use numcore::{Error, Result, Runtime, Shape};

use reducer::Compressor;

/// Low-rank compression of gradients with error feedback, as the reducer of a training step
/// ([`TrainStepBuilder::reducer`](distributed::train::TrainStepBuilder::reducer)).
///
/// ```no_run
/// # use numcore::{Result, Runtime};
/// use adaptive::powersgd::PowerSgd;
/// use distributed::{comm::Comm, train::TrainStep};
/// use optim::AdamWConfig;
/// # fn step<R: Runtime>(comm: &Comm<R>, model: &impl nn::Module<R>) -> Result<()> {
/// let rank4 = PowerSgd { rank: 4, ..Default::default() };
/// let builder = TrainStep::builder(comm, model).optimizer(AdamWConfig::default());
/// let step = builder.reducer(move |comm| rank4.reducer(comm)).build()?;
/// # Ok(())
/// # }
/// ```
///
/// Costs a residual of the size of the gradient (`f32`, or `f64` for `f64`) and three thin matrix products for each
/// parameter. Parameters with fewer than two axes travel uncompressed. One of more axes is a matrix `[m, n]`: its first
/// axis, and all others together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerSgd {
    /// The number of columns of `P` and `Q`: 1 to 4 for most models.
    pub rank: usize,
    /// The number of initial steps in which gradients travel uncompressed: they change fastest there.
    pub start_iter: u64,
    /// The least factor by which compression must shrink a gradient to be used; 0 compresses every matrix.
    pub min_rate: f64,
    /// The seed of the first `Q`, which is the same on all ranks.
    pub seed: u64,
}

/// The form in which a gradient is sent: the product of `[rows, rank]` and `[rank, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRankForm {
    /// The rows of the gradient as a matrix: its first axis.
    pub rows: usize,
    /// The columns of the gradient as a matrix: all other axes.
    pub columns: usize,
    /// The number of columns of both factors.
    pub rank: usize,
}

impl Default for PowerSgd {
    /// Rank 1 from the first step on, for gradients that shrink to less than half.
    fn default() -> Self {
        PowerSgd { rank: 1, start_iter: 0, min_rate: 2.0, seed: 0 }
    }
}

impl PowerSgd {
    /// Makes the reducer over the ranks of a communicator. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, if options differ between ranks or are out of their range.
    pub fn reducer<R: Runtime>(self, comm: &Comm<R>) -> Result<impl BucketReducer<R> + use<R>> {
        comm.agree("the options of PowerSGD", format!("{self:?}").as_bytes())?;
        self.check()?;
        Ok(Compressor::new(comm, self))
    }

    /// The compressed form of the gradient of a parameter; `None` if it travels uncompressed.
    ///
    /// ```
    /// use adaptive::powersgd::{LowRankForm, PowerSgd};
    /// use numcore::Shape;
    /// # fn main() -> numcore::Result<()> {
    /// let rank4 = PowerSgd { rank: 4, ..Default::default() };
    /// let convolution = LowRankForm { rows: 64, columns: 144, rank: 4 };
    /// assert_eq!(rank4.compressed(&Shape::new(&[64, 16, 3, 3])?), Some(convolution));
    /// assert_eq!(rank4.compressed(&Shape::new(&[8, 8])?), None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn compressed(&self, shape: &Shape) -> Option<LowRankForm> {
        if shape.rank() < 2 || shape.numel() == 0 {
            return None;
        }
        let (rows, columns) = (shape[0], shape.numel() / shape[0]);
        let rank = self.rank.min(rows).min(columns);
        let sent = ((rows + columns) * rank) as f64;
        (sent * self.min_rate < shape.numel() as f64).then_some(LowRankForm { rows, columns, rank })
    }

    fn check(&self) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("PowerSgd", field, why));
        if self.rank == 0 {
            return wrong("rank", "`rank` is 0; a matrix needs at least one column".into());
        }
        if !(self.min_rate >= 0.0 && self.min_rate.is_finite()) {
            return wrong("min_rate", format!("`min_rate` cannot be {}", self.min_rate));
        }
        Ok(())
    }
}
