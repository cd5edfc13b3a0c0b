//! Products of weights and all windows of an image, a column each, which nothing packs: in an [image](super::image) of pieces that has two
//! channels' numbers side by side, 16 neighbours are a line of a tile, and 16 pairs of channels are a tile. (Copied into panels, windows took
//! as long as their products.)
//!
//! What lies between the windows of two lines of the output is computed and not stored.

use std::{cell::RefCell, ops::Range};

use numcore::Result;
use smallvec::SmallVec;

use super::{
    SIDE, STEP, Tile, Work,
    amx::Registers,
    block::SUMS,
    image::{self, Image, P},
    multiply::{Neighbours, Passing, Strip, multiply},
    pack::{PAIR, Packing},
    pieces,
    store::{self, Store},
};
use crate::{
    Buffer, Cpu,
    matmul::{Epilogue, Matrix, Unfolded},
    operand::Base,
};

/// Tiles of a step of a strip.
const STEP_TILES: usize = 2 * P;
/// Steps after which a sum begins anew: long ones stay precise.
const LONG: usize = 32;
/// Bytes of strips that pass over an image together, and stay in the second cache meanwhile.
const PACKED: usize = 1 << 19;

thread_local! {
    /// An image in pieces, and where in it a step's tile begins; kept, so that a product allocates nothing.
    static IMAGE: RefCell<(Vec<Tile>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
    /// Rows of weights, place by place; kept, too.
    static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Weights of windows in strips, packed once for all images. A step is a place in 32 channels, of which the last may be missing.
pub(in super::super) struct Filters {
    maps: usize,
    steps: usize,
    memory: Buffer,
}

impl Filters {
    /// Packs weights that lie in one line, for a processor with tiles.
    pub(in super::super) fn new(cpu: &Cpu, rows: Base<f32>, sizes: [usize; 4]) -> Result<Filters> {
        let [groups, maps, channels, places] = sizes;
        let steps = channels.div_ceil(STEP) * places;
        let (strips, line) = (maps.div_ceil(PAIR), channels * places);
        let memory = cpu.scratch(groups * strips * steps * STEP_TILES * size_of::<Tile>())?;
        let to = Base::<Tile>::new(memory.ptr().cast());
        cpu.queue.engine.ranges(groups * strips, 1, |range| {
            ROWS.with_borrow_mut(|numbers| {
                for strip in range {
                    let (group, first) = (strip / strips, strip % strips * PAIR);
                    let some = PAIR.min(maps - first);
                    numbers.clear();
                    numbers.resize(some * steps * STEP, 0.0);
                    for (i, to) in numbers.chunks_exact_mut(steps * STEP).enumerate() {
                        // SAFETY: a row of the operand.
                        let row = unsafe { rows.slice(((group * maps + first + i) * line) as isize, line) };
                        by_place(row, places, to);
                    }
                    let rows = Matrix { at: numbers.as_ptr(), row: (steps * STEP) as isize, column: 1 };
                    let to = to.at((strip * steps * STEP_TILES) as isize);
                    // SAFETY: the rows of the lines before, and a strip of the memory just taken, which is this task's alone.
                    unsafe { Packing::left(rows, some, steps * STEP, to).finish() };
                }
            });
        });
        Ok(Filters { maps, steps, memory })
    }

    /// `out = rows · windows`, with what the epilogue adds, for a group's rows.
    ///
    /// # Safety
    /// As for [`product_unfolded`](crate::matmul::unfolded::product_unfolded); these rows were packed.
    pub(in super::super) unsafe fn times(
        &self,
        group: usize,
        out: Matrix<*mut f32>,
        rows: Matrix<*const f32>,
        windows: Unfolded<'_, f32>,
        epilogue: Epilogue<f32>,
    ) {
        let strip = self.steps * STEP_TILES;
        let strips = self.maps.div_ceil(PAIR);
        let tiles = self.memory.ptr().cast::<Tile>().cast_const().wrapping_add(group * strips * strip);
        let together = (PACKED / size_of::<Tile>() / strip).max(1);
        IMAGE.with_borrow_mut(|(memory, steps)| {
            let blocks = windows.channels().div_ceil(STEP);
            // SAFETY: the caller's promise.
            let (image, _registers) = unsafe { (image::cut::<2>(&windows, blocks * SIDE, memory), Registers::new()) };
            places(image, &windows, steps);
            let store = Store::new(out, epilogue);
            let [mut sums, mut part] = [[Tile::ZERO; SUMS]; 2];
            for first in (0..strips).step_by(together) {
                panels(windows.columns, |column, runs| {
                    for i in first..strips.min(first + together) {
                        let some = PAIR.min(self.maps - i * PAIR);
                        let (strip, rows) = (tiles.wrapping_add(i * strip), rows.part(i * PAIR, 0));
                        let panel = Image { at: image.at.wrapping_add(2 * column), ..image };
                        // SAFETY: the caller's promise; this thread has the registers. A panel's numbers lie in the image or behind it.
                        unsafe {
                            for (i, steps) in steps.chunks(LONG).enumerate() {
                                let strip = strip.wrapping_add(i * LONG * STEP_TILES);
                                let to = if i == 0 { &mut sums } else { &mut part }.as_mut_ptr();
                                let factors = (Passing(Strip::packed(strip, P)), Neighbours { image: panel, steps });
                                multiply::<_, _, P>(factors, to, steps.len(), false, || {});
                                let sums = sums.as_mut_ptr();
                                for row in 0..if i > 0 { some } else { 0 } {
                                    store::keep(sums, row, store::add(sums, row, store::load(to, row)));
                                }
                            }
                            for (lanes, j) in runs {
                                let origin = j.wrapping_sub(lanes.start);
                                let mut line = store.line([i * PAIR, origin], lanes.clone());
                                for row in 0..some {
                                    let weights = rows.part(row, 0);
                                    let again = |lane: usize| {
                                        let column = windows.columns[origin.wrapping_add(lane)];
                                        let number = |k: usize| *windows.at.wrapping_add(windows.steps[k] + column);
                                        pieces::again(|k| *weights.part(0, k).at, number, windows.steps.len())
                                    };
                                    let sums = store::load(sums.as_ptr(), row);
                                    match line.not_finite::<P>(sums) {
                                        0 => line.put(sums),
                                        _ => line.put_anew(sums, again),
                                    }
                                }
                            }
                        }
                    }
                });
            }
        });
    }
}

/// `[channels / 32, places, 32]` from `[channels, places]`; what is missing stays.
fn by_place(row: &[f32], places: usize, to: &mut [f32]) {
    for (channel, row) in row.chunks_exact(places).enumerate() {
        let to = &mut to[channel / STEP * places * STEP + channel % STEP..];
        to.iter_mut().step_by(STEP).zip(row).for_each(|(to, x)| *to = *x);
    }
}

/// How many bytes behind a column the tile of each step begins.
fn places(image: Image, windows: &Unfolded<'_, f32>, to: &mut Vec<usize>) {
    to.clear();
    for block in 0..windows.channels().div_ceil(STEP) {
        let places = windows.steps[..windows.places].iter();
        to.extend(places.map(|place| (block * SIDE * image.group + 2 * place) * size_of::<u16>()));
    }
}

/// Calls `body` with where panels of 32 neighbours begin, and which of them are columns, from which one on.
fn panels(columns: &[usize], mut body: impl FnMut(usize, &[(Range<usize>, usize)])) {
    let mut j = 0;
    while j < columns.len() {
        let first = columns[j];
        let mut runs: SmallVec<[(Range<usize>, usize); 8]> = SmallVec::new();
        while let Some(lane) = columns.get(j).map(|column| column - first).filter(|lane| *lane < PAIR) {
            match runs.last_mut() {
                Some((lanes, _)) if lanes.end == lane => lanes.end += 1,
                _ => runs.push((lane..lane + 1, j)),
            }
            j += 1;
        }
        body(first, &runs);
    }
}
