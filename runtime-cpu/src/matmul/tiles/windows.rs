//! Products of all windows of an image, a row for each place of one: rows are copied from an [image](Image) in pieces. (Cut at every place of a
//! kernel, packing them took longer than the products.)

use std::{arch::x86_64::*, cell::RefCell};

use super::{
    Level, STEP, Tile, block,
    factor::Left,
    image::{self, Image, P},
    pack::{PAIR, Strip},
};
use crate::matmul::{Epilogue, Matrix, Unfolded};

/// Tiles of a step of a strip.
const STEP_TILES: usize = 2 * P;

thread_local! {
    /// An image in pieces, and where in it a row's places begin; kept, so that a product allocates nothing.
    static IMAGE: RefCell<(Vec<Tile>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// `out = windows · b`, with what the epilogue adds, for `n` columns: a row of the output for each step of windows.
///
/// # Safety
/// As for [`product_of`](crate::matmul::product_of), and all windows lie in their operand; the processor has tiles.
pub(in super::super) unsafe fn windows_times(
    n: usize,
    out: Matrix<*mut f32>,
    windows: Unfolded<'_, f32>,
    b: Matrix<*const f32>,
    epilogue: Epilogue<f32>,
) {
    IMAGE.with_borrow_mut(|(memory, lines)| {
        // SAFETY: the caller's promise.
        let image = unsafe { image::cut::<1>(&windows, windows.channels(), memory) };
        let places = &windows.steps[..windows.places];
        lines.clear();
        (0..windows.channels()).for_each(|c| lines.extend(places.iter().map(|place| c * image.group + place)));
        let left = Rows { image, lines, windows };
        let sizes = [windows.steps.len(), windows.columns.len(), n];
        // SAFETY: as above.
        unsafe { block::product_of(Level::Amx, sizes, out, left, b, epilogue) };
    });
}

/// Where a line of a tile lies in an image: runs of neighbours, the first of which begins the line. `R` further ones have the bf16 that a mask
/// names; what follows the last is zero.
#[derive(Clone, Copy)]
struct Line<const R: usize> {
    there: u32,
    first: isize,
    others: [(u32, isize); R],
}

/// Where runs of neighbours begin.
fn runs(places: &[usize]) -> impl Iterator<Item = usize> {
    (0..places.len()).filter(|&i| i == 0 || places[i] != places[i - 1] + 1)
}

impl<const R: usize> Line<R> {
    /// Of at most 32 numbers.
    fn of(places: &[usize]) -> Self {
        let there = u32::MAX >> (STEP - places.len());
        let mut line = Line { there, first: 0, others: [(0, 0); R] };
        for (run, i) in runs(places).enumerate() {
            let at = places[i] as isize - i as isize;
            match run {
                0 => line = Line { first: at, others: [(0, at); R], ..line },
                // Until the end: what the next run has is read again.
                _ => line.others[run - 1] = (there & u32::MAX << i, at),
            }
        }
        line
    }

    /// # Safety
    /// The runs lie there, and a line's length behind where they begin is memory; the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(&self, from: *const u16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let mut line = _mm512_maskz_loadu_epi16(self.there, from.wrapping_offset(self.first).cast());
            for (mask, at) in self.others {
                line = _mm512_mask_loadu_epi16(line, mask, from.wrapping_offset(at).cast());
            }
            line
        }
    }
}

/// Windows as rows.
#[derive(Clone, Copy)]
struct Rows<'a> {
    image: Image,
    /// Of each row.
    lines: &'a [usize],
    windows: Unfolded<'a, f32>,
}

impl Rows<'_> {
    /// # Safety
    /// As for [`Left::pack`]; no line has more runs.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn copy<const R: usize>(self, rows: usize, depth: usize, to: *mut Tile) {
        for (step, columns) in self.windows.columns[..depth].chunks(STEP).enumerate() {
            let line = Line::<R>::of(columns);
            let to = to.wrapping_add(step * STEP_TILES).cast::<__m512i>();
            for (i, at) in self.lines[..rows].iter().enumerate() {
                for piece in 0..P {
                    // SAFETY: the caller's promise; two tiles are 32 lines.
                    unsafe {
                        let from = self.image.at.wrapping_add(at + piece * self.image.plane);
                        *to.add(i + piece * PAIR) = line.read(from);
                    }
                }
            }
        }
    }
}

impl Left<f32, P> for Rows<'_> {
    fn part(self, i: usize, k: usize) -> Self {
        let Unfolded { steps, columns, .. } = self.windows;
        let windows = Unfolded { steps: &steps[i..], columns: &columns[k..], ..self.windows };
        Rows { lines: &self.lines[i..], windows, ..self }
    }

    fn in_place(&self, _: usize) -> Option<Strip> {
        None
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn pack(self, rows: usize, depth: usize, to: *mut Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.windows.columns[..depth].chunks(STEP).map(|places| runs(places).count()).max() {
                None | Some(0..=1) => self.copy::<0>(rows, depth, to),
                Some(2) => self.copy::<1>(rows, depth, to),
                Some(3..=4) => self.copy::<3>(rows, depth, to),
                _ => self.copy::<{ STEP - 1 }>(rows, depth, to),
            }
        };
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn number(self, i: usize, k: usize) -> f32 {
        let Unfolded { at, steps, columns, .. } = self.windows;
        // SAFETY: the caller's promise.
        unsafe { *at.wrapping_add(steps[i] + columns[k]) }
    }
}
