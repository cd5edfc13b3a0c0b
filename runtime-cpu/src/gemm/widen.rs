//! Upcasts blocks of half-precision matrices into the workspace of a GEMM, so that no operand is converted as a whole.

use super::{matrix::Matrix, vector::Vectors};
use crate::{
    Simd,
    element::Stored,
    simd::{multiversion, transpose},
};

/// Rows and columns that are transposed at once: 16 KiB of `f32`.
const BLOCK: usize = 64;

/// Upcasts `rows × columns` elements of any strides to rows that are `to_row` elements apart.
///
/// # Safety
/// `from` is valid for reads of the elements, and `to` for writes of the rows, which no other thread accesses.
pub(super) unsafe fn widen<S: Stored<Lane: Vectors>>(
    simd: Simd,
    from: Matrix<*const S>,
    (rows, columns): (usize, usize),
    (to, to_row): (*mut S::Lane, usize),
) {
    let to = Matrix { at: to, row: to_row as isize, column: 1 };
    // SAFETY: the caller guarantees the elements of both.
    unsafe {
        match [from.row, from.column] {
            [_, 1] => widen_rows(simd, from, (rows, columns), to),
            [1, _] => widen_transposed(simd, from, (rows, columns), to),
            _ => {
                for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                    *to.offset(i, j).at = (*from.offset(i, j).at).load();
                }
            }
        }
    }
}

/// Upcasts rows of a matrix whose columns are contiguous, a block after another, which is transposed while it is in L1.
///
/// # Safety
/// As for [`widen`].
unsafe fn widen_transposed<S: Stored<Lane: Vectors>>(
    simd: Simd,
    from: Matrix<*const S>,
    (rows, columns): (usize, usize),
    to: Matrix<*mut S::Lane>,
) {
    let bytes = |elements: isize| elements * size_of::<S::Lane>() as isize;
    let mut block = [[S::Lane::default(); BLOCK]; BLOCK];
    let at = block.as_mut_ptr().cast::<S::Lane>();
    let upright = Matrix { at, row: BLOCK as isize, column: 1 };
    for i in (0..rows).step_by(BLOCK) {
        for j in (0..columns).step_by(BLOCK) {
            let (rows, columns) = (BLOCK.min(rows - i), BLOCK.min(columns - j));
            let to = to.offset(i, j);
            // SAFETY: the block is within both matrices, which the caller guarantees, and has room for its elements.
            unsafe {
                widen_rows(simd, from.offset(i, j).transposed(), (columns, rows), upright);
                let (to, from) = ((to.at.cast(), bytes(to.row)), (at.cast(), bytes(upright.row)));
                transpose::<S::Lane>(simd, to, from, (rows, columns));
            }
        }
    }
}

/// Upcasts rows of contiguous elements.
///
/// # Safety
/// As for [`widen`]; both have unit column stride.
unsafe fn widen_rows<S: Stored>(
    simd: Simd,
    from: Matrix<*const S>,
    (rows, columns): (usize, usize),
    to: Matrix<*mut S::Lane>,
) {
    multiversion! {
        fn upcast<S: (Stored)>(from: Matrix<*const S>, to: Matrix<*mut S::Lane>, rows: usize, columns: usize) {
            for i in 0..rows {
                // SAFETY: `widen_rows`, whose caller guarantees both rows, is this function's only caller.
                let (from, to) = unsafe {
                    let from = std::slice::from_raw_parts(from.offset(i, 0).at, columns);
                    (from, std::slice::from_raw_parts_mut(to.offset(i, 0).at, columns))
                };
                for (to, x) in to.iter_mut().zip(from) {
                    *to = x.load();
                }
            }
        }
    }
    upcast(simd, from, to, rows, columns);
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::gemm::{Epilogue, GemmSize, gemm};

    /// A matrix in memory of its own, and the same in `f32`.
    struct Pair<S> {
        narrow: Vec<S>,
        wide: Vec<f32>,
        start: usize,
        strides: [isize; 2],
    }

    impl<S: Stored<Lane = f32>> Pair<S> {
        /// Row-major, column-major, every second element of rows with a gap, columns backwards.
        fn all([rows, columns]: [usize; 2], seed: u64) -> [Pair<S>; 4] {
            let (r, c) = (rows as isize, columns as isize);
            let layouts = [(0, [c, 1]), (0, [1, r]), (1, [2 * c + 3, 2]), ((c - 1).max(0) * (r + 5), [1, -(r + 5)])];
            layouts.map(|(start, strides)| {
                let mut x = seed | 1;
                let mut next = || {
                    x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    S::store((x >> 40) as f32 / (1 << 23) as f32 - 1.0)
                };
                let narrow: Vec<S> = (0..4 * (rows + 5) * (columns + 5)).map(|_| next()).collect();
                let wide = narrow.iter().map(|x| x.load()).collect();
                Pair { narrow, wide, start: start as usize, strides }
            })
        }

        fn matrix<P>(&self, at: &[P]) -> Matrix<*const P> {
            let [row, column] = self.strides;
            Matrix { at: at[self.start..].as_ptr(), row, column }
        }
    }

    /// A product of half-precision operands has the bits of that of their values in `f32`, added to or not.
    fn check<S: Stored<Lane = f32>>(simd: Simd, [m, k, n]: [usize; 3]) {
        let size = GemmSize { m, k, n };
        for a in &Pair::<S>::all([m, k], 1) {
            for b in &Pair::<S>::all([k, n], 2) {
                for (add, strides) in [(false, [n as isize, 1]), (true, [1, m as isize]), (true, [2 * n as isize, 2])] {
                    let mut outs = [(); 2].map(|()| (0..2 * m * n).map(|i| i as f32).collect::<Vec<f32>>());
                    let [narrow, wide] = outs.each_mut().map(|out| {
                        let [row, column] = strides;
                        Matrix { at: out.as_mut_ptr(), row, column }
                    });
                    let epilogue = || Epilogue::accumulate(add);
                    // SAFETY: each matrix has memory of its own for these sizes.
                    unsafe {
                        gemm(simd, size, narrow, a.matrix(&a.narrow), b.matrix(&b.narrow), 1.0, epilogue());
                        gemm(simd, size, wide, a.matrix(&a.wide), b.matrix(&b.wide), 1.0, epilogue());
                    }
                    assert_eq!(outs[0], outs[1], "{simd:?} [{m}, {k}, {n}], {:?} by {:?}", a.strides, b.strides);
                }
            }
        }
    }

    #[test]
    fn products_have_the_bits_of_f32() {
        let sizes = [[1, 3, 1], [3, 70, 17], [5, 0, 7], [17, 65, 47], [70, 33, 5], [67, 513, 66], [130, 8, 100]];
        for simd in Simd::ALL.into_iter().filter(|simd| simd.is_available()) {
            for sizes in sizes {
                check::<bf16>(simd, sizes);
                check::<f16>(simd, sizes);
            }
        }
    }
}
