//! The largest attention score of each head.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

/// The most scores that are in memory at once.
const SCORES: usize = 1 << 25;

/// The largest scaled product of a query and a key of each head, `[H]`; none before the first pass.
#[derive(Debug)]
pub(super) struct LargestScores<R: Runtime>(Option<Tensor<R>>);

impl<R: Runtime> Default for LargestScores<R> {
    fn default() -> Self {
        LargestScores(None)
    }
}

impl<R: Runtime> LargestScores<R> {
    pub(super) fn take(&mut self) -> Option<Tensor<R>> {
        self.0.take()
    }

    /// Takes queries `q: [B, H, T, D]` and keys `k: [B, G, S, D]` into account; the scale is `1/√D` if `None`.
    pub(super) fn add(&mut self, q: &Tensor<R>, k: &Tensor<R>, scale: Option<f64>) -> Result<()> {
        // Attention refuses other shapes.
        let (&[b, h, t, d], &[_, g, s, _]) = (q.dims(), k.dims()) else { return Ok(()) };
        if b * h * t * s == 0 || g == 0 || !h.is_multiple_of(g) {
            return Ok(());
        }
        let wide = if q.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let scale = scale.unwrap_or(1.0 / (d as f64).sqrt());
        let most = (SCORES / (h * s)).max(1);
        for example in 0..b {
            let of = |x: &Tensor<R>| x.narrow(0, example, 1)?.to_dtype(wide);
            let (queries, keys) = (of(q)?, of(k)?.transpose(2, 3)?);
            for start in (0..t).step_by(most) {
                let n = most.min(t - start);
                let part = queries.narrow(2, start, n)?.mul(scale)?.reshape([1, g, h / g * n, d])?;
                let largest = part.matmul(&keys)?.reshape([h, n * s])?.amax(&[1])?;
                self.0 = Some(match self.0.take() {
                    Some(before) => before.maximum(&largest)?,
                    None => largest,
                });
            }
        }
        Ok(())
    }
}
