//! Fourier transforms. Sums have as many terms as a transform has elements: rounding grows accordingly.

use autograd::Var;
use numcore::{
    Runtime, Tensor,
    ops::{Apply, FftNorm, FftOps, PadMode, PointwiseOps, Stft, Window},
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::centered,
};

const PLAIN: FftNorm = FftNorm::Backward;

fn hann<R: Runtime>(x: &Var<R>, n: usize) -> numcore::Result<Var<R>> {
    Ok(Var::new(Tensor::window(x.runtime(), Window::Hann, n, true, x.dtype())?))
}

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let complex: [(&str, &[usize], CaseFn<R>); 9] = [
        ("fft", &[2, 6, 2], |x| x[0].fft(None, -1, PLAIN)?.square()),
        ("fft of 1", &[3, 1, 2], |x| x[0].fft(None, -1, PLAIN)?.square()),
        ("fft of another axis", &[5, 3, 2], |x| x[0].fft(None, 0, FftNorm::Ortho)?.square()),
        ("fft cut", &[2, 6, 2], |x| x[0].fft(Some(4), 1, PLAIN)?.square()),
        ("fft lengthened", &[2, 3, 2], |x| x[0].fft(Some(7), 1, FftNorm::Forward)?.square()),
        ("ifft", &[2, 6, 2], |x| x[0].ifft(None, -1, PLAIN)?.square()),
        ("fftn", &[3, 4, 2], |x| x[0].fftn(&[0, 1], FftNorm::Ortho)?.square()),
        ("ifftn", &[2, 3, 4, 2], |x| x[0].ifftn(&[-2, -1], PLAIN)?.square()),
        ("fftshift", &[3, 4, 2], |x| x[0].fftshift(&[0, 1])?.square()),
    ];
    let real: [(&str, &[usize], CaseFn<R>); 10] = [
        ("rfft", &[2, 6], |x| x[0].rfft(None, -1, PLAIN)?.square()),
        ("rfft odd", &[5, 2], |x| x[0].rfft(None, 0, FftNorm::Ortho)?.square()),
        ("irfft", &[2, 4, 2], |x| x[0].irfft(None, -1, PLAIN)?.square()),
        ("irfft odd", &[2, 4, 2], |x| x[0].irfft(Some(7), 1, FftNorm::Forward)?.square()),
        ("irfft lengthened", &[3, 2], |x| x[0].irfft(Some(9), 0, PLAIN)?.square()),
        ("rfftn", &[3, 4], |x| x[0].rfftn(&[0, 1], FftNorm::Ortho)?.square()),
        ("irfftn", &[3, 3, 2], |x| x[0].irfftn(Some(4), &[0, 1], PLAIN)?.square()),
        ("stft", &[2, 9], |x| {
            let options = Stft { hop: 3, ..Stft::new(4) };
            x[0].stft(Some(&hann(&x[0], 4)?), options)?.square()
        }),
        ("stft of both sides", &[10], |x| {
            let options =
                Stft { hop: 2, pad: PadMode::Constant(0.0), normalized: true, onesided: false, ..Stft::new(5) };
            x[0].stft(Some(&hann(&x[0], 3)?), options)?.square()
        }),
        ("istft", &[3, 5, 2], |x| {
            let options = Stft { hop: 1, ..Stft::new(4) };
            x[0].istft(Some(&hann(&x[0], 4)?), options, None)?.square()
        }),
    ];
    let rows = complex.into_iter().chain(real);
    rows.map(|(name, shape, f)| case(name, [centered(shape)], f).slack(8.0)).collect()
}
