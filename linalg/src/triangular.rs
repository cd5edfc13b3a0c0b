//! Triangular systems.

use autograd::Var;
use faer::{MatMut, MatRef};
use numcore::{
    Error, Result, Runtime, Shape,
    ops::{Apply, Backprop, Bits, JoinOps, MatmulOps, PointwiseOps, Saves, ViewOps},
};

use crate::host::{Kernel, Real, apply, axes, square};

/// The triangle of a matrix that [`solve_triangular`] reads. By default the lower one, as it stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Triangle {
    /// True to read the upper triangle, false the lower one.
    pub upper: bool,
    /// True to take the diagonal as ones, whatever stands there.
    pub unit: bool,
    /// True to solve with the transposed triangle.
    pub transposed: bool,
}

impl Triangle {
    /// The lower triangle, as [`cholesky`](crate::cholesky) returns it.
    pub const LOWER: Triangle = Triangle { upper: false, unit: false, transposed: false };
    /// The upper triangle, as [`qr`](crate::qr) returns it.
    pub const UPPER: Triangle = Triangle { upper: true, ..Triangle::LOWER };

    /// The transposed triangle.
    pub const fn transposed(self) -> Triangle {
        Triangle { transposed: !self.transposed, ..self }
    }
}

/// The solution `X` of `A X = B`, where `A` is triangular: `a: [.., N, N]`, `b: [.., N, K]`, `X: [.., N, K]`. The axes
/// before the last two broadcast. Elements outside of the triangle are not read, and have no gradient.
///
/// # Errors
/// Fails if shapes do not fit, or if an element of the diagonal is 0.
#[doc(alias("trsm", "triangular_solve"))]
#[track_caller]
pub fn solve_triangular<R: Runtime>(a: &Var<R>, b: &Var<R>, triangle: Triangle) -> Result<Var<R>> {
    let [a, b] = systems(Triangle::NAME, a, b)?;
    let [out] = apply(triangle, &[&a, &b])?;
    Ok(out)
}

/// The matrices and right sides of linear systems, in batches of one shape.
#[track_caller]
pub(crate) fn systems<R: Runtime>(op: &'static str, a: &Var<R>, b: &Var<R>) -> Result<[Var<R>; 2]> {
    let (of_a, of_b) = (a.spec().shape, b.spec().shape);
    let n = square(op, &of_a)?;
    let ((left, _), (right, [rows, k])) = (axes(op, &of_a)?, axes(op, &of_b)?);
    let batch = Shape::new(&left)?.broadcast(&Shape::new(&right)?).filter(|_| rows == n);
    let Some(batch) = batch else {
        let why = "the right sides do not fit the matrices: [.., N, N] and [.., N, K], whose first axes broadcast";
        return Err(Error::shape(op, &[of_a, of_b], why));
    };
    if a.spec().dtype != b.spec().dtype {
        return Err(Error::dtype(op, &[a.spec().dtype, b.spec().dtype], "the matrices and right sides differ"));
    }
    let broadcast = |x: &Var<R>, size: [usize; 2]| x.broadcast_to([&batch[..], &size].concat());
    Ok([broadcast(a, [n, n])?, broadcast(b, [n, k])?])
}

impl Kernel for Triangle {
    const NAME: &'static str = "solve_triangular";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        vec![ins[1].to_vec()]
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        let (a, x) = (ins[0], &mut outs[0]);
        if let Some(i) = (0..a.nrows()).find(|i| !self.unit && a[(*i, *i)] == T::default()) {
            return Err(format!("is singular: element {i} of its diagonal is 0"));
        }
        x.copy_from(ins[1]);
        let a = if self.transposed { a.transpose() } else { a };
        match (self.upper != self.transposed, self.unit) {
            (false, false) => a.solve_lower_triangular_in_place(x.as_mut()),
            (false, true) => a.solve_unit_lower_triangular_in_place(x.as_mut()),
            (true, false) => a.solve_upper_triangular_in_place(x.as_mut()),
            (true, true) => a.solve_unit_upper_triangular_in_place(x.as_mut()),
        }
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::of(&[0]), outputs: Bits::of(&[0]) }
    }

    // With `B̄ = A⁻ᵀ X̄`: `Ā = −B̄ Xᵀ`, of the triangle alone.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (g, a) = (cx.grad()?, cx.input(0)?);
        let of_b = solve_triangular(&a, &g, self.transposed())?;
        if cx.wants(0) {
            let x = cx.output(0)?;
            let of_a = if self.transposed { x.matmul(&of_b.t()?)? } else { of_b.matmul(&x.t()?)? }.neg()?;
            let inside = isize::from(self.unit);
            let of_a = if self.upper { of_a.triu(inside)? } else { of_a.tril(-inside)? };
            cx.give_value(0, &of_a)?;
        }
        cx.give_value(1, &of_b)
    }
}
