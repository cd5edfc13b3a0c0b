//! Row-major positions of an array.

/// The multi-index of the `k`-th element.
pub(crate) fn unflat(mut k: usize, dims: &[usize]) -> Vec<usize> {
    let mut position = vec![0; dims.len()];
    for i in (0..dims.len()).rev() {
        position[i] = k % dims[i];
        k /= dims[i];
    }
    position
}

/// The row-major index of a position.
pub(crate) fn flat(position: &[usize], dims: &[usize]) -> usize {
    position.iter().zip(dims).fold(0, |k, (p, d)| k * d + p)
}
