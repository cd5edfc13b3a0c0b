//! Distances of points.

use std::sync::LazyLock;

use super::widened;
use crate::{
    Error, Result, Shape,
    ops::{Apply, PointwiseOps, Reduce, ReduceOps, ScalarList, ViewOps, rule},
    pointwise::Program,
};

/// Pairwise distances between the rows of two matrices.
pub trait DistanceOps: Apply {
    /// Pairwise `p`-norm distances between the rows of `self: [B.., N, D]` and `other: [B.., M, D]`, as `[B.., N, M]`.
    /// Batch axes broadcast. `p` is positive, 0 (the number of coordinates that differ) or infinite (the largest
    /// difference). Floating dtypes only.
    ///
    /// Differences are computed directly, not expanded into products, so near points keep their digits. Nothing of size
    /// `N · M · D` is stored, except for infinite `p`. The gradient where two points coincide is 0.
    #[doc(alias = "pairwise_distance")]
    #[track_caller]
    fn cdist(&self, other: &Self, p: f64) -> Result<Self> {
        const OP: &str = "cdist";
        rule::same_dtype(OP, &[self.spec(), other.spec()])?;
        rule::float(OP, self.spec())?;
        let (a, b) = (self.spec().shape, other.spec().shape);
        if a.rank() < 2 || b.rank() < 2 || a.last() != b.last() || a.rank().max(b.rank()) >= crate::MAX_RANK {
            let why = "needs [B.., N, D] and [B.., M, D], with fewer than eight axes";
            return Err(Error::shape(OP, &[a, b], why));
        }
        if p.is_nan() || p < 0.0 {
            return Err(Error::range(OP, "p", p, "0, positive or infinite"));
        }
        let dtype = self.spec().dtype;
        widened(self, |x| distances(&x.unsqueeze(-2)?, &other.to_dtype(dtype.compute())?.unsqueeze(-3)?, p))
    }
    /// `self` divided by its Euclidean norm along `axis`, which counts as `1e-12` at least.
    #[track_caller]
    fn normalize(&self, axis: isize) -> Result<Self> {
        rule::float("normalize", self.spec())?;
        widened(self, |x| x.div(&x.norm_keepdim(&[axis])?.maximum(1e-12)?))
    }
    /// The cosine of the angle between `self` and `other` along `axis`, which is dropped. Norms count as `1e-8` at
    /// least, so it is 0 where one is 0.
    #[track_caller]
    fn cosine_similarity(&self, other: &Self, axis: isize) -> Result<Self> {
        const OP: &str = "cosine_similarity";
        let dtype = rule::same_dtype(OP, &[self.spec(), other.spec()])?;
        rule::float(OP, self.spec())?;
        widened(self, |x| {
            let y = other.to_dtype(dtype.compute())?;
            let unit = |x: &Self| x.div(&x.norm_keepdim(&[axis])?.maximum(1e-8)?);
            unit(x)?.mul(&unit(&y)?)?.sum(&[axis])
        })
    }
}

impl<T: Apply> DistanceOps for T {}

/// The `p`-norms of `a − b` along the last axis; the operands broadcast.
#[track_caller]
fn distances<T: Apply>(a: &T, b: &T, p: f64) -> Result<T> {
    static DIFFER: LazyLock<Program> =
        LazyLock::new(|| Program::new("cdist", |[a, b], []| [a.ne(b).select(1.0, 0.0).cast_like(a)]));
    static ONE: LazyLock<Program> = LazyLock::new(|| Program::new("cdist", |[a, b], []| [(a - b).abs()]));
    static TWO: LazyLock<Program> = LazyLock::new(|| Program::new("cdist", |[a, b], []| [(a - b) * (a - b)]));
    static POWER: LazyLock<Program> = LazyLock::new(|| {
        Program::new("cdist", |[a, b], [p]| {
            let d = (a - b).abs();
            let zero = d.eq(0.0);
            [zero.select(d, zero.select(1.0, d).pow(p))]
        })
    });
    static ROOT: LazyLock<Program> = LazyLock::new(|| {
        Program::new("cdist", |[s], [q]| {
            let zero = s.eq(0.0);
            [zero.select(s, zero.select(1.0, s).pow(q))]
        })
    });
    let full = Shape::broadcast_all("cdist", &[a.spec().shape, b.spec().shape])?;
    let to = full.with(full.rank() - 1, 1);
    let sum = |program: &Program, scalars: ScalarList| {
        T::apply1(Reduce::sum_of(program.clone(), scalars, to), &[a, b])?.squeeze(-1)
    };
    match p {
        0.0 => sum(&DIFFER, ScalarList::new()),
        1.0 => sum(&ONE, ScalarList::new()),
        2.0 => sum(&TWO, ScalarList::new())?.apply_program(&ROOT, &[], &[0.5.into()]),
        f64::INFINITY if full.numel() == 0 => a.sub(b)?.sum(&[-1]),
        f64::INFINITY => a.sub(b)?.abs()?.amax(&[-1]),
        p => {
            let powers = sum(&POWER, ScalarList::from_slice(&[p.into()]))?;
            powers.apply_program(&ROOT, &[], &[(1.0 / p).into()])
        }
    }
}
