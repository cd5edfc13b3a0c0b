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
mod compressor;
mod matrix;
mod orthonormal;

use numcore::{Error, Result, Shape};

pub(crate) use compressor::Compressor;

/// Low-rank compression of gradients with error feedback; see
/// [`GradCompression::PowerSgd`](super::GradCompression::PowerSgd).
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

impl Default for PowerSgd {
    /// Rank 1 from the first step on, for gradients that shrink to less than half.
    fn default() -> Self {
        PowerSgd { rank: 1, start_iter: 0, min_rate: 2.0, seed: 0 }
    }
}

impl PowerSgd {
    /// The shape `[m, n]` of a parameter's gradient as a matrix, and the rank it is compressed to; `None` if it travels
    /// uncompressed.
    ///
    /// ```
    /// use distributed::buckets::PowerSgd;
    /// use numcore::Shape;
    /// # fn main() -> numcore::Result<()> {
    /// let rank4 = PowerSgd { rank: 4, ..Default::default() };
    /// assert_eq!(rank4.of(&Shape::new(&[64, 16, 3, 3])?), Some((64, 144, 4)));
    /// assert_eq!(rank4.of(&Shape::new(&[8, 8])?), None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn of(&self, shape: &Shape) -> Option<(usize, usize, usize)> {
        if shape.rank() < 2 || shape.numel() == 0 {
            return None;
        }
        let (m, n) = (shape[0], shape.numel() / shape[0]);
        let rank = self.rank.min(m).min(n);
        let sent = ((m + n) * rank) as f64;
        (sent * self.min_rate < shape.numel() as f64).then_some((m, n, rank))
    }

    pub(super) fn check(&self, canonical: bool) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("PowerSgd", field, why));
        if self.rank == 0 {
            return wrong("rank", "`rank` is 0; a matrix needs at least one column".into());
        }
        if !(self.min_rate >= 0.0 && self.min_rate.is_finite()) {
            return wrong("min_rate", format!("`min_rate` cannot be {}", self.min_rate));
        }
        if canonical {
            return wrong(
                "canonical",
                "in canonical order gradients travel as they are; leave `canonical` or the compression out".into(),
            );
        }
        Ok(())
    }
}
