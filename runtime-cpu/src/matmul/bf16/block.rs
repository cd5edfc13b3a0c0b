//! A product on one thread: columns packed for the second cache, then strip after strip of rows against them.

use std::cell::RefCell;

use super::{
    Level, STEP, Tile, amx, dot,
    pack::{self, PAIR},
    store,
};
use crate::matmul::Matrix;

/// Bytes of packed columns: half of a second cache of 2 MiB.
const PACKED: usize = 1 << 20;
/// Steps of columns packed at once: longer sums wait in memory, in full precision, for the next part.
const DEEP: usize = 4096;
/// Steps of a strip that stay in the first cache while columns pass.
const SHALLOW: usize = 512;

thread_local! {
    /// Packed columns, a packed strip, and sums; kept, so that a product allocates nothing.
    static ROOM: RefCell<[Vec<Tile>; 3]> = const { RefCell::new([const { Vec::new() }; 3]) };
}

/// `out = a · b (+ out)` for `a: [m, k]`, `b: [k, n]`.
///
/// # Safety
/// The matrices lie in their operands; the output overlaps neither, and nothing else sees it meanwhile. The processor has the level.
pub(super) unsafe fn product(
    level: Level,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut u16>,
    a: Matrix<*const u16>,
    b: Matrix<*const u16>,
    add: bool,
) {
    // A row of the output is written by the register.
    let (sizes, out, a, b) = match out.column != 1 && out.row == 1 {
        true => ([n, k, m], out.turned(), b.turned(), a.turned()),
        false => ([m, k, n], out, a, b),
    };
    ROOM.with_borrow_mut(|room| {
        // SAFETY: the caller's promise.
        let _registers = (level == Level::Amx).then(|| unsafe { amx::Registers::new() });
        // SAFETY: as above; these are the registers.
        unsafe { Block { level, out, a, b, add }.run(sizes, room) }
    });
}

struct Block {
    level: Level,
    out: Matrix<*mut u16>,
    a: Matrix<*const u16>,
    b: Matrix<*const u16>,
    add: bool,
}

impl Block {
    /// # Safety
    /// As for [`product`], by a thread that has the level's registers.
    unsafe fn run(&self, [m, k, n]: [usize; 3], [packed, strip, sums]: &mut [Vec<Tile>; 3]) {
        let tiles = k.min(DEEP).div_ceil(STEP).max(1);
        let columns = (PACKED / size_of::<Tile>() / 2 / tiles).max(1) * PAIR;
        let columns = columns.min(n.next_multiple_of(PAIR));
        let panels = columns / PAIR;
        let packed = room(packed, panels * tiles * 2);
        let strip = room(strip, tiles.min(SHALLOW / STEP) * 2);
        let strips = if k > DEEP { m.div_ceil(PAIR) } else { 1 };
        let sums = room(sums, strips * panels * 4);
        for j in (0..n).step_by(columns) {
            let columns = columns.min(n - j);
            // A sum of nothing is still written.
            for from in (0..k.max(1)).step_by(DEEP) {
                let depth = DEEP.min(k - from);
                let last = from + depth == k;
                // SAFETY: the caller's promise; there is room for what is packed.
                unsafe {
                    pack::right(self.b.part(from, j), depth, columns, packed);
                    for i in (0..m).step_by(PAIR) {
                        let rows = PAIR.min(m - i);
                        let sums = sums.add(if strips > 1 { i / PAIR * panels * 4 } else { 0 });
                        self.strip(self.a.part(i, from), packed, (strip, sums), [rows, depth, columns], from > 0);
                        if last {
                            store::rows(sums, self.out.part(i, j), rows, columns, self.add);
                        }
                    }
                }
            }
        }
    }

    /// A strip of rows against all that is packed.
    ///
    /// # Safety
    /// As for [`Block::run`].
    unsafe fn strip(
        &self,
        a: Matrix<*const u16>,
        packed: *const Tile,
        (strip, sums): (*mut Tile, *mut Tile),
        [rows, depth, columns]: [usize; 3],
        more: bool,
    ) {
        let multiply = match self.level {
            Level::Amx => amx::multiply,
            Level::Dot => dot::multiply,
        };
        let all = depth.div_ceil(STEP);
        if all == 0 {
            let tiles = columns.div_ceil(PAIR) * 4;
            // SAFETY: so many sums there are.
            return unsafe { std::slice::from_raw_parts_mut(sums, tiles).fill(Tile::ZERO) };
        }
        for from in (0..depth).step_by(SHALLOW) {
            let depth = SHALLOW.min(depth - from);
            let (steps, first) = (depth.div_ceil(STEP), from / STEP);
            // SAFETY: the caller's promise.
            unsafe {
                pack::left(a.part(0, from), rows, depth, strip);
                for panel in 0..columns.div_ceil(PAIR) {
                    let tiles = [rows, columns - panel * PAIR].map(|n| if n > PAIR / 2 { 2 } else { 1 });
                    let b = packed.add((panel * all + first) * 2);
                    multiply(strip, b, sums.add(panel * 4), steps, more || from > 0, tiles);
                }
            }
        }
    }
}

/// At least so many tiles.
fn room(tiles: &mut Vec<Tile>, count: usize) -> *mut Tile {
    if tiles.len() < count {
        tiles.resize(count, Tile::ZERO);
    }
    tiles.as_mut_ptr()
}
