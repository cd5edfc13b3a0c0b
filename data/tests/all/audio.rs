//! Mel spectrograms, with the values of librosa and torchaudio, and WAV files.

use autograd::Var;
use data::{
    Array,
    mel::{MelScale, MelSpectrogram, decibels},
};
use numcore::{
    Result, Tensor,
    ops::{PointwiseOps, ReduceOps, Stft},
};
use runtime_cpu::Cpu;
use serde_json::Value;

fn reference() -> Value {
    serde_json::from_str(include_str!("../references/mel.json")).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The signal of the reference, `[200]`.
fn signal() -> Vec<f64> {
    let value = |i: usize| {
        let i = i as f64;
        (0.05 * i).sin() + 0.5 * (0.31 * i + 0.004 * i * i).sin()
    };
    (0..200).map(value).collect()
}

fn tensor(values: Vec<f64>, shape: &[usize]) -> Tensor<Cpu> {
    Array::new(shape, values).unwrap().to_tensor(&Cpu::with_threads(1)).unwrap()
}

/// Requires values that differ by at most `within` of the largest.
fn check(found: &Tensor<Cpu>, due: &Value, within: f64) {
    let (found, due) = (found.to_vec::<f64>().unwrap(), floats(due));
    assert_eq!(found.len(), due.len());
    let largest = due.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    for (i, (x, y)) in found.into_iter().zip(due).enumerate() {
        assert!((x - y).abs() <= within * largest, "{i}: {x} {y}");
    }
}

fn small(of: MelSpectrogram) -> MelSpectrogram {
    MelSpectrogram { stft: Stft { size: 64, hop: 25, ..of.stft }, bands: 6, ..of }
}

#[test]
fn the_gradient_of_a_silence_is_zero() {
    let mel = MelSpectrogram { power: false, ..small(MelSpectrogram::librosa(8000)) };
    let silence = Var::leaf("signal", tensor(vec![0.0; 200], &[200])).unwrap();
    let gradient = |signal: &Var<Cpu>| {
        let loss = mel.of(signal).unwrap().sum_all().unwrap();
        loss.backward().unwrap().of(signal).unwrap().to_f64s().unwrap()
    };
    assert_eq!(gradient(&silence), [0.0; 200]);
    let sound = Var::leaf("signal", tensor(signal(), &[200])).unwrap();
    assert!(gradient(&sound).iter().all(|g| g.is_finite()) && gradient(&sound).iter().any(|g| *g != 0.0));
}

#[test]
fn filters_are_librosa_s() {
    for (name, due) in reference()["filters"].as_object().unwrap() {
        let words: Vec<&str> = name.split(' ').collect();
        let mel = MelSpectrogram {
            scale: if words[0] == "htk" { MelScale::Htk } else { MelScale::Slaney },
            equal_area: words[1] == "slaney",
            low: words[2].parse().unwrap(),
            high: words[3].parse().unwrap(),
            ..small(MelSpectrogram::librosa(8000))
        };
        let found = mel.filters().unwrap();
        assert_eq!(found.len(), 6 * 33);
        for (x, y) in found.into_iter().zip(floats(due)) {
            // The reference has eight digits.
            assert!((x - y).abs() <= 5e-8 * y.abs().max(if mel.equal_area { 1e-3 } else { 1.0 }), "{name}: {x} {y}");
        }
    }
    for scale in [MelScale::Htk, MelScale::Slaney] {
        for f in [0.0, 1.0, 440.0, 999.9, 1000.0, 1000.1, 20_000.0] {
            assert!((scale.frequency(scale.pitch(f)) - f).abs() < 1e-9 * (1.0 + f), "{scale:?} {f}");
        }
    }
}

#[test]
fn spectrograms_are_librosa_s_and_torchaudio_s() {
    let reference = reference();
    let x = tensor(signal(), &[200]);
    let mel = small(MelSpectrogram::librosa(8000)).of(&x).unwrap();
    assert_eq!(mel.dims(), [6, 9]);
    check(&mel, &reference["librosa"], 1e-6);
    check(&decibels(&mel, Some(30.0)).unwrap(), &reference["librosa_db"], 1e-6);
    check(&decibels(&mel.mul(1e-9).unwrap(), None).unwrap(), &reference["librosa_db_all"], 1e-6);
    let other = MelSpectrogram { low: 90.0, high: 3300.0, power: false, ..small(MelSpectrogram::torchaudio(8000)) };
    check(&other.of(&x).unwrap(), &reference["torchaudio"], 1e-6);
    // Of two signals, each has its own largest value.
    let two = signal().into_iter().chain(signal().into_iter().map(|x| 1e-3 * x)).collect();
    let mel = small(MelSpectrogram::torchaudio(8000)).of(&tensor(two, &[2, 200])).unwrap();
    assert_eq!(mel.dims(), [2, 6, 9]);
    check(&decibels(&mel, Some(40.0)).unwrap(), &reference["torchaudio_db"], 1e-5);
    // In f32, and with whole frames alone.
    let narrow = Array::from_vec(signal().into_iter().map(|x| x as f32).collect());
    let narrow: Tensor<Cpu> = narrow.to_tensor(&Cpu::with_threads(1)).unwrap();
    let inner = MelSpectrogram { stft: Stft { center: false, ..other.stft }, ..other };
    assert_eq!(inner.of(&narrow).unwrap().dims(), [6, 6]);
}

#[test]
fn geometries_that_are_refused() {
    let mel = small(MelSpectrogram::torchaudio(8000));
    let x = tensor(signal(), &[200]);
    let says = |result: Result<Tensor<Cpu>>, words: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{error} should say {words}");
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{error}");
    };
    says(MelSpectrogram { bands: 0, ..mel }.of(&x), "bands is 0");
    says(MelSpectrogram { stft: Stft { size: 0, ..mel.stft }, ..mel }.of(&x), "size is 0");
    says(MelSpectrogram { stft: Stft { hop: 0, ..mel.stft }, ..mel }.of(&x), "hop is 0");
    says(MelSpectrogram { low: -1.0, ..mel }.of(&x), "low is -1");
    says(MelSpectrogram { low: f64::NAN, ..mel }.of(&x), "low is NaN");
    says(MelSpectrogram { high: 4000.5, ..mel }.of(&x), "at most 4000, half the rate");
    says(MelSpectrogram { low: 300.0, high: 300.0, ..mel }.of(&x), "high is 300");
    says(MelSpectrogram { rate: 0, ..mel }.of(&x), "low is 0");
    assert!(mel.of(&tensor(vec![1.0; 20], &[20])).is_err(), "shorter than what is reflected");
    assert!(mel.of(&Tensor::ones(&Cpu::with_threads(1), [200], numcore::DType::I64).unwrap()).is_err());
}

#[cfg(feature = "audio")]
mod wav {
    use std::io::Cursor;

    use data::sources::Wav;
    use hound::{Sample, SampleFormat, WavSpec, WavWriter};

    use crate::common::Folder;

    fn wav<S: Sample + Copy>(channels: u16, bits: u16, format: SampleFormat, samples: &[S]) -> Vec<u8> {
        let spec = WavSpec { channels, sample_rate: 16_000, bits_per_sample: bits, sample_format: format };
        let mut bytes = Cursor::new(Vec::new());
        let mut writer = WavWriter::new(&mut bytes, spec).unwrap();
        samples.iter().for_each(|&x| writer.write_sample(x).unwrap());
        writer.finalize().unwrap();
        bytes.into_inner()
    }

    #[test]
    fn sounds_of_every_kind_are_read() {
        let folder = Folder::new("wav");
        for bits in [8, 16, 24, 32] {
            let half = 1i32 << (bits - 2);
            let bytes = wav(2, bits, SampleFormat::Int, &[half, 0, -half, -half, 0, half / 2]);
            let sound = Wav::open(folder.file("a.wav", bytes)).unwrap();
            assert_eq!((sound.rate, sound.samples.dims()), (16_000, &[2, 3][..]));
            assert_eq!(sound.samples.to_vec::<f32>().unwrap(), [0.5, -0.5, 0.0, 0.0, -0.5, 0.25], "{bits} bits");
            assert_eq!(sound.mono().unwrap(), [0.25, -0.5, 0.125]);
        }
        let sound = Wav::decode("a row", &wav(1, 32, SampleFormat::Float, &[0.1f32, -3.5])).unwrap();
        assert_eq!((sound.samples.dims(), sound.mono().unwrap()), (&[1, 2][..], vec![0.1, -3.5]));
        let none = Wav::decode("a row", &wav::<i16>(2, 16, SampleFormat::Int, &[])).unwrap();
        assert_eq!((none.samples.dims(), none.mono().unwrap().len()), (&[2, 0][..], 0));
        let flat = Wav { samples: data::Array::from_vec(vec![0.0f32]), ..none };
        assert!(flat.mono().unwrap_err().to_string().contains("samples are [C, L]"));
    }

    #[test]
    fn damaged_sounds_are_errors() {
        let folder = Folder::new("wav-damaged");
        let whole = wav(2, 16, SampleFormat::Int, &[1i16; 40]);
        let cut = Wav::open(folder.file("cut.wav", &whole[..whole.len() - 7])).unwrap_err();
        assert!(cut.to_string().contains("cut.wav: it is no WAV file that can be read"), "{cut}");
        assert!(Wav::decode("text", b"no sound at all").unwrap_err().to_string().contains("text: it is no WAV"));
        assert!(Wav::open(folder.path("none.wav")).unwrap_err().to_string().contains("none.wav"));
        for at in 0..whole.len().min(64) {
            for flip in [0x01, 0x80, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= flip;
                let _ = Wav::decode("damaged", &damaged);
            }
        }
    }
}
