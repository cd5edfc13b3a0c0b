//! A product on one thread: columns packed for the second cache, then strip after strip of rows against them.

use std::{
    arch::x86_64::{_MM_HINT_T1, _mm_prefetch},
    cell::RefCell,
    ops::Range,
};

use super::{
    Level, SIDE, STEP, Tile, amx, dot,
    pack::{self, PAIR},
    store,
};
use crate::matmul::{Epilogue, Matrix};

/// Bytes of packed columns: most of a second cache of 2 MiB.
const PACKED: usize = 5 << 18;
/// Steps of columns packed at once: longer sums wait in memory, in full precision, for the next part.
const DEEP: usize = 4096;
/// Tiles of a strip that stay in the first cache while columns pass.
const SHALLOW: usize = 20;
/// Bytes of rows that are kept packed while blocks of columns pass.
const KEPT: usize = 16 << 20;

thread_local! {
    /// Packed columns, packed strips, and sums; kept, so that a product allocates nothing.
    static ROOM: RefCell<[Vec<Tile>; 3]> = const { RefCell::new([const { Vec::new() }; 3]) };
}

/// `out = a · b`, with what the epilogue adds, for `a: [m, k]`, `b: [k, n]`.
///
/// # Safety
/// The matrices lie in their operands; the output overlaps none of them, and nothing else sees it meanwhile. The processor has the level.
pub(super) unsafe fn product(
    level: Level,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut u16>,
    a: Matrix<*const u16>,
    b: Matrix<*const u16>,
    epilogue: Epilogue<u16>,
) {
    // A row of the output is written by the register.
    let (sizes, out, a, b, epilogue) = match out.column != 1 && out.row == 1 {
        true => ([n, k, m], out.turned(), b.turned(), a.turned(), epilogue.turned()),
        false => ([m, k, n], out, a, b, epilogue),
    };
    ROOM.with_borrow_mut(|room| {
        // SAFETY: the caller's promise.
        let _registers = (level == Level::Amx).then(|| unsafe { amx::Registers::new() });
        // SAFETY: as above; these are the registers.
        unsafe { Block { level, out, a, b, epilogue }.run(sizes, room) }
    });
}

struct Block {
    level: Level,
    out: Matrix<*mut u16>,
    a: Matrix<*const u16>,
    b: Matrix<*const u16>,
    epilogue: Epilogue<u16>,
}

/// What a strip is multiplied with, and where its sums go.
#[derive(Clone, Copy)]
struct Task {
    packed: *const Tile,
    sums: *mut Tile,
    rows: usize,
    depth: usize,
    columns: usize,
    /// Sums of the steps before are there.
    more: bool,
}

impl Block {
    /// # Safety
    /// As for [`product`], by a thread that has the level's registers.
    unsafe fn run(&self, [m, k, n]: [usize; 3], [packed, strips, sums]: &mut [Vec<Tile>; 3]) {
        let steps = k.min(DEEP).div_ceil(STEP).max(1);
        let most = (PACKED / size_of::<Tile>() / 2 / steps).max(1) * PAIR;
        let columns = n.div_ceil(n.div_ceil(most)).next_multiple_of(PAIR);
        let panels = columns / PAIR;
        // Rows are packed once for all columns, where that is not too much.
        let kept = n > columns && k <= DEEP && m * k * size_of::<u16>() <= KEPT;
        let apart = |i: usize, each: usize, apart: bool| if apart { i / PAIR * each } else { 0 };
        let packed = room(packed, panels * steps * 2);
        let strips = room(strips, apart(m - 1, steps * 2, kept) + steps * 2);
        let sums = room(sums, apart(m - 1, panels * 4, k > DEEP) + panels * 4);
        for j in (0..n).step_by(columns) {
            let columns = columns.min(n - j);
            // A sum of nothing is still written.
            for from in (0..k.max(1)).step_by(DEEP) {
                let depth = DEEP.min(k - from);
                // SAFETY: the caller's promise; there is room for what is packed.
                unsafe {
                    pack::right(self.b.part(from, j), depth, columns, packed);
                    for i in (0..m).step_by(PAIR) {
                        let rows = PAIR.min(m - i);
                        let sums = sums.add(apart(i, panels * 4, k > DEEP));
                        let strip = strips.add(apart(i, steps * 2, kept));
                        let source = (!kept || j == 0).then(|| self.a.part(i, from));
                        let task = Task { packed, sums, rows, depth, columns, more: from > 0 };
                        self.strip(strip, source, task);
                        if from + depth == k {
                            store::rows(sums, self.out.part(i, j), rows, columns, self.epilogue.part(i, j));
                        }
                    }
                }
            }
        }
    }

    /// A strip of rows, packed first if there is a source, against all columns that are packed.
    ///
    /// # Safety
    /// As for [`Block::run`].
    unsafe fn strip(&self, strip: *mut Tile, source: Option<Matrix<*const u16>>, task: Task) {
        let Task { packed, sums, rows, depth, columns, more } = task;
        let multiply = match self.level {
            Level::Amx => amx::multiply,
            Level::Dot => dot::multiply,
        };
        let all = depth.div_ceil(STEP);
        let panels = columns.div_ceil(PAIR);
        if all == 0 {
            // SAFETY: so many sums there are.
            return unsafe { std::slice::from_raw_parts_mut(sums, panels * 4).fill(Tile::ZERO) };
        }
        let part = all.div_ceil(all.div_ceil(SHALLOW)) * STEP;
        for from in (0..depth).step_by(part) {
            let depth = part.min(depth - from);
            let (steps, first) = (depth.div_ceil(STEP), from / STEP);
            let strip = strip.wrapping_add(first * 2);
            // SAFETY: the caller's promise.
            unsafe {
                if let Some(a) = source {
                    pack::left(a.part(0, from), rows, depth, strip);
                }
                let rest = steps + first < all;
                let next = source.map(|a| if rest { a.part(0, from + depth) } else { a.part(PAIR, 0) });
                for panel in 0..panels {
                    if let Some(next) = next {
                        prefetch(next, steps * STEP * panel / panels..steps * STEP * (panel + 1) / panels);
                    }
                    let tiles = [rows, columns - panel * PAIR].map(|n| if n > SIDE { 2 } else { 1 });
                    let b = packed.add((panel * all + first) * 2);
                    multiply(strip, b, sums.add(panel * 4), steps, more || from > 0, tiles);
                }
            }
        }
    }
}

/// Asks for lines of a strip's next part: it is in the third cache at best, and the processor does not foresee so many rows.
fn prefetch(next: Matrix<*const u16>, lines: Range<usize>) {
    for line in lines {
        let at = match next.column {
            1 => next.part(line % PAIR, line / PAIR * STEP),
            _ => next.part(0, line),
        };
        // SAFETY: it reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.at.cast()) };
    }
}

/// At least so many tiles.
fn room(tiles: &mut Vec<Tile>, count: usize) -> *mut Tile {
    if tiles.len() < count {
        tiles.resize(count, Tile::ZERO);
    }
    tiles.as_mut_ptr()
}
