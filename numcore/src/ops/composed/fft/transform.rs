//! The discrete Fourier transform of rows of pairs, without normalization.

use std::{f64::consts::PI, sync::LazyLock};

use super::{super::constant, resized};
use crate::{
    Result,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps},
    pointwise::Program,
};

/// The largest length that is computed as one matmul.
const DIRECT: usize = 64;
/// The largest prime length that is not computed as a convolution.
const PRIME: usize = 128;

/// The discrete Fourier transform of each row of `x: [B, N, 2]`.
pub(super) fn dft<T: Apply>(x: &T, inverse: bool) -> Result<T> {
    let n = x.spec().shape[1];
    match n {
        0..=DIRECT => product(x, inverse),
        _ => match (2..=DIRECT).rev().find(|&d| n.is_multiple_of(d)) {
            Some(radix) => stages(x, radix, inverse),
            None if n <= PRIME => product(x, inverse),
            None => convolution(x, inverse),
        },
    }
}

/// The roots of unity `e^(±2πi·k/n)` for all `k < n`.
fn roots(n: usize, inverse: bool) -> Vec<(f64, f64)> {
    let turn = if inverse { 2.0 * PI } else { -2.0 * PI };
    let root = |k: usize| {
        let (sin, cos) = (turn * k as f64 / n as f64).sin_cos();
        (cos, sin)
    };
    (0..n).map(root).collect()
}

/// The transform as one matmul with the DFT matrix, in which every complex element is a 2 × 2 real matrix.
fn product<T: Apply>(x: &T, inverse: bool) -> Result<T> {
    let shape = x.spec().shape;
    let n = shape[1];
    let roots = roots(n, inverse);
    let mut matrix = Vec::with_capacity(4 * n * n);
    for t in 0..n {
        matrix.extend((0..n).flat_map(|k| [roots[t * k % n].0, roots[t * k % n].1]));
        matrix.extend((0..n).flat_map(|k| [-roots[t * k % n].1, roots[t * k % n].0]));
    }
    let matrix = constant(x, [2 * n, 2 * n], x.spec().dtype, &matrix)?;
    x.reshape([shape[0], 2 * n])?.matmul(&matrix)?.reshape(shape)
}

/// The transform by transforms of length `radix` and `n / radix`: element `t = t₁·rest + t₂` contributes to
/// `k = k₁ + radix·k₂`.
fn stages<T: Apply>(x: &T, radix: usize, inverse: bool) -> Result<T> {
    let (batch, n) = (x.spec().shape[0], x.spec().shape[1]);
    let rest = n / radix;
    let columns = x.reshape([batch, radix, rest, 2])?.permute(&[0, 2, 1, 3])?.reshape([batch * rest, radix, 2])?;
    let inner = product(&columns, inverse)?.reshape([batch, rest, radix, 2])?;
    let roots = roots(n, inverse);
    let twiddles: Vec<_> = (0..rest).flat_map(|t| (0..radix).map(move |k| t * k)).map(|i| roots[i]).collect();
    let turned = times(&inner, &[1, rest, radix], &twiddles)?;
    let rows = turned.permute(&[0, 2, 1, 3])?.reshape([batch * radix, rest, 2])?;
    dft(&rows, inverse)?.reshape([batch, radix, rest, 2])?.permute(&[0, 2, 1, 3])?.reshape([batch, n, 2])
}

/// The transform as a convolution with a chirp, since `t·k = (t² + k² − (k − t)²) / 2`. The convolution's length is a
/// power of two.
fn convolution<T: Apply>(x: &T, inverse: bool) -> Result<T> {
    let n = x.spec().shape[1];
    let long = (2 * n - 1).next_power_of_two();
    // Squares are taken modulo 2n, so that angles keep their digits.
    let steps = roots(2 * n, inverse);
    let chirp: Vec<(f64, f64)> = (0..n).map(|t| steps[t * t % (2 * n)]).collect();
    let mut filter = vec![0.0; 2 * long];
    for (t, &(c, s)) in chirp.iter().enumerate() {
        for at in [t, (long - t) % long] {
            (filter[2 * at], filter[2 * at + 1]) = (c, -s);
        }
    }
    let filter = dft(&constant(x, [1, long, 2], x.spec().dtype, &filter)?, false)?;
    let spectrum = dft(&resized(&times(x, &[1, n], &chirp)?, 1, long)?, false)?;
    let (cos, sin) = (filter.narrow(-1, 0, 1)?, filter.narrow(-1, 1, 1)?);
    let signs = constant(x, [2], x.spec().dtype, &[-1.0, 1.0])?;
    let both = multiply(&spectrum, &cos, &sin.mul(&signs)?)?;
    let summed = dft(&both, true)?.narrow(1, 0, n)?.mul(1.0 / long as f64)?;
    times(&summed, &[1, n], &chirp)
}

/// `x: [.., 2]` times complex numbers of `shape`, which broadcast.
fn times<T: Apply>(x: &T, shape: &[usize], by: &[(f64, f64)]) -> Result<T> {
    let dtype = x.spec().dtype;
    let cos: Vec<f64> = by.iter().map(|b| b.0).collect();
    let sin: Vec<f64> = by.iter().flat_map(|b| [-b.1, b.1]).collect();
    let cos = constant(x, [shape, &[1]].concat(), dtype, &cos)?;
    multiply(x, &cos, &constant(x, [shape, &[2]].concat(), dtype, &sin)?)
}

/// The complex product `x · (cos + i·sin)`, with `sin` given as the pair `(−sin, sin)`: exchanging the parts of `x` is
/// a view.
fn multiply<T: Apply>(x: &T, cos: &T, sin: &T) -> Result<T> {
    static MULTIPLY: LazyLock<Program> = LazyLock::new(|| Program::new("fft", |[x, y, c, s], []| [x * c + y * s]));
    x.apply_program(&MULTIPLY, &[&x.flip(&[-1])?, cos, sin], &[])
}
