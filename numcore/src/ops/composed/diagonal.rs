//! Diagonals, and the outer, Kronecker and cross products.

use crate::{
    Error, Result, Shape,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps, stack},
};

/// Diagonals, outer products, and Kronecker and cross products.
pub trait DiagonalOps: Apply {
    /// The diagonal column − row = `k` of the matrices in the last two axes of `self: [.., N, M]`, as a last axis. It
    /// is a view where the matrices are contiguous.
    #[doc(alias = "diag")]
    #[track_caller]
    fn diagonal(&self, k: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let Some([.., n, m]) = shape.get(..) else {
            return Err(Error::shape("diagonal", &[shape], "needs at least two axes"));
        };
        let (row, column) = (k.min(0).unsigned_abs(), k.max(0) as usize);
        let len = n.saturating_sub(row).min(m.saturating_sub(column));
        let flat = self.flatten(-2, -1)?;
        if len == 0 {
            return flat.narrow(-1, 0, 0);
        }
        flat.slice(-1, row * m + column, len, m + 1)
    }
    /// Matrices of zeros, `[.., N, N]` with `N = L + |k|`, that hold `self: [.., L]` on the diagonal column − row =
    /// `k`.
    #[doc(alias = "diag")]
    #[doc(alias = "diagflat")]
    #[track_caller]
    fn diag_embed(&self, k: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let Some(&len) = shape.last() else {
            return Err(Error::shape("diag_embed", &[shape], "needs at least one axis"));
        };
        let n = len + k.unsigned_abs();
        Shape::new(&[n, n])?;
        let start = k.min(0).unsigned_abs() * n + k.max(0) as usize;
        let flat = self.embed(-1, n * n, if len == 0 { 0 } else { start }, n + 1)?;
        flat.reshape([&shape[..shape.rank() - 1], &[n, n]].concat())
    }
    /// The sum of the main diagonal of the last two axes of `self: [.., N, M]`.
    #[track_caller]
    fn trace(&self) -> Result<Self> {
        self.diagonal(0)?.sum(&[-1])
    }
    /// The outer product of `self: [N]` and `other: [M]`, `[N, M]`.
    #[doc(alias = "ger")]
    #[track_caller]
    fn outer(&self, other: &Self) -> Result<Self> {
        let (a, b) = (self.spec().shape, other.spec().shape);
        if a.rank() != 1 || b.rank() != 1 {
            return Err(Error::shape("outer", &[a, b], "needs two vectors"));
        }
        self.unsqueeze(1)?.mul(&other.unsqueeze(0)?)
    }
    /// The Kronecker product, `[A1·B1, .., AK·BK]`: copies of `other`, each scaled by an element of `self`. The operand
    /// with fewer axes gets axes of size 1 in front; four axes at most.
    #[track_caller]
    fn kron(&self, other: &Self) -> Result<Self> {
        let (a, b) = (self.spec().shape, other.spec().shape);
        let rank = a.rank().max(b.rank());
        if 2 * rank > crate::MAX_RANK {
            return Err(Error::shape("kron", &[a, b], "at most four axes"));
        }
        let apart = |s: Shape, own_first: bool| -> Vec<usize> {
            s.padded(rank).iter().flat_map(|&n| if own_first { [n, 1] } else { [1, n] }).collect()
        };
        let product = self.reshape(apart(a, true))?.mul(&other.reshape(apart(b, false))?)?;
        let sizes: Vec<usize> =
            a.padded(rank).iter().zip(b.padded(rank).iter()).map(|(x, y)| x.saturating_mul(*y)).collect();
        product.reshape(sizes)
    }
    /// The cross product of vectors of three elements along `axis`; the other axes broadcast.
    #[doc(alias = "linalg_cross")]
    #[track_caller]
    fn cross(&self, other: &Self, axis: isize) -> Result<Self> {
        let (a, b) = (self.spec().shape, other.spec().shape);
        let (i, j) = (a.axis("cross", axis)?, b.axis("cross", axis)?);
        if a.rank() != b.rank() || a[i] != 3 || b[j] != 3 {
            return Err(Error::shape(
                "cross",
                &[a, b],
                format!("needs as many axes, and vectors of 3 along axis {axis}"),
            ));
        }
        let part = |x: &Self, k: usize| x.select(i as isize, k % 3);
        let element = |k: usize| {
            part(self, k + 1)?.mul(&part(other, k + 2)?)?.sub(&part(self, k + 2)?.mul(&part(other, k + 1)?)?)
        };
        stack(&[&element(0)?, &element(1)?, &element(2)?], i as isize)
    }
}

impl<T: Apply> DiagonalOps for T {}
