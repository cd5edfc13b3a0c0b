//! Rotary position embedding as a model stores it: the frequencies of the pairs.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{Apply, PointwiseOps, ViewOps},
};

/// Rotary position embedding (Su et al. 2021) of the first `R` components of a head. Pair `i`, components `i` and
/// `i + R/2`, is rotated by `frequencies[i]` radians per position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The radians per position of each pair, `[R/2]`.
    pub frequencies: Vec<f64>,
    /// The factor of cosines and sines; 1 except for methods of longer contexts such as YaRN.
    pub scale: f64,
}

impl Rotary {
    /// Creates frequencies `base^(−2i/R)` of the `R` rotated components of a head.
    pub fn new(base: f64, rotated: usize) -> Self {
        let frequency = |i: usize| base.powf(-((2 * i) as f64) / rotated as f64);
        Rotary { frequencies: (0..rotated / 2).map(frequency).collect(), scale: 1.0 }
    }

    /// Computes cosines and sines for positions `[T]` or `[B, T]` (`i64`), with this dtype; every layer uses the same
    /// tables.
    #[track_caller]
    pub fn tables<R: Runtime>(&self, positions: &Var<R>, dtype: DType) -> Result<RotaryTables<R>> {
        let (shape, pairs) = (positions.spec().shape, self.frequencies.len());
        let axes = match shape[..] {
            [t] => vec![t, 1],
            [b, t] => vec![b, 1, t, 1],
            _ => return Err(Error::shape("rotary", &[shape], "positions must be [T] or [B, T]")),
        };
        let mut next = self.frequencies.iter();
        let wide = dtype.compute();
        let frequencies =
            Tensor::from_f64_fn(positions.runtime(), [pairs], wide, || next.next().copied().unwrap_or(0.0))?;
        let angles = positions.to_dtype(wide)?.reshape(axes)?.mul(&Var::new(frequencies))?;
        let table = |x: Var<R>| if self.scale == 1.0 { Ok(x) } else { x.mul(self.scale) };
        Ok(RotaryTables { cos: table(angles.cos()?)?.to_dtype(dtype)?, sin: table(angles.sin()?)?.to_dtype(dtype)? })
    }
}

/// Cosines and sines of the rotations at some positions.
#[derive(Clone, Debug)]
pub struct RotaryTables<R: Runtime> {
    cos: Var<R>,
    sin: Var<R>,
}

impl<R: Runtime> RotaryTables<R> {
    /// Rotates queries or keys `[B, H, T, D]`.
    #[track_caller]
    pub fn rotate(&self, x: &Var<R>) -> Result<Var<R>> {
        x.rotate(&self.cos, &self.sin, false)
    }
}
