//! Products of matrices as a column-major library computes them, in `f64`, rounded once.

use runtime_cuda::driver::{CublasGemm, Epilogue, GemmOperand, GemmPlaces};

/// An element of a matrix, which converts to and from `f64`.
pub(crate) trait Exact: Copy {
    fn exact(self) -> f64;
    fn rounded(x: f64) -> Self;
}

macro_rules! exact {
    ($($element:ty: $to:expr, $from:expr;)*) => {$(
        impl Exact for $element {
            fn exact(self) -> f64 { $to(self) }
            fn rounded(x: f64) -> Self { $from(x) }
        }
    )*};
}
exact! {
    f64: |x| x, |x| x;
    f32: f64::from, |x| x as f32;
    half::f16: half::f16::to_f64, |x| half::f16::from_f32(x as f32);
    half::bf16: half::bf16::to_f64, |x| half::bf16::from_f32(x as f32);
}

/// The elements of lines of a matrix, one line after another.
fn lines(count: usize, length: usize, element: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..count * length).map(|at| element(at / length, at % length)).collect()
}

/// Computes a GEMM by a plain loop.
///
/// # Safety
/// The conditions of [`Driver::gemm`](runtime_cuda::driver::Driver::gemm).
pub(crate) unsafe fn product<T: Exact, D: Exact>(gemm: &CublasGemm, at: GemmPlaces) {
    let (a, b) = (at.a as *const T, at.b as *const T);
    let (d, c, vector) = (at.d as *mut D, at.c as *const D, at.vector as *mut D);
    let place = |side: &GemmOperand, batch: usize, row: usize, column: usize| {
        let (row, column) = if side.transposed { (column, row) } else { (row, column) };
        batch as isize * side.batch + (column * side.leading + row) as isize
    };
    for batch in 0..gemm.batch {
        // SAFETY: the caller's promise.
        let rows = lines(gemm.m, gemm.k, |i, l| unsafe { (*a.offset(place(&gemm.a, batch, i, l))).exact() });
        // SAFETY: as above.
        let columns = lines(gemm.n, gemm.k, |j, l| unsafe { (*b.offset(place(&gemm.b, batch, l, j))).exact() });
        for j in 0..gemm.n {
            for i in 0..gemm.m {
                let (row, column) = (&rows[i * gemm.k..][..gemm.k], &columns[j * gemm.k..][..gemm.k]);
                // SAFETY: the caller's promise.
                unsafe {
                    let to = d.offset(place(&gemm.d, batch, i, j));
                    let mut sum = if gemm.add { (*to).exact() } else { 0.0 };
                    if let Some(side) = &gemm.c {
                        sum += (*c.offset(place(side, batch, i, j))).exact();
                    }
                    if gemm.epilogue == Epilogue::Bias {
                        sum += (*vector.add(i)).exact();
                    }
                    // Of all loops, this one is fast where nothing is optimised.
                    let mut l = 0;
                    while l < gemm.k {
                        sum += row[l] * column[l];
                        l += 1;
                    }
                    *to = D::rounded(sum);
                }
            }
        }
    }
    // Sums are of the only matrix, and in ascending order.
    let (length, one): (usize, &dyn Fn(usize, usize) -> f64) = match gemm.epilogue {
        // SAFETY: the caller's promise.
        Epilogue::SumOfA => (gemm.m, &|i, l| unsafe { (*a.offset(place(&gemm.a, 0, i, l))).exact() }),
        // SAFETY: as above.
        Epilogue::SumOfB => (gemm.n, &|j, l| unsafe { (*b.offset(place(&gemm.b, 0, l, j))).exact() }),
        Epilogue::Nothing | Epilogue::Bias => return,
    };
    for i in 0..length {
        // SAFETY: as above: the vector has this many elements.
        unsafe { *vector.add(i) = D::rounded((0..gemm.k).map(|l| one(i, l)).sum()) };
    }
}
