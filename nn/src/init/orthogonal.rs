//! Random matrices with orthonormal rows or columns.

use numcore::rng::Philox;

/// A `rows × columns` matrix, row-major, whose shorter side is orthonormal. It is the Q of the QR decomposition, with a
/// positive diagonal of R, of a matrix of normal entries. So it is uniform among such matrices (Mezzadri 2007).
pub(super) fn orthogonal(rows: usize, columns: usize, seed: u64) -> Vec<f64> {
    let (count, len) = (rows.min(columns), rows.max(columns));
    let mut rng = Philox::new(seed, 0);
    let mut vectors: Vec<Vec<f64>> = (0..count).map(|_| (0..len).map(|_| rng.normal()).collect()).collect();
    orthonormalize(&mut vectors);
    if rows <= columns {
        return vectors.concat();
    }
    (0..rows).flat_map(|r| vectors.iter().map(move |v| v[r])).collect()
}

/// Modified Gram–Schmidt, each vector twice: once loses orthogonality where vectors are nearly parallel (Giraud et al.
/// 2005).
fn orthonormalize(vectors: &mut [Vec<f64>]) {
    for i in 0..vectors.len() {
        let (done, rest) = vectors.split_at_mut(i);
        for _ in 0..2 {
            done.iter().for_each(|q| remove(&mut rest[0], q));
        }
        let norm = dot(&rest[0], &rest[0]).sqrt();
        rest[0].iter_mut().for_each(|x| *x /= norm);
    }
}

/// Removes the component along the unit vector `q` from `v`.
fn remove(v: &mut [f64], q: &[f64]) {
    let along = dot(v, q);
    v.iter_mut().zip(q).for_each(|(x, y)| *x -= along * y);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}
