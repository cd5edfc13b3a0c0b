//! Discrete Fourier transforms of any length. A complex number is a pair of floats, real part first, along a last axis
//! of size 2.

mod spectrum;
mod transform;

pub use spectrum::{Stft, Window};
use transform::dft;

use super::{constant, widened};
use crate::{
    Error, Result, Within,
    ops::{Apply, JoinOps, PadMode, PointwiseOps, ViewOps, cat, rule},
};

/// The direction of a transform that is divided by the number of elements `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FftNorm {
    /// The inverse transform is divided by `n`.
    #[default]
    Backward,
    /// Both directions are divided by `√n`.
    Ortho,
    /// The forward transform is divided by `n`.
    Forward,
}

impl FftNorm {
    fn factor(self, n: usize, inverse: bool) -> f64 {
        match (self, inverse) {
            (FftNorm::Backward, true) | (FftNorm::Forward, false) => 1.0 / n as f64,
            (FftNorm::Ortho, _) => 1.0 / (n as f64).sqrt(),
            _ => 1.0,
        }
    }
}

/// Fourier transforms of floating dtypes; half-precision inputs are computed in `f32`. Axis numbers do not count the
/// last axis of pairs: `axis` −1 of `[.., N, 2]` is the axis of size `N`. `n` first truncates the input, or pads it
/// with zeros at its end.
///
/// A length is split into factors of at most 64, each computed as a matrix product (Cooley & Tukey 1965). Prime factors
/// above 128 become convolutions (Bluestein 1970). The work for one transform is therefore `O(n log n)`. Twiddle
/// factors are computed in `f64` on the host by each call, in `O(n)`.
pub trait FftOps: Apply {
    /// The Fourier transform `X[k] = Σ_t x[t] · e^(−2πi·t·k/n)` along `axis` of complex `self: [.., N, .., 2]`.
    #[track_caller]
    fn fft(&self, n: Option<usize>, axis: isize, norm: FftNorm) -> Result<Self> {
        complex("fft", self, n, axis, norm, false).at_caller()
    }
    /// The inverse of [`fft`](FftOps::fft): the exponent's sign is `+`.
    #[track_caller]
    fn ifft(&self, n: Option<usize>, axis: isize, norm: FftNorm) -> Result<Self> {
        complex("ifft", self, n, axis, norm, true).at_caller()
    }
    /// The Fourier transform along `axis` of real `self: [.., N, ..]`, as `[.., n/2 + 1, .., 2]`. Only the first
    /// `⌊n/2⌋ + 1` elements are returned, which determine the others. See [`fft`](FftOps::fft).
    #[track_caller]
    fn rfft(&self, n: Option<usize>, axis: isize, norm: FftNorm) -> Result<Self> {
        real("rfft", self, n, axis, norm).at_caller()
    }
    /// The inverse of [`rfft`](FftOps::rfft): real `[.., n, ..]` from the first `⌊n/2⌋ + 1` elements of
    /// `self: [.., M, .., 2]`. `n` defaults to `2·(M − 1)`. The imaginary part of the first element is not read, nor
    /// that of the last one if `n` is even.
    #[track_caller]
    fn irfft(&self, n: Option<usize>, axis: isize, norm: FftNorm) -> Result<Self> {
        real_inverse("irfft", self, n, axis, norm).at_caller()
    }
    /// The Fourier transform along each of `axes`; see [`fft`](FftOps::fft).
    #[doc(alias = "fft2")]
    #[track_caller]
    fn fftn(&self, axes: &[isize], norm: FftNorm) -> Result<Self> {
        along("fftn", self, axes, norm, false).at_caller()
    }
    /// The inverse Fourier transform along each of `axes`; see [`ifft`](FftOps::ifft).
    #[doc(alias = "ifft2")]
    #[track_caller]
    fn ifftn(&self, axes: &[isize], norm: FftNorm) -> Result<Self> {
        along("ifftn", self, axes, norm, true).at_caller()
    }
    /// The Fourier transform of real `self`: [`rfft`](FftOps::rfft) along the last of `axes`, [`fft`](FftOps::fft)
    /// along the others.
    #[doc(alias = "rfft2")]
    #[track_caller]
    fn rfftn(&self, axes: &[isize], norm: FftNorm) -> Result<Self> {
        real_along("rfftn", self, axes, norm).at_caller()
    }
    /// The inverse of [`rfftn`](FftOps::rfftn): real, `n` elements along the last of `axes`.
    #[doc(alias = "irfft2")]
    #[track_caller]
    fn irfftn(&self, n: Option<usize>, axes: &[isize], norm: FftNorm) -> Result<Self> {
        real_inverse_along("irfftn", self, n, axes, norm).at_caller()
    }
    /// Rolls elements by `⌊N/2⌋` along `axes`, so that frequency 0 is in the middle. Unlike in the transforms, axis
    /// numbers count every axis, also that of complex pairs.
    #[track_caller]
    fn fftshift(&self, axes: &[isize]) -> Result<Self> {
        shifted("fftshift", self, axes, |n| (n / 2) as isize).at_caller()
    }
    /// The inverse of [`fftshift`](FftOps::fftshift).
    #[track_caller]
    fn ifftshift(&self, axes: &[isize]) -> Result<Self> {
        shifted("ifftshift", self, axes, |n| -((n / 2) as isize)).at_caller()
    }
    /// Short-time Fourier transforms of real `self: [.., L]`, as `[.., F, T, 2]`. A window of `options.size` elements
    /// is taken every `options.hop` elements, weighted by `window: [W]` and transformed. A shorter `window` is centred
    /// between zeros; `None` means ones. `F` is `options.size / 2 + 1` with `onesided`, else `options.size`.
    #[track_caller]
    fn stft(&self, window: Option<&Self>, options: Stft) -> Result<Self> {
        options.forward(self, window).at_caller()
    }
    /// The inverse of [`stft`](FftOps::stft), by the least squares of Griffin & Lim (1984). Windows are transformed
    /// back, weighted, and added where they overlap. The sum is divided by the sum of the squared weights, where that
    /// is above 1e-11. The result is `[.., length]`, or else as long as the windows reach, without the padding that
    /// `center` added.
    #[track_caller]
    fn istft(&self, window: Option<&Self>, options: Stft, length: Option<usize>) -> Result<Self> {
        options.backward(self, window, length).at_caller()
    }
}

impl<T: Apply> FftOps for T {}

fn shifted<T: Apply>(op: &'static str, x: &T, axes: &[isize], by: impl Fn(usize) -> isize) -> Result<T> {
    named(op, x, axes)?.iter().try_fold(x.clone(), |x, &a| {
        let at = x.spec().shape.axis(op, a)?;
        x.roll(at as isize, by(x.spec().shape[at]))
    })
}

/// The position of an axis of a complex tensor, which must not be the axis of pairs itself.
fn complex_axis<T: Apply>(op: &'static str, x: &T, axis: isize) -> Result<usize> {
    rule::float(op, x.spec())?;
    let shape = x.spec().shape;
    if shape.rank() < 2 || shape.last() != Some(&2) {
        return Err(Error::shape(op, &[shape], "needs complex numbers, [.., N, 2], real part first"));
    }
    shape.remove(shape.rank() - 1).axis(op, axis)
}

/// A list of axes, which must not be empty.
fn named<'a, T: Apply>(op: &'static str, x: &T, axes: &'a [isize]) -> Result<&'a [isize]> {
    if axes.is_empty() { Err(x.spec().shape.names_no_axis(op)) } else { Ok(axes) }
}

/// `x` truncated, or padded with zeros, to `n` along an axis.
fn resized<T: Apply>(x: &T, axis: usize, n: usize) -> Result<T> {
    let len = x.spec().shape[axis];
    match n.cmp(&len) {
        std::cmp::Ordering::Less => x.narrow(axis as isize, 0, n),
        std::cmp::Ordering::Equal => Ok(x.clone()),
        std::cmp::Ordering::Greater => x.embed(axis as isize, n, 0, 1),
    }
}

fn complex<T: Apply>(
    op: &'static str,
    x: &T,
    n: Option<usize>,
    axis: isize,
    norm: FftNorm,
    inverse: bool,
) -> Result<T> {
    let at = complex_axis(op, x, axis)?;
    let n = n.unwrap_or(x.spec().shape[at]);
    if n == 0 {
        return Err(Error::shape(op, &[x.spec().shape], "a transform of no elements does not exist"));
    }
    let x = resized(x, at, n)?;
    widened(&x, |x| {
        let last = x.spec().shape.rank() as isize - 2;
        let moved = x.transpose(at as isize, last)?;
        let shape = moved.spec().shape;
        let rows = moved.reshape([shape.numel() / (2 * n), n, 2])?;
        let scale = norm.factor(n, inverse);
        let y = dft(&rows, inverse)?;
        let y = if scale == 1.0 { y } else { y.mul(scale)? };
        y.reshape(shape)?.transpose(at as isize, last)
    })
}

/// The transform of real `x`, as [`FftOps::rfft`].
fn real<T: Apply>(op: &'static str, x: &T, n: Option<usize>, axis: isize, norm: FftNorm) -> Result<T> {
    rule::float(op, x.spec())?;
    let at = x.spec().shape.axis(op, axis)? as isize;
    let pairs = x.unsqueeze(-1)?.embed(-1, 2, 0, 1)?;
    let n = n.unwrap_or(x.spec().shape[at as usize]);
    complex(op, &pairs, Some(n), at, norm, false)?.narrow(at, 0, n / 2 + 1)
}

/// The inverse of [`real`], as [`FftOps::irfft`].
fn real_inverse<T: Apply>(op: &'static str, x: &T, n: Option<usize>, axis: isize, norm: FftNorm) -> Result<T> {
    let at = complex_axis(op, x, axis)?;
    let n = n.unwrap_or(2 * x.spec().shape[at].saturating_sub(1));
    let axis = at as isize;
    let half = resized(x, at, n / 2 + 1)?;
    let mirrored = half.narrow(axis, 1, n.div_ceil(2).saturating_sub(1))?.flip(&[axis])?;
    let conjugate = mirrored.mul(&constant(x, [2], x.spec().dtype, &[1.0, -1.0])?)?;
    let whole = cat(&[&half, &conjugate], axis)?;
    complex(op, &whole, Some(n), axis, norm, true)?.select(-1, 0)
}

/// The transform of complex `x` along each of `axes`, as [`FftOps::fftn`] and its inverse.
fn along<T: Apply>(op: &'static str, x: &T, axes: &[isize], norm: FftNorm, inverse: bool) -> Result<T> {
    named(op, x, axes)?.iter().try_fold(x.clone(), |x, &a| complex(op, &x, None, a, norm, inverse))
}

/// The transform of real `x`, as [`FftOps::rfftn`].
fn real_along<T: Apply>(op: &'static str, x: &T, axes: &[isize], norm: FftNorm) -> Result<T> {
    let shape = x.spec().shape;
    let (last, others) = axes.split_last().ok_or_else(|| shape.names_no_axis(op))?;
    // The others as positive axes: the axis of pairs would shift axes that count from the end.
    let others = others.iter().map(|&a| shape.axis(op, a)).collect::<Result<Vec<_>>>()?;
    let first = real(op, x, None, *last, norm)?;
    others.into_iter().try_fold(first, |x, a| complex(op, &x, None, a as isize, norm, false))
}

/// The inverse of [`real_along`], as [`FftOps::irfftn`].
fn real_inverse_along<T: Apply>(op: &'static str, x: &T, n: Option<usize>, axes: &[isize], norm: FftNorm) -> Result<T> {
    let (last, others) = axes.split_last().ok_or_else(|| x.spec().shape.names_no_axis(op))?;
    let whole = others.iter().try_fold(x.clone(), |x, &a| complex(op, &x, None, a, norm, true))?;
    real_inverse(op, &whole, n, *last, norm)
}
