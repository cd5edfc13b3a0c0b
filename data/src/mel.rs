//! Mel spectrograms of sounds.

use numcore::{
    Error, Result, Tensor, Within,
    ops::{PadMode, Stft, Window},
    prelude::*,
};

/// A scale of pitches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MelScale {
    /// `2595 · log₁₀(1 + f / 700)`, the default of torchaudio and of HTK.
    Htk,
    /// Linear up to 1 kHz, logarithmic above: the default of librosa and of Slaney's Auditory Toolbox.
    Slaney,
}

/// The geometry of a mel spectrogram: power over time, in bands of equal width on a scale of pitches.
///
/// The spectrogram is computed on the device of the signal, and has gradients if the signal has.
///
/// ```
/// use data::mel::{MelSpectrogram, decibels};
/// use numcore::{DType, Tensor};
/// # fn main() -> numcore::Result<()> {
/// let signal = Tensor::ones(&runtime_cpu::Cpu::new(), [2, 16_000], DType::F32)?; // [C, L]
/// let mel = MelSpectrogram { bands: 80, ..MelSpectrogram::librosa(16_000) };
/// let features = decibels(&mel.of(&signal)?, Some(80.0))?;
/// assert_eq!(features.dims(), [2, 80, 32]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[doc(alias("melspectrogram"))]
pub struct MelSpectrogram {
    /// The number of samples per second.
    pub rate: u32,
    /// The short-time Fourier transform, with a Hann window.
    pub stft: Stft,
    /// The number of bands: `n_mels`.
    pub bands: usize,
    /// The lowest frequency in hertz.
    pub low: f64,
    /// The highest frequency in hertz, at most half the rate.
    pub high: f64,
    /// The scale on which the bands are of equal width.
    pub scale: MelScale,
    /// True if the weights of a band have an area of 1; false if they reach up to 1.
    pub equal_area: bool,
    /// True for power, the square of the magnitude; false for the magnitude.
    pub power: bool,
}

impl MelSpectrogram {
    /// The defaults of librosa: transforms of 2048 samples every 512, with zeros at both ends, and 128 bands.
    pub fn librosa(rate: u32) -> Self {
        let stft = Stft { pad: PadMode::Constant(0.0), ..Stft::new(2048) };
        let high = f64::from(rate) / 2.0;
        MelSpectrogram {
            rate,
            stft,
            bands: 128,
            low: 0.0,
            high,
            scale: MelScale::Slaney,
            equal_area: true,
            power: true,
        }
    }

    /// The defaults of torchaudio: transforms of 400 samples every 200, with reflected ends, and 128 bands.
    pub fn torchaudio(rate: u32) -> Self {
        let stft = Stft { hop: 200, ..Stft::new(400) };
        MelSpectrogram { stft, scale: MelScale::Htk, equal_area: false, ..MelSpectrogram::librosa(rate) }
    }

    /// The spectrogram `[.., bands, T]` of a signal `[.., L]`, in floats of any width.
    ///
    /// # Errors
    /// Fails as [`filters`](MelSpectrogram::filters) and [`FftOps::stft`] do: for integers, or a signal shorter than
    /// the reflected padding.
    #[track_caller]
    pub fn of<T: Apply>(&self, signal: &T) -> Result<T> {
        let (rt, dtype) = (signal.runtime(), signal.spec().dtype);
        let mut filters = self.filters().at_caller()?.into_iter();
        let window = T::constant(Tensor::window(rt, Window::Hann, self.stft.size, true, dtype).at_caller()?);
        let stft = Stft { onesided: true, ..self.stft };
        let power = signal.stft(Some(&window), stft).at_caller()?.square()?.sum(&[-1])?;
        let spectrum = if self.power { power } else { magnitude(&power)? };
        let shape = [self.bands, self.stft.size / 2 + 1];
        let filters = Tensor::from_f64_fn(rt, shape, dtype, || filters.next().unwrap_or_default())?;
        T::constant(filters).matmul(&spectrum)
    }

    /// The weights `[bands, F]` of the frequencies in each band, row-major; `F` is half the size of the transform and
    /// one.
    ///
    /// # Errors
    /// Fails if there is no band or no sample in a transform, or frequencies do not ascend from 0 to half the rate.
    #[track_caller]
    #[doc(alias("melscale_fbanks"))]
    #[doc(alias("mel_filter_bank"))]
    pub fn filters(&self) -> Result<Vec<f64>> {
        let op = "MelSpectrogram";
        for (name, count) in [("size", self.stft.size), ("bands", self.bands)] {
            if count == 0 {
                return Err(Error::range(op, name, count, "at least 1")).at_caller();
            }
        }
        let most = f64::from(self.rate) / 2.0;
        if !(0.0..most).contains(&self.low) {
            return Err(Error::range(op, "low", self.low, format!("from 0 to {most}, half the rate"))).at_caller();
        }
        if !(self.high > self.low && self.high <= most) {
            let allowed = format!("above {}, `low`, and at most {most}, half the rate", self.low);
            return Err(Error::range(op, "high", self.high, allowed)).at_caller();
        }
        let (low, high) = (self.scale.pitch(self.low), self.scale.pitch(self.high));
        let edge = |k: usize| self.scale.frequency(low + (high - low) * k as f64 / (self.bands + 1) as f64);
        let bins = self.stft.size / 2 + 1;
        let weights = |band: usize| {
            let [from, peak, to] = [0, 1, 2].map(|k| edge(band + k));
            let height = if self.equal_area { 2.0 / (to - from) } else { 1.0 };
            (0..bins).map(move |bin| {
                let f = f64::from(self.rate) * bin as f64 / self.stft.size as f64;
                height * ((f - from) / (peak - from)).min((to - f) / (to - peak)).max(0.0)
            })
        };
        Ok((0..self.bands).flat_map(weights).collect())
    }
}

/// The square root of a power. The gradient of a silence is 0, as that of an absolute value.
fn magnitude<T: Apply>(power: &T) -> Result<T> {
    let silent = power.eq(0.0)?;
    power.masked_fill(&silent, 1.0)?.sqrt()?.masked_fill(&silent, 0.0)
}

/// The frequency at which Slaney's scale turns logarithmic, its pitch, and the logarithm of a step of pitch above.
const SLANEY: (f64, f64, f64) = (1000.0, 15.0, 0.068_751_777_420_949_12);

impl MelScale {
    /// The pitch of a frequency in hertz.
    #[doc(alias("hz_to_mel"))]
    pub fn pitch(self, frequency: f64) -> f64 {
        let (turn, pitch, step) = SLANEY;
        match self {
            MelScale::Htk => 2595.0 * libm::log10(1.0 + frequency / 700.0),
            MelScale::Slaney if frequency < turn => frequency * pitch / turn,
            MelScale::Slaney => pitch + libm::log(frequency / turn) / step,
        }
    }

    /// The frequency of a pitch, in hertz.
    #[doc(alias("mel_to_hz"))]
    pub fn frequency(self, mel: f64) -> f64 {
        let (turn, pitch, step) = SLANEY;
        match self {
            MelScale::Htk => 700.0 * (libm::pow(10.0, mel / 2595.0) - 1.0),
            MelScale::Slaney if mel < pitch => mel * turn / pitch,
            MelScale::Slaney => turn * libm::exp(step * (mel - pitch)),
        }
    }
}

/// Computes decibels, `10 · log₁₀(power)` for `power: [.., bands, T]`, which are at least −100. With `top`, no value is
/// more than `top` below the largest one of its spectrogram.
///
/// Whisper's features are `(decibels(power, Some(80.0)) / 10 + 4) / 4`.
///
/// # Errors
/// Fails for integers, and with `top` for fewer than two axes or an empty spectrogram.
#[track_caller]
#[doc(alias("power_to_db"))]
#[doc(alias("AmplitudeToDB"))]
pub fn decibels<T: Apply>(power: &T, top: Option<f64>) -> Result<T> {
    let all = power.clamp(1e-10, f64::INFINITY).at_caller()?.log().at_caller()?.mul(10.0 / std::f64::consts::LN_10)?;
    match top {
        None => Ok(all),
        Some(top) => all.maximum(&all.amax_keepdim(&[-2, -1]).at_caller()?.sub(top)?),
    }
}
