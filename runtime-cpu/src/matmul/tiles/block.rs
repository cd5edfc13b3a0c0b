//! A product on one thread: columns packed for the second cache, then strip after strip of rows against them.
//!
//! Rows that lie as the tiles want them are read where they are, the others packed, a strip while the one before it is multiplied. A block's sums
//! are rounded into the output while the next block's are added up. Columns are packed before their first strip: between the products of
//! the columns before them they took as long.

use std::{arch::x86_64::__m512, cell::RefCell};

use super::{
    Beside, Level, STEP, Tile, Work, amx, dot,
    factor::{Left, Right},
    multiply::{self, Passing, Strip, multiply},
    pack::PAIR,
    pieces::{self, Pieces},
    plan::{At, Plan},
    store::{self, Line, Store},
};
use crate::{
    machine::Machine,
    matmul::{Epilogue, Matrix},
};

/// Tiles of a block's sums.
pub(super) const SUMS: usize = 4;
/// Steps of columns packed at once, where rows are read in place: longer sums wait in memory, in full precision, for the next part.
const DEEP: usize = 4096;
/// The same, where rows are packed, too, in parts of one length: both, and the sums that wait, stay in the second cache. (With 4096 weight gradients,
/// whose rows must be transposed, took 1.1 to 1.6 times as long, with 512 sums of 1152 to 2048 steps 1.05 to 1.2 times; with 256, shorter ones, which
/// then wait, 1.1 times. Dot products, without pieces, are 1.04 times as fast with 512.) Sums of pieces begin anew with each part, which keeps long ones as precise as those of [`product`]: of 10 000
/// positive numbers five times.
///
/// [`product`]: super::super::product
const DEEP_PACKED: usize = 384;
const DEEP_PACKED_DOT: usize = 512;
const _: () = assert!(DEEP_PACKED_DOT / STEP <= SHALLOW);
/// Rows whose sums wait at once: 10 MiB beside the columns that fit.
const WAITING: usize = 2048;
/// Tiles of a strip that stay in the first cache while columns pass. (Pieces are too many for it. In parts that do stay, products took 0.99 to 1.1 times
/// as long, since the sums must be loaded for each.)
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

/// Of so many steps, those of a part.
pub(super) fn part_of(level: Level, k: usize) -> usize {
    let most = if level == Level::Amx { DEEP_PACKED } else { DEEP_PACKED_DOT };
    k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(STEP)
}

/// Panels that are packed at once, of a sum of so many steps in parts of so many.
pub(super) fn panels_at_once<const P: usize>(k: usize, deep: usize) -> usize {
    // Most of the second-level cache; less of it where sums wait there, too (1.00 to 1.1 times as fast).
    let l2 = Machine::get().l2;
    let bytes = if k > deep { l2 / 2 } else { l2 / 8 * 5 };
    (bytes / size_of::<Tile>() / (2 * P) / k.min(deep).div_ceil(STEP).max(1)).max(1)
}

/// Whether the output's columns are what registers are written to: operands then change their roles.
pub(super) fn is_turned([row, column]: [isize; 2]) -> bool {
    column != 1 && row == 1
}

/// A product, or the part of it that begins at some row and column.
#[derive(Clone, Copy)]
struct Block<T, A, B, const P: usize> {
    level: Level,
    k: usize,
    out: Matrix<*mut T>,
    a: A,
    b: B,
    epilogue: Epilogue<T>,
}

/// What is done between products: the sums of the panel before are finished, the next strip is packed.
struct Chores<S, A> {
    sums: Beside<S>,
    strip: Beside<A>,
    /// Where the next sums that are finished at once go, and where those are that are being finished.
    aside: [*mut Tile; 2],
}

impl<S: Work, A: Work> Chores<S, A> {
    /// What comes after four products.
    ///
    /// # Safety
    /// As for [`Beside::go_on`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn go_on(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.sums.go_on();
            self.strip.go_on();
        }
    }
}

impl<T: Pieces<P>, A: Left<T, P>, B: Right<T, P>, const P: usize> Block<T, A, B, P> {
    /// Tiles of a step of a strip or a panel.
    const STEP_TILES: usize = 2 * P;

    /// The part of the output that begins there.
    fn part(&self, i: usize, j: usize) -> Self {
        let Block { level, k, out, a, b, epilogue } = *self;
        Block { level, k, out: out.part(i, j), a: a.part(i, 0), b: b.part(0, j), epilogue: epilogue.part(i, j) }
    }

    fn plan(&self, [m, n]: [usize; 2]) -> Plan {
        let (k, deep) = (self.k, self.deep());
        let blocks = n.div_ceil(panels_at_once::<P>(k, deep) * PAIR);
        let columns = n.div_ceil(blocks).next_multiple_of(PAIR);
        // Pieces are half as much again to read: no faster than to cut anew.
        let kept = P == 1 && n > columns && k <= deep && m * k * size_of::<u16>() <= KEPT;
        Plan { sizes: [m, k, n], deep, columns, kept }
    }

    /// # Safety
    /// As for [`product`], by a thread that has the level's registers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn run(&self, sizes: [usize; 2], [packed, strips, sums]: &mut [Vec<Tile>; 3]) {
        let plan = self.plan(sizes);
        let ([steps, panels], [m, ..]) = (plan.tiles(), plan.sizes);
        let mut at = At { column: 0, step: 0, row: 0 };
        let packed = room(packed, panels * steps * Self::STEP_TILES);
        let (size, count) = (steps * Self::STEP_TILES, if plan.kept { m.div_ceil(PAIR) } else { 2 });
        let strips = room(strips, size * count);
        let waiting = if plan.waits() { m.div_ceil(PAIR) } else { 1 };
        let sums = room(sums, (2 + waiting * panels) * SUMS);
        let store = Store::new(self.out, self.epilogue);

        // SAFETY: the caller's promise; there is room for what is packed, which is multiplied when all of it is.
        unsafe {
            let pack = |at: At, turn: usize| {
                let (a, rows) = (self.a.part(at.row, at.step), plan.rows(at));
                let slot = if plan.kept { at.row / PAIR } else { turn % 2 };
                let to = strips.wrapping_add(slot * size);
                let lies = if rows == PAIR { a.in_place(self.k) } else { None };
                let there = lies.is_some() || plan.kept && at.column > 0;
                (lies.unwrap_or(Strip::packed(to, P)), (!there).then(|| a.pack(rows, plan.depth(at), to)))
            };
            let (mut strip, first) = pack(at, 0);
            if let Some(mut first) = first {
                first.finish();
            }
            let aside = [sums, sums.add(SUMS)];
            let mut chores = Chores { sums: Beside::nothing(), strip: Beside::nothing(), aside };
            for turn in 1.. {
                if at.row == 0 {
                    // Sums that wait may lie where those of the next block do.
                    chores.sums.finish();
                    self.b.part(at.step, at.column).pack(plan.depth(at), plan.columns(at), packed).finish();
                }
                let next = plan.next(at);
                let (after, packing) = next.map_or((strip, None), |next| pack(next, turn));
                let calls = plan.columns(at).div_ceil(PAIR) * plan.depth(at).div_ceil(STEP) * multiply::calls(P);
                chores.strip = Beside::new(packing, calls);
                let waiting = if plan.waits() { at.row / PAIR * panels } else { 0 };
                let task = Task { strip, packed, sums: sums.add((2 + waiting) * SUMS), store: &store, at };
                self.strip(&plan, task, &mut chores);
                chores.strip.finish();
                let Some(next) = next else { break };
                (at, strip) = (next, after);
            }
            chores.sums.finish();
        }
    }

    /// Steps that are packed at once, of so many.
    fn deep(&self) -> usize {
        if self.a.in_place(self.k).is_some() { DEEP } else { part_of(self.level, self.k).max(STEP) }
    }

    /// A strip of rows against all columns that are packed.
    ///
    /// # Safety
    /// As for [`Block::run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn strip<'a>(
        &'a self,
        plan: &Plan,
        task: Task<'a, T, P>,
        chores: &mut Chores<Finish<'a, T, A, B, P>, impl Work>,
    ) {
        let Task { strip, packed, sums, store, at } = task;
        let (all, columns) = (plan.depth(at).div_ceil(STEP), plan.columns(at));
        let most = all.div_ceil(all.div_ceil(SHALLOW).max(1)).max(1);
        let (more, complete) = (at.step > 0, at.step + plan.deep >= self.k);
        for first in (0..all.max(1)).step_by(most) {
            let steps = most.min(all - first);
            let last = complete && first + steps == all;
            let strip = strip.part(first);
            for panel in 0..columns.div_ceil(PAIR) {
                let b = packed.wrapping_add((panel * all + first) * Self::STEP_TILES);
                let waiting = sums.wrapping_add(panel * SUMS);
                // What is finished at once stays in the first cache until then, while the next sums are added up.
                let anew = P > 1 && more;
                let apart = anew || last && steps == all && !more;
                let to = if apart { chores.aside[0] } else { waiting };
                let kept = first > 0 || more && !anew;
                // SAFETY: the caller's promise; so many sums there are.
                unsafe {
                    // Where there is one panel, what is being finished may lie where these sums go.
                    if columns <= PAIR && !apart {
                        chores.sums.finish();
                    }
                    self.multiply((strip, Strip::packed(b, P)), to, steps, kept, || chores.go_on());
                    chores.sums.finish();
                    if last || anew {
                        chores.aside.reverse();
                        let begin = [at.row, at.column + panel * PAIR];
                        let finish = Finish {
                            of: self,
                            to: last.then(|| store.line(begin, 0..PAIR.min(columns - panel * PAIR))),
                            at: begin,
                            sums: to,
                            onto: anew.then_some(waiting),
                            row: 0,
                            rows: plan.rows(at),
                        };
                        chores.sums = Beside::new(Some(finish), steps * multiply::calls(P));
                    }
                }
            }
        }
    }

    /// A strip against a panel, and what is called between products.
    ///
    /// # Safety
    /// As for [`multiply`](super::multiply::multiply), by a thread that has the level's registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn multiply(
        &self,
        (a, b): (Strip, Strip),
        sums: *mut Tile,
        steps: usize,
        kept: bool,
        mut beside: impl FnMut(),
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.level {
                Level::Amx => multiply::<_, _, P>((a, Passing(b)), sums, steps, kept, beside),
                Level::Dot => {
                    dot::multiply(a, b.at.cast(), sums, steps, kept);
                    (0..steps * multiply::calls(P)).for_each(|_| beside());
                }
            }
        }
    }
}

/// The sums of a strip and a panel, which are added to others or stored, or both, row by row.
struct Finish<'a, T, A, B, const P: usize> {
    of: &'a Block<T, A, B, P>,
    /// Where they go, if they are complete.
    to: Option<Line<T>>,
    /// Their first row and column.
    at: [usize; 2],
    sums: *const Tile,
    /// The sums of the steps before.
    onto: Option<*mut Tile>,
    row: usize,
    rows: usize,
}

impl<T: Pieces<P>, A: Left<T, P>, B: Right<T, P>, const P: usize> Work for Finish<'_, T, A, B, P> {
    fn left(&self) -> usize {
        self.rows - self.row
    }

    /// # Safety
    /// As for [`Work::advance`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        // SAFETY: whoever made this promised operands, an output and sums that nothing else sees.
        unsafe {
            let mut sums = store::load(self.sums, self.row);
            if let Some(onto) = self.onto {
                sums = store::add(onto, self.row, sums);
            }
            match (&mut self.to, self.onto) {
                (Some(to), _) if to.not_finite::<P>(sums) != 0 => self.put_anew(sums),
                (Some(to), _) => to.put(sums),
                (None, Some(onto)) => store::keep(onto, self.row, sums),
                (None, None) => {}
            }
        }
        self.row += 1;
    }
}

impl<T: Pieces<P>, A: Left<T, P>, B: Right<T, P>, const P: usize> Finish<'_, T, A, B, P> {
    /// Stores a row some of whose sums are not finite.
    ///
    /// # Safety
    /// As for [`Work::advance`].
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn put_anew(&mut self, sums: [__m512; 2]) {
        let Some(to) = &mut self.to else { return };
        let (Block { a, b, k, .. }, i, j) = (self.of, self.at[0] + self.row, self.at[1]);
        // SAFETY: the caller's promise.
        unsafe {
            let again = |lane: usize| pieces::again(|q| a.number(i, q), |q| b.number(q, j + lane), *k);
            to.put_anew(sums, again);
        }
    }
}

/// A strip, the columns it is multiplied with, and where its sums go.
struct Task<'a, T, const P: usize> {
    strip: Strip,
    packed: *const Tile,
    /// Sums of all panels that wait.
    sums: *mut Tile,
    store: &'a Store<T>,
    at: At,
}

/// At least so many tiles.
pub(super) fn room(tiles: &mut Vec<Tile>, count: usize) -> *mut Tile {
    if tiles.len() < count {
        tiles.resize(count, Tile::ZERO);
    }
    tiles.as_mut_ptr()
}
