//! Products with all windows of an image, whose numbers are cut into pieces once: packing windows is then only copying. (Cut at every place
//! of a kernel, packing took longer than the products.)
//!
//! | windows are | an image in pieces has side by side | a line of a tile |
//! |---|---|---|
//! | columns | numbers of two channels | 16 windows at two steps |
//! | rows | numbers of a channel | 32 windows' places at one step |

use std::{arch::x86_64::*, cell::RefCell, ops::Range};

use numcore::Result;
use smallvec::SmallVec;

use super::{
    Level, SIDE, STEP, Tile, block,
    factor::{Left, Right},
    pack::{self, PAIR, Strip},
    pieces::Pieces,
};
use crate::{
    Buffer, Cpu,
    matmul::{Epilogue, Matrix, Unfolded},
    operand::Base,
};

/// Pieces of a number.
const P: usize = 3;
/// Tiles of a step of a strip or panel.
const STEP_TILES: usize = 2 * P;

thread_local! {
    /// An image in pieces, and where in it a step's line is; kept, so that a product allocates nothing.
    static IMAGE: RefCell<(Vec<Tile>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// The order of steps where windows are columns: places of a pair of channels, both channels of each. A channel without a partner is beside
/// one that is not there.
#[derive(Clone, Copy)]
struct Order {
    channels: usize,
    places: usize,
}

impl Order {
    /// Steps, those that are not there with them.
    fn depth(self) -> usize {
        self.channels.next_multiple_of(2) * self.places
    }

    /// Which step of windows step `k` is.
    fn step(self, k: usize) -> Option<usize> {
        let (pair, place) = (k / 2 / self.places, k / 2 % self.places);
        let channel = 2 * pair + k % 2;
        (channel < self.channels).then_some(channel * self.places + place)
    }

    /// Tiles of so many rows in strips.
    fn tiles(self, rows: usize) -> usize {
        rows.div_ceil(PAIR) * self.depth().div_ceil(STEP) * STEP_TILES
    }
}

/// Weights of windows in strips, packed once for all images.
pub(in super::super) struct Filters {
    order: Order,
    maps: usize,
    memory: Buffer,
}

impl Filters {
    /// Packs weights that lie in one line, for a processor with tiles.
    pub(in super::super) fn new(
        cpu: &Cpu,
        rows: Base<f32>,
        [groups, maps, channels, places]: [usize; 4],
    ) -> Result<Filters> {
        let order = Order { channels, places };
        let memory = cpu.scratch(groups * order.tiles(maps) * size_of::<Tile>())?;
        let to = Base::<Tile>::new(memory.ptr().cast());
        let (strips, line) = (maps.div_ceil(PAIR), channels * places);
        cpu.queue.engine.ranges(groups * strips, 1, |range| {
            for strip in range {
                let first = strip / strips * maps + strip % strips * PAIR;
                let rows = rows.at((first * line) as isize).cast_const();
                let rows = Matrix { at: rows, row: line as isize, column: 1 };
                let to = to.at((strip * order.tiles(PAIR)) as isize);
                // SAFETY: rows of the operand, and a strip of the memory just taken, which is this task's alone.
                unsafe { pack_strip(PAIR.min(maps - strip % strips * PAIR), rows, order, to) };
            }
        });
        Ok(Filters { order, maps, memory })
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
        let order = self.order;
        let tiles = self.memory.ptr().cast::<Tile>().cast_const().wrapping_add(group * order.tiles(self.maps));
        IMAGE.with_borrow_mut(|(memory, lines)| {
            // SAFETY: the caller's promise.
            let image = unsafe { cut::<2>(&windows, memory) };
            image.lines(&windows, lines);
            let left = Strips { tiles, rows, order };
            let right = Columns { image, lines, windows, order, first: 0 };
            let sizes = [self.maps, order.depth(), windows.columns.len()];
            // SAFETY: as above.
            unsafe { block::product_of(Level::Amx, sizes, out, left, right, epilogue) };
        });
    }
}

/// What windows are multiplied with, in strips.
#[derive(Clone, Copy)]
struct Strips {
    tiles: *const Tile,
    /// The numbers themselves.
    rows: Matrix<*const f32>,
    order: Order,
}

/// Packs a strip of `m` rows, at most 32.
///
/// # Safety
/// They lie in their operand, and are lines; `to` has room, and nothing else sees it. The processor has tiles.
unsafe fn pack_strip(m: usize, rows: Matrix<*const f32>, order: Order, to: *mut Tile) {
    let depth = order.depth();
    let mut numbers = vec![0.0; m * depth];
    for (i, line) in numbers.chunks_exact_mut(depth).enumerate() {
        // SAFETY: the caller's promise.
        let row = unsafe { std::slice::from_raw_parts(rows.part(i, 0).at, order.channels * order.places) };
        for (channel, places) in row.chunks_exact(order.places).enumerate() {
            let line = &mut line[channel / 2 * 2 * order.places + channel % 2..];
            line.iter_mut().step_by(2).zip(places).for_each(|(to, x)| *to = *x);
        }
    }
    let line = Matrix { at: numbers.as_ptr(), row: depth as isize, column: 1 };
    // SAFETY: these rows; the caller's promise.
    unsafe { pack::left::<f32, P>(line, m, depth, to) };
}

impl Left<f32, P> for Strips {
    fn part(self, i: usize, k: usize) -> Self {
        // Numbers are only asked for from the first step on.
        let tile = self.order.tiles(i) + k / STEP * STEP_TILES;
        Strips { tiles: self.tiles.wrapping_add(tile), rows: self.rows.part(i, 0), ..self }
    }

    fn in_place(&self, _: usize) -> Option<Strip> {
        Some(Strip::packed(self.tiles, P))
    }

    unsafe fn pack(self, _: usize, depth: usize, to: *mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(self.tiles, depth.div_ceil(STEP) * STEP_TILES) };
    }

    unsafe fn number(self, i: usize, k: usize) -> f32 {
        // SAFETY: the caller's promise.
        self.order.step(k).map_or(0.0, |k| unsafe { *self.rows.part(i, k).at })
    }
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
        let image = unsafe { cut::<1>(&windows, memory) };
        image.lines(&windows, lines);
        let left = Rows { image, lines, windows };
        let sizes = [windows.steps.len(), windows.columns.len(), n];
        // SAFETY: as above.
        unsafe { block::product_of(Level::Amx, sizes, out, left, b, epilogue) };
    });
}

/// An image in pieces: for every so many channels a plane of each piece, their numbers side by side.
#[derive(Clone, Copy)]
struct Image {
    /// Where a channel's first number would be.
    at: *const u16,
    /// From a piece to the next.
    plane: usize,
    together: usize,
}

impl Image {
    /// Where the places of windows are, in every group of channels.
    fn lines(&self, windows: &Unfolded<'_, f32>, to: &mut Vec<usize>) {
        to.clear();
        for group in 0..windows.channels().div_ceil(self.together) {
            let places = windows.steps[..windows.places].iter();
            to.extend(places.map(|place| group * P * self.plane + place * self.together));
        }
    }
}

/// The numbers of a channel that windows have.
fn reach(windows: &Unfolded<'_, f32>) -> Range<usize> {
    let places = windows.steps[..windows.places].iter();
    let ends = |x: &[usize]| [x.first(), x.last()].map(|x| x.copied().unwrap_or(0));
    let [first, last] = ends(windows.columns);
    let [low, high] = [places.clone().min(), places.max()].map(|x| x.copied().unwrap_or(0));
    first + low..last + high + 1
}

/// Cuts what windows reach of their image, `TOGETHER` channels side by side, of which the last ones may be missing.
///
/// # Safety
/// All windows lie in their operand; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn cut<const TOGETHER: usize>(windows: &Unfolded<'_, f32>, memory: &mut Vec<Tile>) -> Image {
    let (channels, reach) = (windows.channels(), reach(windows));
    // An odd number of cache lines: the same place of many planes does not lie in the same lines of the first cache.
    let lines = (reach.len().div_ceil(STEP) * TOGETHER) | 1;
    let plane = lines * STEP;
    let groups = channels.div_ceil(TOGETHER);
    // What is read of a line behind its last run is memory.
    let to = block::room(memory, (groups * P * lines).div_ceil(SIDE) + 1).cast::<__m512i>();
    for group in 0..groups {
        let to = to.wrapping_add(group * P * lines);
        for (i, from) in reach.clone().step_by(STEP).enumerate() {
            let count = STEP.min(reach.end - from);
            let read = |channel: usize| {
                if channel >= channels {
                    return [_mm512_setzero_si512(); P];
                }
                let at = windows.at.wrapping_add(channel * windows.plane + from);
                // SAFETY: the caller's promise: so many numbers are reached by windows.
                unsafe {
                    if count == STEP {
                        return f32::read(at);
                    }
                    let mut some = [0.0; STEP];
                    some[..count].copy_from_slice(std::slice::from_raw_parts(at, count));
                    f32::read(some.as_ptr())
                }
            };
            let first = read(group * TOGETHER);
            let second = if TOGETHER == 2 { read(group * TOGETHER + 1) } else { first };
            for (piece, (x, y)) in first.into_iter().zip(second).enumerate() {
                let to = to.wrapping_add(piece * lines + i * TOGETHER);
                // SAFETY: there is room for so many lines.
                unsafe {
                    match TOGETHER {
                        1 => *to = x,
                        _ => to.cast::<[__m512i; 2]>().write(pack::interleave(x, y)),
                    }
                }
            }
        }
    }
    Image { at: to.cast::<u16>().wrapping_sub(reach.start * TOGETHER), plane, together: TOGETHER }
}

/// Where a line of a tile lies in an image: runs of neighbours, the first of which begins the line. `R` further ones have the bf16 that a mask
/// names; what follows the last is anything.
#[derive(Clone, Copy)]
struct Line<const R: usize> {
    first: isize,
    others: [(u32, isize); R],
}

/// Where runs of neighbours begin.
fn runs(places: &[usize]) -> impl Iterator<Item = usize> {
    (0..places.len()).filter(|&i| i == 0 || places[i] != places[i - 1] + 1)
}

impl<const R: usize> Line<R> {
    /// Of numbers of `width` bf16, at most as many as a line has.
    fn of(places: &[usize], width: usize) -> Self {
        let mut line = Line { first: 0, others: [(0, 0); R] };
        for (run, i) in runs(places).enumerate() {
            let at = (places[i] as isize - i as isize) * width as isize;
            match run {
                0 => line = Line { first: at, others: [(0, at); R] },
                // Until the end: what the next run has is read again.
                _ => line.others[run - 1] = (u32::MAX << (i * width), at),
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
            let mut line = _mm512_loadu_si512(from.wrapping_offset(self.first).cast());
            for (mask, at) in self.others {
                line = _mm512_mask_loadu_epi16(line, mask, from.wrapping_offset(at).cast());
            }
            line
        }
    }
}

/// Calls a function with how many runs a line of so many numbers has at most, after the first: one of a few numbers.
macro_rules! with_runs {
    ($lines:expr, $self:ident.$function:ident($($argument:expr),*)) => {
        match $lines.map(|places| runs(places).count()).max() {
            None | Some(0..=1) => $self.$function::<0>($($argument),*),
            Some(2) => $self.$function::<1>($($argument),*),
            Some(3..=4) => $self.$function::<3>($($argument),*),
            _ => $self.$function::<{ STEP - 1 }>($($argument),*),
        }
    };
}

/// Windows as columns.
#[derive(Clone, Copy)]
struct Columns<'a> {
    image: Image,
    /// Of each pair of steps.
    lines: &'a [usize],
    windows: Unfolded<'a, f32>,
    order: Order,
    /// The step that is the first here.
    first: usize,
}

impl Columns<'_> {
    /// # Safety
    /// As for [`Right::pack`]; no line has more runs.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn copy<const R: usize>(self, depth: usize, columns: usize, to: *mut Tile) {
        let steps = depth.div_ceil(STEP);
        let lines = &self.lines[self.first / 2..][..depth / 2];
        let halves = self.windows.columns[..columns].chunks(SIDE).enumerate();
        let tile = |half: usize| half / 2 * steps * STEP_TILES + half % 2;
        let halves: SmallVec<[_; 32]> = halves.map(|(i, half)| (tile(i), Line::<R>::of(half, 2))).collect();
        // Pair of steps after pair: its places of an image stay in the first cache while columns pass.
        for k in 0..steps * SIDE {
            let to = to.wrapping_add(k / SIDE * STEP_TILES).cast::<__m512i>().wrapping_add(k % SIDE);
            let from = lines.get(k).map(|line| self.image.at.wrapping_add(*line));
            for (tile, half) in &halves {
                for piece in 0..P {
                    // SAFETY: the caller's promise; a tile is 16 lines.
                    unsafe {
                        *to.add((tile + 2 * piece) * SIDE) = match from {
                            Some(from) => half.read(from.wrapping_add(piece * self.image.plane)),
                            None => _mm512_setzero_si512(),
                        };
                    }
                }
            }
        }
    }
}

impl Right<f32, P> for Columns<'_> {
    fn part(self, k: usize, j: usize) -> Self {
        let windows = Unfolded { columns: &self.windows.columns[j..], ..self.windows };
        Columns { first: self.first + k, windows, ..self }
    }

    unsafe fn pack(self, depth: usize, columns: usize, to: *mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { with_runs!(self.windows.columns[..columns].chunks(SIDE), self.copy(depth, columns, to)) };
    }

    unsafe fn number(self, k: usize, j: usize) -> f32 {
        let windows = self.windows;
        let place = self.order.step(self.first + k).map(|k| windows.steps[k] + windows.columns[j]);
        // SAFETY: the caller's promise.
        place.map_or(0.0, |place| unsafe { *windows.at.wrapping_add(place) })
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
            let line = Line::<R>::of(columns, 1);
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

    unsafe fn pack(self, rows: usize, depth: usize, to: *mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { with_runs!(self.windows.columns[..depth].chunks(STEP), self.copy(rows, depth, to)) };
    }

    unsafe fn number(self, i: usize, k: usize) -> f32 {
        let Unfolded { at, steps, columns, .. } = self.windows;
        // SAFETY: the caller's promise.
        unsafe { *at.wrapping_add(steps[i] + columns[k]) }
    }
}
