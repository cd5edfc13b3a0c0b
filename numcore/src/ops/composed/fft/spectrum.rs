//! Short-time Fourier transforms, and their window functions.

use std::f64::consts::PI;

use super::{FftNorm, FftOps, JoinOps, PadMode, ViewOps, complex_axis};
use crate::{
    DType, Error, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, PadOps, PointwiseOps, rule},
    pointwise::Program,
};

/// The geometry of a short-time Fourier transform.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stft {
    /// The number of elements of one transform: PyTorch's `n_fft`.
    pub size: usize,
    /// The number of elements from one transform to the next.
    pub hop: usize,
    /// True if transform `t` is centred at element `t · hop`: the signal is padded by `size / 2` on both sides.
    pub center: bool,
    /// The padding mode at both ends of the signal.
    pub pad: PadMode,
    /// True if results are divided by `√size`.
    pub normalized: bool,
    /// True if only the non-redundant frequencies are returned, the first `size / 2 + 1`.
    pub onesided: bool,
}

impl Stft {
    /// Transforms of `size` elements every `size / 4`, centred, with reflected padding and one-sided: PyTorch's
    /// defaults.
    pub fn new(size: usize) -> Self {
        let hop = (size / 4).max(1);
        Stft { size, hop, center: true, pad: PadMode::Reflect, normalized: false, onesided: true }
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if self.size > 0 && self.hop > 0 {
            return Ok(());
        }
        Err(Error::range(op, if self.size == 0 { "size" } else { "hop" }, 0usize, "at least 1"))
    }

    fn norm(&self) -> FftNorm {
        if self.normalized { FftNorm::Ortho } else { FftNorm::Backward }
    }

    /// The window, centred between zeros in `size` elements.
    fn window<T: Apply>(&self, op: &'static str, like: &T, window: Option<&T>) -> Result<T> {
        let Some(w) = window else {
            return Ok(T::constant(Tensor::ones(like.runtime(), [self.size], like.spec().dtype)?));
        };
        rule::same_dtype(op, &[like.spec(), w.spec()])?;
        let shape = w.spec().shape;
        if shape.rank() != 1 || shape[0] > self.size {
            return Err(Error::shape(op, &[shape], format!("the window must be [W], W at most {}", self.size)));
        }
        let left = (self.size - shape[0]) / 2;
        w.pad(&[(left, self.size - shape[0] - left)], 0.0)
    }

    pub(super) fn forward<T: Apply>(&self, x: &T, window: Option<&T>) -> Result<T> {
        const OP: &str = "stft";
        self.check(OP)?;
        rule::float(OP, x.spec())?;
        let shape = x.spec().shape;
        if shape.rank() == 0 {
            return Err(Error::shape(OP, &[shape], "needs a signal, [.., L]"));
        }
        let mut pads = vec![(0, 0); shape.rank()];
        pads[shape.rank() - 1] = ((self.size / 2) as isize, (self.size / 2) as isize);
        let signal = if self.center { x.pad_with(&pads, self.pad)? } else { x.clone() };
        let frames = signal.unfold(-1, self.size, self.hop, 1)?.mul(&self.window(OP, x, window)?)?;
        let spectra = match self.onesided {
            true => frames.rfft(None, -1, self.norm())?,
            false => frames.unsqueeze(-1)?.embed(-1, 2, 0, 1)?.fft(None, -1, self.norm())?,
        };
        spectra.transpose(-3, -2)
    }

    pub(super) fn backward<T: Apply>(&self, x: &T, window: Option<&T>, length: Option<usize>) -> Result<T> {
        const OP: &str = "istft";
        self.check(OP)?;
        complex_axis(OP, x, -1)?;
        let shape = x.spec().shape;
        let bins = if self.onesided { self.size / 2 + 1 } else { self.size };
        let rank = shape.rank();
        if rank < 3 || shape[rank - 3] != bins || shape[rank - 2] == 0 {
            return Err(Error::shape(OP, &[shape], format!("needs [.., {bins}, T, 2] with at least one time")));
        }
        let spectra = x.transpose(-3, -2)?;
        let frames = match self.onesided {
            true => spectra.irfft(Some(self.size), -1, self.norm())?,
            false => spectra.ifft(None, -1, self.norm())?.select(-1, 0)?,
        };
        let times = shape[rank - 2];
        let len = self.hop.saturating_mul(times - 1).saturating_add(self.size);
        let window = self.window(OP, x, window)?;
        let sum = frames.mul(&window)?.fold(-2, len, self.hop, 1)?;
        let weight = window.square()?.broadcast_to([times, self.size])?.fold(-2, len, self.hop, 1)?;
        let signal = divided(&sum, &weight)?;
        let start = if self.center { self.size / 2 } else { 0 };
        let rest = len - start;
        match length {
            Some(n) if n <= rest => signal.narrow(-1, start, n),
            Some(n) => signal.narrow(-1, start, rest)?.embed(-1, n, 0, 1),
            None => signal.narrow(-1, start, len.saturating_sub(2 * start)),
        }
    }
}

/// The quotient `sum / weight`, where the weight is not 0.
fn divided<T: Apply>(sum: &T, weight: &T) -> Result<T> {
    static DIVIDE: std::sync::LazyLock<Program> = std::sync::LazyLock::new(|| {
        Program::new("istft", |[x, w], []| {
            let some = w.gt(1e-11);
            [some.select(x / some.select(w, 1.0), x)]
        })
    });
    sum.apply_program(&DIVIDE, &[weight], &[])
}

/// Window functions, for [`Tensor::window`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Window {
    /// The Hann window, `½ − ½·cos`.
    Hann,
    /// The Hamming window, `0.54 − 0.46·cos`.
    Hamming,
    /// The Blackman window, `0.42 − 0.5·cos + 0.08·cos(2·)`.
    Blackman,
    /// The Bartlett window, a triangle.
    Bartlett,
    /// The Kaiser window with this `β` (Kaiser 1980).
    Kaiser(f64),
}

impl Window {
    /// The weight at position `t` of the window, from 0 to 1.
    fn at(self, t: f64) -> f64 {
        let cos = |k: f64| (2.0 * PI * k * t).cos();
        match self {
            Window::Hann => 0.5 - 0.5 * cos(1.0),
            Window::Hamming => 0.54 - 0.46 * cos(1.0),
            Window::Blackman => 0.42 - 0.5 * cos(1.0) + 0.08 * cos(2.0),
            Window::Bartlett => 1.0 - (2.0 * t - 1.0).abs(),
            Window::Kaiser(beta) => bessel(beta * (1.0 - (2.0 * t - 1.0).powi(2)).max(0.0).sqrt()) / bessel(beta),
        }
    }
}

/// The modified Bessel function of the first kind and order 0, by its series.
fn bessel(x: f64) -> f64 {
    let mut term = 1.0;
    let mut sum = 1.0;
    for k in 1..500 {
        term *= (x / (2.0 * f64::from(k))).powi(2);
        sum += term;
        if term < sum * 1e-17 {
            break;
        }
    }
    sum
}

impl<R: Runtime> Tensor<R> {
    /// The weights of a window, `[n]`. With `periodic` they are one period of it, for spectral analysis; otherwise
    /// symmetric, for filter design.
    #[doc(alias = "hann_window")]
    #[doc(alias = "hamming_window")]
    #[doc(alias = "blackman_window")]
    #[doc(alias = "bartlett_window")]
    #[doc(alias = "kaiser_window")]
    #[track_caller]
    pub fn window(rt: &R, kind: Window, n: usize, periodic: bool, dtype: DType) -> Result<Self> {
        if !dtype.is_float() {
            return Err(Error::dtype("window", &[dtype], "weights are floats")).at_caller();
        }
        let period = if periodic { n } else { n.saturating_sub(1) }.max(1) as f64;
        let mut weights = (0..n).map(|i| if n == 1 { 1.0 } else { kind.at(i as f64 / period) });
        Self::from_f64_fn(rt, Shape::from([n]), dtype, || weights.next().unwrap_or(1.0))
    }
}
