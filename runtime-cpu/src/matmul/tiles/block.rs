//! A product on one thread: columns packed for the second cache, then strip after strip of rows against them.
//!
//! Rows that lie as the tiles want them are read where they are, the others packed; a block of the output is rounded while its sums lie in
//! the first cache. Nothing is asked for ahead: the processor foresees these accesses, and asking cost 2 to 10 % wherever it was tried.

use std::{cell::RefCell, marker::PhantomData};

use super::{
    Beside, Level, SIDE, STEP, Tile, Work, amx, dot,
    factor::{Left, Right},
    pack::{PAIR, Strip},
    pieces::{self, Pieces},
    store,
};
use crate::matmul::{Epilogue, Matrix};

/// Bytes of packed columns: most of a second cache of 2 MiB.
const PACKED: usize = 5 << 18;
/// Tiles of a block's sums.
pub(super) const SUMS: usize = 4;
/// Steps of columns packed at once, where rows are read in place: longer sums wait in memory, in full precision, for the next part.
const DEEP: usize = 4096;
/// The same, where rows are packed, too: both stay in the second cache. (With 4096 weight gradients, whose rows must be transposed, took
/// 1.1 to 1.6 times as long.) Sums of pieces begin anew with each part, which keeps long ones as precise as those of [`product`]: of 10 000
/// positive numbers five times.
///
/// [`product`]: super::super::product
pub(super) const DEEP_PACKED: usize = 512;
const _: () = assert!(DEEP_PACKED / STEP <= SHALLOW);
/// Rows whose sums wait at once: 10 MiB beside the columns that fit.
const WAITING: usize = 2048;
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
pub(super) unsafe fn product<T: Pieces<P>, const P: usize>(
    level: Level,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    b: Matrix<*const T>,
    epilogue: Epilogue<T>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match is_turned([out.row, out.column]) {
            true => product_of(level, [n, k, m], out.turned(), b.turned(), a.turned(), epilogue.turned()),
            false => product_of(level, [m, k, n], out, a, b, epilogue),
        }
    }
}

/// As [`product`], for any operands, and in these roles.
///
/// # Safety
/// As for [`product`].
pub(super) unsafe fn product_of<T: Pieces<P>, const P: usize>(
    level: Level,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut T>,
    a: impl Left<T, P>,
    b: impl Right<T, P>,
    epilogue: Epilogue<T>,
) {
    ROOM.with_borrow_mut(|room| {
        // SAFETY: the caller's promise.
        let _registers = (level == Level::Amx).then(|| unsafe { amx::Registers::new() });
        let block = Block { level, k, out, a, b, epilogue };
        let most = if k > block.deep() { WAITING } else { m };
        for i in (0..m).step_by(most) {
            // SAFETY: as above; these are the registers.
            unsafe { block.part(i, 0).run([most.min(m - i), n], room) };
        }
    });
}

/// Panels of so many steps that are packed at once.
pub(super) fn panels_at_once<const P: usize>(depth: usize) -> usize {
    (PACKED / size_of::<Tile>() / (2 * P) / depth.div_ceil(STEP).max(1)).max(1)
}

/// Whether the output's columns are what registers are written to: operands then change their roles.
pub(super) fn is_turned([row, column]: [isize; 2]) -> bool {
    column != 1 && row == 1
}

#[derive(Clone, Copy)]
struct Block<T, A, B, const P: usize> {
    level: Level,
    k: usize,
    out: Matrix<*mut T>,
    a: A,
    b: B,
    epilogue: Epilogue<T>,
}

/// A strip, what it is multiplied with, and where its sums go.
struct Task<T, A, B, const P: usize> {
    strip: Strip,
    /// What is packed meanwhile.
    next: Option<Packing<T, A, P>>,
    packed: *const Tile,
    /// Of one block, and of all panels.
    sums: [*mut Tile; 2],
    rows: usize,
    depth: usize,
    columns: usize,
    /// Sums of the steps before are there.
    more: bool,
    /// The product whose sums these are, if they are complete after these steps.
    last: Option<Block<T, A, B, P>>,
}

impl<T: Pieces<P>, A: Left<T, P>, B: Right<T, P>, const P: usize> Block<T, A, B, P> {
    /// Tiles of a step of a strip or a panel.
    const STEP_TILES: usize = 2 * P;

    /// The part of the output that begins there.
    fn part(&self, i: usize, j: usize) -> Self {
        let Block { level, k, out, a, b, epilogue } = *self;
        Block { level, k, out: out.part(i, j), a: a.part(i, 0), b: b.part(0, j), epilogue: epilogue.part(i, j) }
    }

    /// # Safety
    /// As for [`product`], by a thread that has the level's registers.
    unsafe fn run(&self, [m, n]: [usize; 2], [packed, strips, sums]: &mut [Vec<Tile>; 3]) {
        let k = self.k;
        let deep = self.deep();
        let wait = k > deep;
        let steps = k.min(deep).div_ceil(STEP).max(1);
        let blocks = n.div_ceil(panels_at_once::<P>(k.min(deep)) * PAIR);
        let columns = n.div_ceil(blocks).next_multiple_of(PAIR);
        let panels = columns / PAIR;
        // Rows are packed once for all columns, where that is not too much. Pieces are half as much again to read: no faster than to cut anew.
        let kept = P == 1 && n > columns && !wait && m * k * size_of::<u16>() <= KEPT;
        let packed = room(packed, panels * steps * Self::STEP_TILES);
        // Otherwise there is one that is multiplied, and the one after it.
        let (count, strip) = (if kept { m.div_ceil(PAIR) } else { 2 }, steps * Self::STEP_TILES);
        let strips = room(strips, count * strip);
        let apart = |i: usize| if wait { i / PAIR * panels * SUMS } else { 0 };
        let sums = room(sums, SUMS + apart(m - 1) + panels * SUMS);
        for j in (0..n).step_by(columns) {
            let columns = columns.min(n - j);
            // A sum of nothing is still written.
            for from in (0..k.max(1)).step_by(deep) {
                let depth = deep.min(k - from);
                let strip =
                    |i: usize| (self.a.part(i, from), PAIR.min(m - i), strips.wrapping_add(i / PAIR % count * strip));
                let all_packed = kept && j > 0;
                let mut is_packed = all_packed;
                // SAFETY: the caller's promise; there is room for what is packed.
                unsafe {
                    self.b.part(from, j).pack(depth, columns, packed);
                    for i in (0..m).step_by(PAIR) {
                        let (a, rows, to) = strip(i);
                        let in_place = if rows == PAIR { a.in_place(k) } else { None };
                        if in_place.is_none() && !is_packed {
                            a.pack(rows, depth, to);
                        }
                        let ahead = in_place.is_none() && self.level == Level::Amx && !all_packed && i + PAIR < m;
                        let next =
                            ahead.then(|| strip(i + PAIR)).map(|(a, rows, to)| Packing::new(a, (rows, depth), to));
                        let next = next.filter(|next| next.left() > 0);
                        is_packed = next.is_some() || all_packed;
                        let task = Task {
                            strip: in_place.unwrap_or(Strip::packed(to, P)),
                            next,
                            packed,
                            sums: [sums, sums.add(SUMS + apart(i))],
                            rows,
                            depth,
                            columns,
                            more: from > 0,
                            last: (from + depth == k).then(|| self.part(i, j)),
                        };
                        self.strip(task);
                    }
                }
            }
        }
    }

    /// Steps that are packed at once, of so many.
    fn deep(&self) -> usize {
        if self.a.in_place(self.k).is_some() { DEEP } else { DEEP_PACKED }
    }

    /// A strip of rows against all columns that are packed.
    ///
    /// # Safety
    /// As for [`Block::run`].
    unsafe fn strip(&self, task: Task<T, A, B, P>) {
        let Task { strip, next, packed, sums: [aside, sums], rows, depth, columns, more, last } = task;
        let multiply = match self.level {
            Level::Amx => amx::multiply::<P>,
            Level::Dot => dot::multiply,
        };
        let (all, panels) = (depth.div_ceil(STEP), columns.div_ceil(PAIR));
        let most = all.div_ceil(all.div_ceil(SHALLOW).max(1)).max(1);
        let packs = next.is_some();
        let mut beside = Beside::new(next, panels * all * amx::calls(P));
        for first in (0..all.max(1)).step_by(most) {
            let steps = most.min(all - first);
            let strip = strip.part(first);
            let last = last.filter(|_| first + steps == all);
            // A block that is finished at once needs no place of its own, and stays in the first cache until it is stored.
            let apart = if more || steps < all || last.is_none() { SUMS } else { 0 };
            for panel in 0..panels {
                let sides = [rows, PAIR.min(columns - panel * PAIR)];
                let tiles = sides.map(|n| n.div_ceil(SIDE));
                let sums = sums.wrapping_add(panel * apart);
                let b = packed.wrapping_add((panel * all + first) * Self::STEP_TILES);
                let anew = P > 1 && more;
                let (to, kept) = if anew { (aside, first > 0) } else { (sums, more || first > 0) };
                // SAFETY: the caller's promise; so many sums there are.
                unsafe {
                    match steps {
                        0 => std::slice::from_raw_parts_mut(sums, SUMS).fill(Tile::ZERO),
                        _ if packs => {
                            amx::multiply_beside::<P>(strip.at.cast(), b, to, steps, kept, || beside.go_on());
                        }
                        _ => multiply(strip, b, to, steps, kept, tiles),
                    }
                    if anew {
                        store::add(aside, sums);
                    }
                    if let Some(last) = &last {
                        let Block { out, a, b, epilogue, k, .. } = last.part(0, panel * PAIR);
                        let again = |i: usize, j: usize| pieces::again(|q| a.number(i, q), |q| b.number(q, j), k);
                        store::block(sums, out, sides[0], 0..sides[1], epilogue, again);
                    }
                }
            }
        }
        // SAFETY: the processor has the instructions.
        unsafe { beside.finish() };
    }
}

/// A strip of rows that is packed part by part.
struct Packing<T, A, const P: usize> {
    of: A,
    sizes: (usize, usize),
    to: *mut Tile,
    done: usize,
    parts: usize,
    _numbers: PhantomData<T>,
}

impl<T: Pieces<P>, A: Left<T, P>, const P: usize> Packing<T, A, P> {
    fn new(of: A, sizes: (usize, usize), to: *mut Tile) -> Self {
        Packing { of, sizes, to, done: 0, parts: of.parts(sizes.0, sizes.1), _numbers: PhantomData }
    }
}

impl<T: Pieces<P>, A: Left<T, P>, const P: usize> Work for Packing<T, A, P> {
    fn left(&self) -> usize {
        self.parts - self.done
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn advance(&mut self) {
        // SAFETY: who packs promises that the rows lie in their operand, and that there is room.
        unsafe { self.of.pack_part(self.sizes, self.to, self.done) };
        self.done += 1;
    }
}

/// At least so many tiles.
pub(super) fn room(tiles: &mut Vec<Tile>, count: usize) -> *mut Tile {
    if tiles.len() < count {
        tiles.resize(count, Tile::ZERO);
    }
    tiles.as_mut_ptr()
}
