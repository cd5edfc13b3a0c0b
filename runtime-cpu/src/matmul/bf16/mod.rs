//! Products of bf16 by the processor's own instructions for them: AMX, or AVX-512's dot products of pairs.
//!
//! Both take the operands in tiles ([`pack`]), add up in `f32`, and round a number of the output once, to nearest, ties to even.
//! They treat denormal numbers as zero, AMX adds up 32 steps apart before it adds them to the sum, and pairs are added in another order than
//! one by one: so the last bits of a product differ from level to level. They never depend on the number of threads or how the product
//! is cut: tiles begin every 32 steps from the beginning of a sum, and a sum that is put aside keeps all its bits.

mod amx;
mod block;
mod dot;
mod pack;
mod store;
#[cfg(test)]
mod tests;
mod tiles;

use std::sync::LazyLock;

use half::bf16;

pub(crate) use tiles::Tiles;

use super::{Epilogue, Product, cut::Cut, matrix};
use crate::{Engine, Simd, operand::Base};

/// Rows of a tile on the left, columns of one on the right, and pairs of steps.
const SIDE: usize = 16;
/// Steps of a tile.
const STEP: usize = 32;

/// Multiplications of one tile of the output, or group of small products, about: some microseconds.
const GRAIN: usize = 1 << 23;

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
    /// Best first.
    const ALL: [Level; 2] = [Level::Amx, Level::Dot];

    /// The best of this processor beside `simd`.
    pub(super) fn best(simd: Simd) -> Option<Level> {
        static BEST: LazyLock<Option<Level>> = LazyLock::new(|| Level::ALL.into_iter().find(|l| l.is_available()));
        if simd == Simd::Avx512 { *BEST } else { None }
    }

    /// Whether this processor has it, and the system allows it. Processors with AMX run dot products at half the rate of products in `f32`:
    /// where the system does not allow AMX, widening is faster.
    fn is_available(self) -> bool {
        let vectors = Simd::Avx512.is_available() && std::arch::is_x86_feature_detected!("avx512bf16");
        match self {
            Level::Amx => vectors && amx::is_available(),
            Level::Dot => vectors && (!amx::is_there() || cfg!(test)),
        }
    }
}

/// `out = a · b` and what the epilogue adds, tiles of it by one thread each.
pub(super) fn run(p: &Product, engine: &Engine, level: Level, [out, a, b]: [Base<bf16>; 3], epilogue: Epilogue<bf16>) {
    if p.k == 0 && epilogue.only_adds() {
        return;
    }
    p.tiles(engine, cut(p, engine.threads.count()), GRAIN, |[o, i, j], sizes, [row, column]| {
        let out = matrix(out.at(o).cast(), p.out).part(row, column);
        let a = matrix(a.at(i).cast_const().cast(), p.a).part(row, 0);
        let b = matrix(b.at(j).cast_const().cast(), p.b).part(0, column);
        let epilogue = epilogue.part(row, column).bits();
        // SAFETY: a tile of the output, which is this task's alone, and the rows and columns it needs; the level is one there is.
        unsafe { block::product(level, sizes, out, a, b, epilogue) };
    });
}

/// The cut that takes least time, about: in steps of a strip's tiles against a panel's.
fn cut(p: &Product, threads: usize) -> Cut {
    // What it takes to read or pack a step, mostly to wait for memory: of a strip in place or to be transposed, and of a panel.
    let strip = |column: isize| if column == 1 { 7.0 } else { 14.0 };
    let panel = 8.0;
    let [row, column] = if block::is_turned(p.out) { [panel, strip(p.b[0])] } else { [strip(p.a[1]), panel] };
    Cut::cheapest(p, threads, GRAIN, [pack::PAIR; 2], |tile| {
        let [rows, columns] = tile.map(|n| n.div_ceil(pack::PAIR) as f64);
        (rows * columns + rows * row + columns * column) * p.k as f64
    })
}
