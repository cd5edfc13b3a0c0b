//! Sounds in WAV files (feature `audio`).

use std::{io::Cursor, path::Path};

use hound::{SampleFormat, WavReader};
use numcore::{Error, Result, Within};

use crate::Array;

/// A sound.
///
/// ```no_run
/// use data::{Dataset, InMemory, Loader, sources::Wav};
/// # fn main() -> numcore::Result<()> {
/// let sounds = InMemory::new(vec!["yes.wav", "no.wav"]).map(|path| Wav::open(path)?.mono());
/// let loader = Loader::new(sounds).batch(2).collate(|sounds| data::pad(&sounds, 0.0, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[doc(alias("soundfile"))]
pub struct Wav {
    /// The samples `[C, L]` of each channel as `f32` from −1 to 1.
    pub samples: Array,
    /// The number of samples per second.
    pub rate: u32,
}

impl Wav {
    /// Reads a file of whole numbers of 8 to 32 bits or of `f32`: `torchaudio.load`.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is no WAV file, or is cut.
    #[track_caller]
    #[doc(alias("torchaudio.load"))]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e)).at_caller()?;
        Wav::decode(&path.display().to_string(), &bytes)
    }

    /// Decodes the bytes of a WAV file, such as those of a [`TableRow`](super::TableRow). Errors name it `what`.
    ///
    /// # Errors
    /// Fails if the bytes are no WAV file, or are cut.
    #[track_caller]
    pub fn decode(what: &str, bytes: &[u8]) -> Result<Self> {
        let read = || -> Result<Wav, String> {
            let reader = WavReader::new(Cursor::new(bytes)).map_err(|e| e.to_string())?;
            let spec = reader.spec();
            let scale = (f64::from(spec.bits_per_sample) - 1.0).exp2() as f32;
            let values: Result<Vec<f32>, _> = match spec.sample_format {
                SampleFormat::Float => reader.into_samples::<f32>().collect(),
                SampleFormat::Int => reader.into_samples::<i32>().map(|x| Ok(x? as f32 / scale)).collect(),
            };
            let values = values.map_err(|e| e.to_string())?;
            let channels = usize::from(spec.channels);
            if !values.len().is_multiple_of(channels.max(1)) {
                return Err(format!("{} samples are no whole number for {channels} channels", values.len()));
            }
            let channel = |c: usize| values.iter().skip(c).step_by(channels).copied();
            let shape = [channels, values.len().checked_div(channels).unwrap_or(0)];
            let samples = Array::new(shape, (0..channels).flat_map(channel).collect()).map_err(|e| e.to_string())?;
            Ok(Wav { samples, rate: spec.sample_rate })
        };
        read().map_err(|why| Error::format(what, format!("it is no WAV file that can be read: {why}"))).at_caller()
    }

    /// The mean of the channels, `[L]`.
    ///
    /// # Errors
    /// Fails if [`samples`](Wav::samples) were replaced by an array of other axes or elements.
    #[track_caller]
    pub fn mono(&self) -> Result<Vec<f32>> {
        let &[channels, length] = self.samples.dims() else {
            let why = "samples are [C, L]: channels, then time";
            return Err(Error::shape("Wav::mono", &[*self.samples.shape()], why)).at_caller();
        };
        let values = self.samples.to_vec::<f32>().at_caller()?;
        let sum = |at: usize| values.iter().skip(at).step_by(length).sum::<f32>();
        Ok((0..length).map(|at| sum(at) / channels as f32).collect())
    }
}
