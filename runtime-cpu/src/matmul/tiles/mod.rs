//! Products of bf16, and of `f32` as sums of bf16 ([`pieces`]), by the processor's own instructions for them: AMX, or for bf16 AVX-512's dot
//! products of pairs.
//!
//! Both take the operands in tiles ([`pack`]), add up in `f32`, and round a number of the output once, to nearest, ties to even.
//! They treat denormal numbers as zero, AMX adds up 32 steps apart before it adds them to the sum, and pairs are added in another order than
//! one by one: so the last bits of a product differ from level to level. They never depend on the number of threads or how the product
//! is cut: tiles begin every 32 steps from the beginning of a sum, and a sum that is put aside keeps all its bits. (Long sums of pieces are
//! parts of at most 384 steps, which are added up in order.)

mod amx;
mod beside;
mod block;
mod dot;
mod factor;
mod filters;
mod image;
mod kept;
mod lines;
mod multiply;
mod pack;
mod pairs;
mod pieces;
mod plan;
mod store;
#[cfg(test)]
mod tests;
mod windows;

use half::bf16;

pub(crate) use amx::is_available;
pub(crate) use beside::{Beside, Work};
pub(super) use filters::Filters;
pub(crate) use kept::Tiles;
pub(crate) use pairs::{pairs, row, rows_of};
pub(crate) use pieces::{Pieces, not_finite};
pub(super) use windows::windows_times;

use super::{
    Epilogue, Product,
    cut::{Cut, LATE},
    matrix,
};
use crate::{Engine, Simd, operand::Base};

/// Rows of a tile on the left, columns of one on the right, and pairs of steps.
const SIDE: usize = 16;
/// Steps of a tile.
const STEP: usize = 32;

/// Multiplications of one tile of the output, or group of small products, about: some microseconds.
const GRAIN: usize = 1 << 23;

/// Rows or columns, and steps, with which `f32` in pieces are as fast as they are: with fewer, cutting and packing takes longer than the products
/// are faster (16 × 512 × 512: 0.84, 32: 1.03, 64: 1.28 times as fast).
const FEW: [usize; 2] = [48, 32];

/// What an AMX register holds: 16 rows of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Tile([u32; SIDE * SIDE]);

impl Tile {
    const ZERO: Tile = Tile([0; SIDE * SIDE]);
}

/// Instructions for bf16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Level {
    /// Tiles of 16 × 16 sums.
    Amx,
    /// Registers of 16 sums of pairs.
    Dot,
}

impl Level {
    /// What level `simd` has for products of bf16. (Processors with AMX run dot products at half the rate of products in `f32`: there
    /// [`Simd::Avx512`], which widens, is faster than [`Simd::Avx512Bf16`].)
    pub(super) fn best(simd: Simd) -> Option<Level> {
        match simd {
            Simd::Amx => Some(Level::Amx),
            Simd::Avx512Bf16 => Some(Level::Dot),
            _ => None,
        }
    }

    #[cfg(test)]
    fn is_available(self) -> bool {
        match self {
            Level::Amx => Simd::Amx.is_available(),
            Level::Dot => Simd::Avx512Bf16.is_available(),
        }
    }
}

/// Whether `f32` are multiplied in pieces. That depends on sizes alone.
pub(super) fn takes(p: &Product, simd: Simd) -> bool {
    simd == Simd::Amx && p.m.min(p.n) >= FEW[0] && p.k >= FEW[1]
}

/// The same for windows as rows: so many rows, steps and columns.
pub(super) fn takes_windows(sizes: [usize; 3]) -> bool {
    sizes.iter().all(|n| *n >= FEW[1])
}

/// The same for windows as columns, by so many maps: where channels that fill up a tile, and what lies between columns, are at most a third of
/// what is computed.
pub(super) fn takes_filters([_, maps, channels, _]: [usize; 4], columns: &[usize]) -> bool {
    let span = columns.last().map_or(0, |last| last + 1 - columns[0]);
    let computed = channels.next_multiple_of(STEP) * span.next_multiple_of(pack::PAIR);
    maps >= FEW[1] && computed * 2 <= channels * columns.len() * 3
}

/// `out = a · b` and what the epilogue adds, tiles of it by one thread each: of bf16.
pub(super) fn run_bf16(
    p: &Product,
    engine: &Engine,
    level: Level,
    operands: [Base<bf16>; 3],
    epilogue: Epilogue<bf16>,
) {
    // Mostly to wait for memory.
    run::<bf16, 1>(p, engine, level, [7.0, 14.0, 8.0], operands, epilogue);
}

/// The same of `f32`, where it [`takes`] them.
pub(super) fn run_f32(p: &Product, engine: &Engine, operands: [Base<f32>; 3], epilogue: Epilogue<f32>) {
    run::<f32, 3>(p, engine, Level::Amx, [1.5, 2.5, 4.0], operands, epilogue);
}

/// With what it takes to read or pack a step, as in [`cut`].
fn run<T: Pieces<P>, const P: usize>(
    p: &Product,
    engine: &Engine,
    level: Level,
    costs: [f64; 3],
    [out, a, b]: [Base<T>; 3],
    epilogue: Epilogue<T>,
) {
    if p.k == 0 && epilogue.only_adds() {
        return;
    }
    let cut = cut::<P>(p, engine.threads.count(), costs);
    p.tiles(engine, cut, GRAIN, |[o, i, j], sizes, [row, column]| {
        let out = matrix(out.at(o), p.out).part(row, column);
        let a = matrix(a.at(i).cast_const(), p.a).part(row, 0);
        let b = matrix(b.at(j).cast_const(), p.b).part(0, column);
        let epilogue = epilogue.part(row, column);
        // SAFETY: a tile of the output, which is this task's alone, and the rows and columns it needs; the level is one there is.
        unsafe { block::product::<T, P>(level, sizes, out, a, b, epilogue) };
    });
}

/// The cut that takes least time, about: in steps of a strip's tiles against a panel's, where such a step of a strip in place, of one that
/// must be transposed, and of a panel take so many to read or pack.
fn cut<const P: usize>(p: &Product, threads: usize, [strip, across, panel]: [f64; 3]) -> Cut {
    let turned = block::is_turned(p.out);
    let strip = if if turned { p.b[0] } else { p.a[1] } == 1 { strip } else { across };
    // Of pieces, which AMX alone multiplies.
    let at_once = block::panels_at_once::<P>(p.k, block::part_of(Level::Amx, p.k));
    Cut::cheapest(p, threads, (GRAIN, LATE), [pack::PAIR; 2], |[rows, columns]| {
        let [strips, panels] = if turned { [columns, rows] } else { [rows, columns] }.map(|n| n.div_ceil(pack::PAIR));
        // Strips are kept, or read in place; those of pieces are packed for each block of panels.
        let packed = if P == 1 { strips } else { strips * panels.div_ceil(at_once) };
        ((strips * panels) as f64 + packed as f64 * strip + panels as f64 * panel) * p.k as f64
    })
}
