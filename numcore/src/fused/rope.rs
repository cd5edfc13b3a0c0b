//! Rotary position embedding (Su et al. 2021), composed of views and one program.

use std::sync::LazyLock;

use crate::{
    DType, Error, Result, Tensor,
    ops::{Apply, PointwiseOps, ViewOps},
    pointwise::Program,
};

/// Options of [`NnOps::rope_with`](super::NnOps::rope_with), rotary position embedding.
#[derive(Debug)]
pub struct RopeOptions<'a, T> {
    /// The base: pair `i` of `R/2` is rotated by `base^(−2i/R)` radians per position; 10 000 by convention.
    pub base: f64,
    /// The position of the first row, if `positions` is not given.
    pub start: usize,
    /// Explicit positions, `i64`: `[T]`, or `[B, T]` for `[B, .., T, D]`. Their angles are computed on the device, as
    /// in Hugging Face's models: in `f64` for `f64` operands and in `f32` otherwise.
    pub positions: Option<&'a T>,
    /// The number of rotated components, `R`, even; `None` means all. The others are copied (partial rotary embedding,
    /// GPT-NeoX).
    pub dim: Option<usize>,
    /// True to pair component `2i` with `2i + 1` (GPT-J) instead of `i` with `i + R/2` (Llama).
    pub interleaved: bool,
}

impl<T> Default for RopeOptions<'_, T> {
    fn default() -> Self {
        RopeOptions { base: 10_000.0, start: 0, positions: None, dim: None, interleaved: false }
    }
}

/// Rotates `x: [.., T, D]` by the angles of its positions.
#[track_caller]
pub(super) fn rope<T: Apply>(x: &T, options: &RopeOptions<'_, T>) -> Result<T> {
    let shape = x.spec().shape;
    let rank = shape.rank();
    let width = shape.last().copied().unwrap_or(0);
    let dim = options.dim.unwrap_or(width);
    if rank < 2 || !dim.is_multiple_of(2) || dim > width {
        let why = match options.dim {
            None => "needs [.., T, D] with an even D".into(),
            Some(dim) => format!("needs [.., T, D], of which an even number of components turns, not {dim}"),
        };
        return Err(Error::shape("rope", &[shape], why));
    }
    let half = dim / 2;
    let frequency = |i: usize| options.base.powf(-(i as f64) / half as f64);
    let (cos, sin) = match options.positions {
        None => {
            let start = options.start;
            let angle = |k: usize| (start + k / half.max(1)) as f64 * frequency(k % half.max(1));
            let table = |f: fn(f64) -> f64| {
                let mut next = (0..shape[rank - 2] * half).map(|k| f(angle(k)));
                let size = [shape[rank - 2], half];
                Tensor::from_f64_fn(x.runtime(), size, x.spec().dtype, || next.next().unwrap_or(0.0)).map(T::constant)
            };
            (table(f64::cos)?, table(f64::sin)?)
        }
        Some(positions) => {
            let dtype = x.spec().dtype.compute();
            let angles = angles(x, positions, half, dtype, frequency)?;
            (angles.cos()?.to_dtype(x.spec().dtype)?, angles.sin()?.to_dtype(x.spec().dtype)?)
        }
    };
    rotate(x, &cos, &sin, options.interleaved)
}

/// The rotation angles, `[T, R/2]`, or `[B, 1, .., T, R/2]` with as many axes as `x`.
#[track_caller]
fn angles<T: Apply>(x: &T, positions: &T, half: usize, dtype: DType, frequency: impl Fn(usize) -> f64) -> Result<T> {
    let (shape, spec) = (x.spec().shape, positions.spec());
    let (rank, p) = (shape.rank(), spec.shape);
    let fits = match p.rank() {
        1 => p[0] == shape[rank - 2],
        2 => rank >= 3 && p[0] == shape[0] && p[1] == shape[rank - 2],
        _ => false,
    };
    if spec.dtype != DType::I64 || !fits {
        let why = format!("needs positions of i64, [T] or [B, T] for [B, .., T, D]; they are {}", spec.dtype);
        return Err(Error::shape("rope", &[shape, p], why));
    }
    let mut frequencies = (0..half).map(frequency);
    let next = || frequencies.next().unwrap_or(0.0);
    let frequencies = T::constant(Tensor::from_f64_fn(x.runtime(), [half], dtype, next)?);
    let mut sizes = vec![1; if p.rank() == 1 { 2 } else { rank }];
    let last = sizes.len() - 2;
    sizes[last] = shape[rank - 2];
    sizes[0] = if p.rank() == 1 { sizes[0] } else { p[0] };
    positions.to_dtype(dtype)?.reshape(sizes)?.mul(&frequencies)
}

/// Rotates pairs of the first `R` components by angles whose cosines and sines broadcast to `[.., T, R/2]`.
#[track_caller]
pub(super) fn rotate<T: Apply>(x: &T, cos: &T, sin: &T, interleaved: bool) -> Result<T> {
    static TURN: LazyLock<Program> =
        LazyLock::new(|| Program::new("rope", |[a, b, c, s], []| [a * c - b * s, b * c + a * s]));
    let shape = x.spec().shape;
    let half = cos.spec().shape.last().copied().unwrap_or(1);
    let width = shape.last().copied().unwrap_or(0);
    if cos.spec().shape != sin.spec().shape || 2 * half > width {
        let shapes = [shape, cos.spec().shape, sin.spec().shape];
        return Err(Error::shape("rope", &shapes, "needs x [.., T, D] and two tables [.., T, R/2], R at most D"));
    }
    let (a, b) = match interleaved {
        true => (x.slice(-1, 0, half, 2)?, x.slice(-1, half.min(1), half, 2)?),
        false => (x.narrow(-1, 0, half)?, x.narrow(-1, half, half)?),
    };
    let turned = a.apply_program_all(&TURN, &[&b, cos, sin], &[])?;
    let turned = match interleaved {
        true => crate::ops::stack(&[&turned[0], &turned[1]], -1)?.flatten(-2, -1)?,
        false => crate::ops::cat(&[&turned[0], &turned[1]], -1)?,
    };
    if 2 * half == width {
        return Ok(turned);
    }
    crate::ops::cat(&[&turned, &x.narrow(-1, 2 * half, width - 2 * half)?], -1)
}
