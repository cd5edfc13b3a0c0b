//! A convolution's products of windows: by tiles where those take them, otherwise by the kernels of every other product.

#[cfg(target_arch = "x86_64")]
use std::any::TypeId;

use numcore::Result;

use super::{Epilogue, Left, Matrix, Registers, Unfolded, product_of, unfolded::product_unfolded};
use crate::{Cpu, Simd, operand::Base};

/// Weights of windows: `[groups, maps, channels · places]`, and packed where tiles take them.
pub(crate) struct Filters<T> {
    rows: Base<T>,
    maps: usize,
    steps: usize,
    #[cfg(target_arch = "x86_64")]
    packed: Option<super::tiles::Filters>,
}

impl<T: Registers> Filters<T> {
    /// Packs weights that lie in one line, for windows of images with so many channels and windows as columns.
    pub(crate) fn new(cpu: &Cpu, rows: Base<T>, sizes: [usize; 4], columns: &[usize]) -> Result<Self> {
        #[cfg(target_arch = "x86_64")]
        let packed = match by_tiles::<T>(cpu.queue.engine.simd) && super::tiles::takes_filters(sizes, columns) {
            true => Some(super::tiles::Filters::new(cpu, Base::new(rows.at(0).cast()), sizes)?),
            false => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (cpu, columns);
        let [_, maps, channels, places] = sizes;
        Ok(Filters {
            rows,
            maps,
            steps: channels * places,
            #[cfg(target_arch = "x86_64")]
            packed,
        })
    }

    /// `out = weights · windows`, with what the epilogue adds, for a group's maps.
    ///
    /// # Safety
    /// As for [`product_unfolded`]; weights lie in their operand, which nothing writes meanwhile.
    pub(crate) unsafe fn times(
        &self,
        simd: Simd,
        group: usize,
        out: Matrix<*mut T>,
        windows: Unfolded<'_, T>,
        epilogue: Epilogue<T>,
    ) {
        let at = self.rows.at((group * self.maps * self.steps) as isize).cast_const();
        let rows = Matrix { at, row: self.steps as isize, column: 1 };
        // SAFETY: the caller's promise; only `f32` are packed.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if let Some(packed) = &self.packed {
                return packed.times(group, out.cast(), rows.cast(), windows.cast(), epilogue.cast());
            }
            product_unfolded(simd, self.maps, out, rows, windows, epilogue);
        }
    }
}

/// `out = windows · b`, with what the epilogue adds, for `n` columns: a row of the output for each step of a window.
///
/// # Safety
/// As for [`product_of`]; all windows lie in their operand.
pub(crate) unsafe fn windows_times<T: Registers>(
    simd: Simd,
    n: usize,
    out: Matrix<*mut T>,
    windows: Unfolded<'_, T>,
    b: Matrix<*const T>,
    epilogue: Epilogue<T>,
) {
    let Unfolded { at, steps, columns, .. } = windows;
    let sizes = [steps.len(), columns.len(), n];
    // SAFETY: the caller's promise; only `f32` are computed by tiles.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if by_tiles::<T>(simd) && super::tiles::takes_windows(sizes) {
            return super::tiles::windows_times(n, out.cast(), windows.cast(), b.cast(), epilogue.cast());
        }
        product_of(simd, sizes, out, Left::Gathered { at, rows: steps, steps: columns }, b, T::ONE, epilogue);
    }
}

/// Whether there are tiles for numbers of this type.
#[cfg(target_arch = "x86_64")]
fn by_tiles<T: 'static>(simd: Simd) -> bool {
    TypeId::of::<T>() == TypeId::of::<f32>() && simd == Simd::Amx
}
