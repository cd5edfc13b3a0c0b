//! Convolution as implicit GEMM: weights times an im2col view, and an im2col view times a matrix. AMX computes both
//! where that pays, otherwise the macro-kernel of every other GEMM.

#[cfg(target_arch = "x86_64")]
use std::any::TypeId;

use numcore::Result;

use super::{AOperand, Epilogue, GemmSize, Im2col, Matrix, Vectors, gemm_operand, im2col::gemm_im2col};
use crate::{Cpu, Simd, operand::Base};

/// Sizes of a convolution's weights, `[groups, out_channels, channels · taps]`.
#[derive(Clone, Copy)]
pub(crate) struct ConvSize {
    pub groups: usize,
    /// Output channels of a group.
    pub out_channels: usize,
    /// Input channels of a group.
    pub channels: usize,
    /// Taps of the kernel in one channel.
    pub taps: usize,
}

/// A convolution's weights, `[groups, out_channels, channels · taps]`. They are packed where AMX computes the
/// convolution.
pub(crate) struct ConvWeights<T> {
    rows: Base<T>,
    out_channels: usize,
    k: usize,
    #[cfg(target_arch = "x86_64")]
    packed: Option<super::amx::TileWeights>,
}

impl<T: Vectors> ConvWeights<T> {
    /// Packs contiguous weights, if AMX takes a convolution of this size whose im2col view has these column offsets.
    pub(crate) fn new(cpu: &Cpu, rows: Base<T>, size: ConvSize, columns: &[usize]) -> Result<Self> {
        #[cfg(target_arch = "x86_64")]
        let packed = match uses_amx::<T>(cpu.queue.engine.simd) && super::amx::takes_weights(size, columns) {
            true => Some(super::amx::TileWeights::new(cpu, Base::new(rows.at(0).cast()), size)?),
            false => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (cpu, columns);
        Ok(ConvWeights {
            rows,
            out_channels: size.out_channels,
            k: size.channels * size.taps,
            #[cfg(target_arch = "x86_64")]
            packed,
        })
    }

    /// Computes `out = weights · image` with the epilogue, for the output channels of one group.
    ///
    /// # Safety
    /// As for [`gemm_im2col`]: `out`, the im2col view and the epilogue's matrices are valid, and no other thread
    /// accesses `out`. No other thread writes the weights.
    pub(crate) unsafe fn gemm(
        &self,
        simd: Simd,
        group: usize,
        out: Matrix<*mut T>,
        image: Im2col<'_, T>,
        epilogue: Epilogue<T>,
    ) {
        let at = self.rows.at((group * self.out_channels * self.k) as isize).cast_const();
        let rows = Matrix { at, row: self.k as isize, column: 1 };
        // SAFETY: the caller guarantees a valid view and an output of its own. `packed` exists for `f32` alone, so the
        // casts change no type.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if let Some(packed) = &self.packed {
                return packed.gemm(group, out.cast(), rows.cast(), image.cast(), epilogue.cast());
            }
            gemm_im2col(simd, self.out_channels, out, rows, image, epilogue);
        }
    }
}

/// Computes `out = image · b` with the epilogue, for an im2col view as the A operand and `n` columns of `b`.
///
/// # Safety
/// As for [`gemm_operand`]: `out`, `b`, the im2col view and the epilogue's matrices are valid, and no other thread
/// accesses `out`.
pub(crate) unsafe fn gemm_im2col_lhs<T: Vectors>(
    simd: Simd,
    n: usize,
    out: Matrix<*mut T>,
    image: Im2col<'_, T>,
    b: Matrix<*const T>,
    epilogue: Epilogue<T>,
) {
    let Im2col { at, rows, columns, .. } = image;
    let size = GemmSize { m: rows.len(), k: columns.len(), n };
    // SAFETY: the caller guarantees a valid view and an output of its own. AMX computes `f32` alone, so the casts
    // change no type.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if uses_amx::<T>(simd) && super::amx::takes_im2col_lhs(size) {
            return super::amx::gemm_im2col_lhs(n, out.cast(), image.cast(), b.cast(), epilogue.cast());
        }
        gemm_operand(simd, size, out, AOperand::Gathered { at, rows, columns }, b, T::ONE, epilogue);
    }
}

/// Tells whether AMX computes convolutions of this element type.
#[cfg(target_arch = "x86_64")]
fn uses_amx<T: 'static>(simd: Simd) -> bool {
    TypeId::of::<T>() == TypeId::of::<f32>() && simd == Simd::Amx
}
