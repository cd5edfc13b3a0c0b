//! Transforms of many lengths against the definition, their inverses, norms, real and short-time ones, and windows.

use std::f64::consts::PI;

use numcore::{
    DType, Result,
    ops::{FftNorm, FftOps, PadMode, PointwiseOps, Stft, ViewOps, Window},
};

use crate::common::*;

/// `Σ x[t] · e^(∓2πi·t·k/n)` of rows of pairs, by definition.
fn definition(x: &Array, sign: f64, factor: f64) -> Array {
    let n = x.shape[1];
    Array::of(&x.shape, |at| {
        let sum = (0..n).fold((0.0, 0.0), |(re, im), t| {
            let (s, c) = (sign * 2.0 * PI * (t * at[1] % n) as f64 / n as f64).sin_cos();
            let (a, b) = (x.at(&[at[0], t, 0]), x.at(&[at[0], t, 1]));
            (re + a * c - b * s, im + a * s + b * c)
        });
        factor * if at[2] == 0 { sum.0 } else { sum.1 }
    })
}

/// Small, smooth, powers of two, primes below and above the limit for direct matmuls, and multiples of them.
const LENGTHS: [usize; 24] =
    [1, 2, 3, 5, 8, 12, 16, 17, 31, 60, 64, 65, 67, 96, 100, 127, 128, 131, 134, 262, 257, 360, 509, 1024];

#[test]
fn every_length_is_the_definition() {
    for n in LENGTHS {
        let x = Array::random(&[2, n, 2], n as u64);
        let scale = (n as f64).sqrt();
        let forward = x.tensor().fft(None, 1, FftNorm::Ortho).unwrap();
        definition(&x, -1.0, 1.0 / scale).is(&format!("fft {n}"), &forward, 2e-14 * scale.max(4.0));
        let inverse = x.tensor().ifft(None, -1, FftNorm::Ortho).unwrap();
        definition(&x, 1.0, 1.0 / scale).is(&format!("ifft {n}"), &inverse, 2e-14 * scale.max(4.0));
        x.is(&format!("there and back {n}"), &forward.ifft(None, 1, FftNorm::Ortho).unwrap(), 1e-13);
    }
}

#[test]
fn single_precision_keeps_its_digits() {
    for n in [1000usize, 1021, 4096] {
        let x = Array::random(&[1, n, 2], 4);
        let wide = x.tensor().fft(None, 1, FftNorm::Ortho).unwrap().to_f64s().unwrap();
        for (dtype, tolerance) in [(DType::F32, 3e-6), (DType::BF16, 3e-2), (DType::F16, 4e-3)] {
            let narrow = x.tensor().to_dtype(dtype).unwrap().fft(None, 1, FftNorm::Ortho).unwrap();
            assert_eq!(narrow.dtype(), dtype);
            let worst = narrow.to_f64s().unwrap().iter().zip(&wide).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
            let largest = wide.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            assert!(worst < tolerance * largest, "{n} {dtype}: {worst} of {largest}");
        }
    }
}

#[test]
fn norms_axes_and_lengths() {
    let x = Array::random(&[3, 4, 2], 1);
    for (norm, forward, inverse) in
        [(FftNorm::Backward, 1.0, 0.25), (FftNorm::Ortho, 0.5, 0.5), (FftNorm::Forward, 0.25, 1.0)]
    {
        definition(&x, -1.0, forward).is("forward", &x.tensor().fft(None, 1, norm).unwrap(), 1e-14);
        definition(&x, 1.0, inverse).is("inverse", &x.tensor().ifft(None, 1, norm).unwrap(), 1e-14);
    }
    let turned = x.tensor().transpose(0, 1).unwrap().fft(None, 0, FftNorm::Backward).unwrap();
    definition(&x, -1.0, 1.0).is("another axis", &turned.transpose(0, 1).unwrap(), 1e-14);
    let longer = Array::of(&[3, 7, 2], |at| x.get(&[at[0] as isize, at[1] as isize, at[2] as isize], 0.0));
    definition(&longer, -1.0, 1.0).is("longer", &x.tensor().fft(Some(7), 1, FftNorm::Backward).unwrap(), 1e-14);
    let shorter = Array::of(&[3, 3, 2], |at| x.at(at));
    definition(&shorter, -1.0, 1.0).is("shorter", &x.tensor().fft(Some(3), 1, FftNorm::Backward).unwrap(), 1e-14);
    let planes = x.tensor().fftn(&[0, 1], FftNorm::Backward).unwrap();
    let one = x.tensor().fft(None, 0, FftNorm::Backward).unwrap().fft(None, 1, FftNorm::Backward).unwrap();
    Array { shape: x.shape.clone(), v: one.to_f64s().unwrap() }.is("both axes", &planes, 0.0);
    holds(&row(&[0.0, 1.0, 2.0, 3.0, 4.0]).fftshift(&[0]).unwrap(), &[5], &[3.0, 4.0, 0.0, 1.0, 2.0]);
    holds(&row(&[3.0, 4.0, 0.0, 1.0, 2.0]).ifftshift(&[0]).unwrap(), &[5], &[0.0, 1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn real_transforms() {
    for n in [1usize, 2, 5, 8, 67, 131, 200] {
        let x = Array::random(&[2, n], 3);
        let pairs = Array::of(&[2, n, 2], |at| if at[2] == 0 { x.at(&at[..2]) } else { 0.0 });
        let full = definition(&pairs, -1.0, 1.0);
        let half = x.tensor().rfft(None, 1, FftNorm::Backward).unwrap();
        Array::of(&[2, n / 2 + 1, 2], |at| full.at(at)).is(&format!("rfft {n}"), &half, 1e-12);
        x.is(&format!("irfft {n}"), &half.irfft(Some(n), 1, FftNorm::Backward).unwrap(), 1e-13);
    }
    // Imaginary parts that a real signal cannot have are not read: those of frequency 0 and of the highest.
    let spectrum = row(&[1.0, 9.0, 2.0, 0.5, 3.0, -7.0]).reshape([3, 2]).unwrap();
    let clean = row(&[1.0, 0.0, 2.0, 0.5, 3.0, 0.0]).reshape([3, 2]).unwrap();
    let back = |x: &T| x.irfft(None, 0, FftNorm::Backward).unwrap().to_f64s().unwrap();
    holds(&row(&back(&spectrum)), &[4], &back(&clean));
    let image = Array::random(&[3, 4, 5], 5);
    let there = image.tensor().rfftn(&[0, 2], FftNorm::Ortho).unwrap();
    assert_eq!(there.dims(), [3, 4, 3, 2]);
    image.is("rfftn and back", &there.irfftn(Some(5), &[0, 2], FftNorm::Ortho).unwrap(), 1e-14);
}

#[test]
fn short_time_transforms() {
    let x = Array::random(&[2, 20], 6);
    let window = T::window(&cpu(), Window::Hann, 6, true, DType::F64).unwrap();
    let weights = window.to_f64s().unwrap();
    for (center, onesided, normalized) in [(true, true, false), (false, false, true)] {
        let options = Stft { size: 8, hop: 3, center, onesided, normalized, pad: PadMode::Reflect };
        let got = x.tensor().stft(Some(&window), options).unwrap();
        let times = if center { 7 } else { 5 };
        let bins = if onesided { 5 } else { 8 };
        let want = Array::of(&[2, bins, times, 2], |at| {
            let angle = |j: usize| -2.0 * PI * (at[1] * j) as f64 / 8.0;
            let element = |j: usize| {
                let i = (at[2] * 3 + j) as isize - if center { 4 } else { 0 };
                let i = if i < 0 {
                    -i
                } else if i > 19 {
                    38 - i
                } else {
                    i
                };
                // A window of 6 in the middle of 8.
                if (1..7).contains(&j) { weights[j - 1] * x.at(&[at[0], i as usize]) } else { 0.0 }
            };
            let part = |j: usize| if at[3] == 0 { angle(j).cos() } else { angle(j).sin() };
            let sum: f64 = (0..8).map(|j| element(j) * part(j)).sum();
            if normalized { sum / 8f64.sqrt() } else { sum }
        });
        want.is("stft", &got, 1e-13);
    }
    let options = Stft { hop: 2, ..Stft::new(8) };
    let hann = T::window(&cpu(), Window::Hann, 8, true, DType::F64).unwrap();
    let spectra = x.tensor().stft(Some(&hann), options).unwrap();
    x.is("there and back", &spectra.istft(Some(&hann), options, None).unwrap(), 1e-13);
    x.is("with a length", &spectra.istft(Some(&hann), options, Some(20)).unwrap(), 1e-13);
    let cut = Array::of(&[2, 13], |at| x.at(at));
    cut.is("cut", &spectra.istft(Some(&hann), options, Some(13)).unwrap(), 1e-13);
    let plain = x.tensor().stft(None, Stft { normalized: true, onesided: false, ..options }).unwrap();
    let back = plain.istft(None, Stft { normalized: true, onesided: false, ..options }, None).unwrap();
    x.is("without a window, both sides", &back, 1e-13);
}

/// Values of SciPy's `signal.windows`.
#[test]
fn windows() {
    let of = |kind, n, periodic| T::window(&cpu(), kind, n, periodic, DType::F64).unwrap();
    holds(&of(Window::Hann, 4, true), &[4], &[0.0, 0.5, 1.0, 0.5]);
    holds(&of(Window::Hann, 5, false), &[5], &[0.0, 0.5, 1.0, 0.5, 0.0]);
    holds(&of(Window::Hamming, 4, true), &[4], &[0.08, 0.54, 1.0, 0.54]);
    holds(&of(Window::Blackman, 5, false), &[5], &[0.0, 0.34, 1.0, 0.34, 0.0]);
    holds(&of(Window::Bartlett, 4, true), &[4], &[0.0, 0.5, 1.0, 0.5]);
    // 1 / I₀(14) at the ends, I₀(14) = 129418.5627.
    let kaiser = of(Window::Kaiser(14.0), 5, false).to_f64s().unwrap();
    assert!((kaiser[0] - 7.726_866_84e-6).abs() < 1e-12 && kaiser[2] == 1.0, "{kaiser:?}");
    assert!((kaiser[1] - 0.164_932_188).abs() < 1e-7, "{kaiser:?}");
    for kind in [Window::Hann, Window::Hamming, Window::Blackman, Window::Bartlett, Window::Kaiser(3.0)] {
        holds(&of(kind, 1, true), &[1], &[1.0]);
        holds(&of(kind, 0, true), &[0], &[]);
    }
}

#[test]
fn what_is_no_transform() -> Result<()> {
    let x = row(&[1.0, 2.0, 3.0]);
    refused(x.fft(None, 0, FftNorm::Backward), &["fft", "[3]", "[.., N, 2]"]);
    refused(x.reshape([1, 3])?.fft(None, 0, FftNorm::Backward), &["fft", "[1, 3]"]);
    refused(ints(&[2, 2], &[1; 4]).fft(None, 0, FftNorm::Backward), &["fft", "i64"]);
    refused(row(&[1.0, 2.0]).reshape([1, 2])?.fft(Some(0), 0, FftNorm::Backward), &["fft", "no elements"]);
    refused(row(&[1.0, 2.0]).reshape([1, 2])?.fft(None, 1, FftNorm::Backward), &["fft", "axis 1"]);
    let pairs = row(&[1.0; 12]).reshape([2, 3, 2])?;
    for axes in [[9, 0], [0, 9]] {
        let (n, norm) = (None, FftNorm::Backward);
        refused(pairs.fftn(&axes, norm), &["fftn: shapes", "axis 9"]);
        refused(pairs.ifftn(&axes, norm), &["ifftn: shapes", "axis 9"]);
        refused(pairs.rfftn(&axes, norm), &["rfftn: shapes", "axis 9"]);
        refused(pairs.irfftn(n, &axes, norm), &["irfftn: shapes", "axis 9"]);
        refused(pairs.ifftshift(&axes), &["ifftshift: shapes", "axis 9"]);
    }
    refused(ints(&[2, 2], &[1; 4]).rfftn(&[0], FftNorm::Backward), &["rfftn", "i64"]);
    refused(x.stft(None, Stft { hop: 0, ..Stft::new(2) }), &["stft", "hop is 0"]);
    refused(x.stft(Some(&row(&[1.0; 5])), Stft::new(4)), &["stft", "[5]"]);
    refused(x.reshape([1, 3])?.istft(None, Stft::new(4), None), &["istft"]);
    refused(T::window(&cpu(), Window::Hann, 3, true, DType::I32), &["window", "i32"]);
    Ok(())
}
