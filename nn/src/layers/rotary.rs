//! Rotary position embedding as a model stores it: the frequencies of the pairs.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};

/// Rotary position embedding (Su et al. 2021) of the first `R` components of a head. Pair `i`, components `i` and
/// `i + R/2` unless they are interleaved, is rotated by `frequencies[i]` radians per position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The radians per position of each pair, `[R/2]`.
    pub frequencies: Vec<f64>,
    /// The factor of cosines and sines; 1 except for methods of longer contexts such as YaRN.
    pub scale: f64,
    /// The frequencies of sequences with more tokens than a number, with this number (LongRoPE); as others if `None`.
    pub long: Option<(usize, Vec<f64>)>,
    /// True to pair component `2i` with `2i + 1` (GPT-J) instead of `i` with `i + R/2` (Llama).
    pub interleaved: bool,
}

impl Rotary {
    /// Creates frequencies `base^(−2i/R)` of the `R` rotated components of a head.
    pub fn new(base: f64, rotated: usize) -> Self {
        let frequency = |i: usize| base.powf(-((2 * i) as f64) / rotated as f64);
        Rotary { frequencies: (0..rotated / 2).map(frequency).collect(), scale: 1.0, long: None, interleaved: false }
    }

    /// Computes cosines and sines for positions `[T]` or `[B, T]` (`i64`), with this dtype; every layer uses the same
    /// tables.
    #[track_caller]
    pub fn tables<R: Runtime>(&self, positions: &Var<R>, dtype: DType) -> Result<RotaryTables<R>> {
        self.tables_within(positions, None, dtype)
    }

    /// Computes [tables](Rotary::tables) for positions of texts that end at `last`: the last position of each token's
    /// text, which `positions` broadcast with. It tells if the text has the frequencies of a long one. If `None`, each
    /// row is one text, and its largest position is the last.
    #[track_caller]
    pub fn tables_within<R: Runtime>(
        &self,
        positions: &Var<R>,
        last: Option<&Var<R>>,
        dtype: DType,
    ) -> Result<RotaryTables<R>> {
        let (rt, shape, wide) = (positions.runtime(), positions.spec().shape, dtype.compute());
        let axes = match shape[..] {
            [t] => vec![t, 1],
            [b, t] => vec![b, 1, t, 1],
            _ => return Err(Error::shape("rotary", &[shape], "positions must be [T] or [B, T]")),
        };
        let row = |frequencies: &[f64]| {
            let mut next = frequencies.iter();
            let value = Tensor::from_f64_fn(rt, [frequencies.len()], wide, || next.next().copied().unwrap_or(0.0))?;
            Ok::<_, Error>(Var::new(value))
        };
        let frequencies = match &self.long {
            None => row(&self.frequencies)?,
            Some((most, long)) => {
                let last = last.map_or_else(|| positions.amax_keepdim(&[-1]), |last| Ok(last.clone()))?;
                let axes = match last.dims()[..] {
                    [b, t] => vec![b, 1, t, 1],
                    _ => vec![last.dims().iter().product(), 1],
                };
                let is_long = last.ge(*most as f64)?.reshape(axes)?;
                row(long)?.where_cond(&is_long, &row(&self.frequencies)?)?
            }
        };
        let angles = positions.to_dtype(wide)?.reshape(axes)?.mul(&frequencies)?;
        let table = |x: Var<R>| if self.scale == 1.0 { Ok(x) } else { x.mul(self.scale) };
        let (cos, sin) = (table(angles.cos()?)?.to_dtype(dtype)?, table(angles.sin()?)?.to_dtype(dtype)?);
        Ok(RotaryTables { cos, sin, interleaved: self.interleaved })
    }
}

/// Cosines and sines of the rotations at some positions.
#[derive(Clone, Debug)]
pub struct RotaryTables<R: Runtime> {
    cos: Var<R>,
    sin: Var<R>,
    interleaved: bool,
}

impl<R: Runtime> RotaryTables<R> {
    /// Rotates queries or keys `[B, H, T, D]`.
    #[track_caller]
    pub fn rotate(&self, x: &Var<R>) -> Result<Var<R>> {
        x.rotate(&self.cos, &self.sin, self.interleaved)
    }
}
