//! Products of all windows of an image, a row for each place of one: rows are copied from an [image](Image) in pieces. (Cut at every place of a
//! kernel, packing them took longer than the products.)

use std::{arch::x86_64::*, cell::RefCell};

use smallvec::SmallVec;

use super::{
    Level, STEP, Tile, Work, block,
    factor::Left,
    image::{self, Image, P},
    multiply::Strip,
    pack::PAIR,
    pairs::in_pairs,
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

/// Where a line of a tile lies in an image: runs of neighbours, the first of which begins the line. Further ones have the bf16 that a mask
/// names; what follows the last is zero.
struct Line {
    there: u32,
    first: isize,
    /// Never more than these, so that nothing is allocated.
    others: SmallVec<[(u32, isize); STEP - 1]>,
}

/// Where runs of neighbours begin.
fn runs(places: &[usize]) -> impl Iterator<Item = usize> {
    (0..places.len()).filter(|&i| i == 0 || places[i] != places[i - 1] + 1)
}

impl Line {
    /// Of at most 32 numbers.
    fn of(places: &[usize]) -> Self {
        let there = u32::MAX >> (STEP - places.len());
        // Until the end: what the next run has is read again.
        let mut runs = runs(places).map(|i| (there & u32::MAX << i, places[i] as isize - i as isize));
        let first = runs.next().map_or(0, |(_, at)| at);
        Line { there, first, others: runs.collect() }
    }

    /// # Safety
    /// The runs lie there, and a line's length behind where they begin is memory; the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn read(&self, from: *const u16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let mut line = _mm512_maskz_loadu_epi16(self.there, from.wrapping_offset(self.first).cast());
            for (mask, at) in &self.others {
                line = _mm512_mask_loadu_epi16(line, *mask, from.wrapping_offset(*at).cast());
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

/// A strip of windows that is packed, a row of a step's tiles after the other.
struct Packing<'a> {
    of: Rows<'a>,
    rows: usize,
    to: *mut Tile,
    line: Line,
    /// What is next, and how many there are.
    row: usize,
    step: usize,
    left: usize,
}

impl<'a> Packing<'a> {
    fn new(of: Rows<'a>, rows: usize, depth: usize, to: *mut Tile) -> Self {
        let columns = &of.windows.columns[..depth];
        let of = Rows { windows: Unfolded { columns, ..of.windows }, ..of };
        let line = Line { there: 0, first: 0, others: SmallVec::new() };
        Packing { of, rows, to, line, row: 0, step: 0, left: rows * depth.div_ceil(STEP) }
    }
}

impl Work for Packing<'_> {
    fn left(&self) -> usize {
        self.left
    }

    /// # Safety
    /// As for [`Work::advance`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn advance(&mut self) {
        let Rows { image, lines, windows } = self.of;
        if self.row == 0 {
            let columns = &windows.columns[self.step * STEP..];
            self.line = Line::of(&columns[..columns.len().min(STEP)]);
        }
        let to = self.to.wrapping_add(self.step * STEP_TILES).cast::<__m512i>().wrapping_add(self.row);
        for piece in 0..P {
            // SAFETY: whoever made this promised windows and room; two tiles are 32 lines.
            unsafe {
                let from = image.at.wrapping_add(lines[self.row] + piece * image.plane);
                *to.add(piece * PAIR) = in_pairs(self.line.read(from));
            }
        }
        self.row += 1;
        if self.row == self.rows {
            (self.row, self.step) = (0, self.step + 1);
        }
        self.left -= 1;
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
    unsafe fn pack(self, rows: usize, depth: usize, to: *mut Tile) -> impl Work {
        Packing::new(self, rows, depth, to)
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn number(self, i: usize, k: usize) -> f32 {
        let Unfolded { at, steps, columns, .. } = self.windows;
        // SAFETY: the caller's promise.
        unsafe { *at.wrapping_add(steps[i] + columns[k]) }
    }
}
