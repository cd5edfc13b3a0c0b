//! GEMM of bf16, and of `f32` split into bf16 terms ([`split`]), by the CPU's instructions for bf16: AMX, or for bf16
//! alone the dot products of AVX-512 BF16.
//!
//! Both instruction sets read operands packed into tiles ([`pack_tiles`]), accumulate in `f32`, and round an element of
//! the output once, to nearest, ties to even. They treat subnormal elements as zero. AMX adds 32 products before it
//! adds them to the sum, and dot products add pairs; so the last bits differ between instruction sets.
//!
//! **Invariant**: those bits depend neither on the number of threads nor on the partition. Tiles begin at every 32nd
//! product of a sum, and a sum that is spilled keeps all its bits. (Long sums of split `f32` are partial sums of at
//! most 384 products, added in order.)

mod block_plan;
mod dot;
mod im2col_tiles;
mod interleave;
mod micro_kernel;
mod pack_tiles;
mod split;
mod split_image;
mod store_accumulators;
mod store_tiles;
#[cfg(test)]
mod tests;
mod tile_config;
mod tile_loops;
mod tile_operand;
mod tile_rows;
mod tile_unit;
mod tile_weights;
mod vnni;

use half::bf16;

pub(super) use im2col_tiles::gemm_im2col_lhs;
pub(crate) use interleave::{BackgroundTask, Interleaved};
pub(crate) use split::{SplitBf16, TileElement, not_finite};
pub(crate) use tile_unit::TileUnit;
pub(super) use tile_weights::TileWeights;
pub(crate) use vnni::{split_pairs, split_row, unpair_rows};

use super::{
    ConvSize, Epilogue, Gemm, GemmSize, Task, matrix,
    partition::{IMBALANCE, Partition, PartitionLimits},
};
use crate::{Engine, Simd, operand::Base};

/// Rows of a tile of A, columns of a tile of B, and pairs of k in either.
const TILE_DIM: usize = 16;
/// Products per accumulator in one tile.
const TILE_K: usize = 32;

/// Multiply-adds of one task, about: some microseconds.
const GRAIN: usize = 1 << 23;

/// The smallest m and n, and the smallest k, at which split `f32` are as fast as vectors. With smaller ones splitting
/// and packing takes longer than AMX saves (16 × 512 × 512: 0.84, 32: 1.03, 64: 1.28 times as fast).
const MIN_MN: usize = 48;
const MIN_K: usize = 32;

/// The contents of an AMX tile register: 16 rows of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Tile([u32; TILE_DIM * TILE_DIM]);

impl Tile {
    const ZERO: Tile = Tile([0; TILE_DIM * TILE_DIM]);
}

/// Instruction sets for bf16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bf16Isa {
    /// AMX: tiles of 16 × 16 accumulators.
    Amx,
    /// AVX-512 BF16: vectors of 16 accumulators, to which dot products of pairs are added.
    Dot,
}

impl Bf16Isa {
    /// The instruction set that `simd` selects for bf16. (CPUs with AMX run dot products at half the rate of `f32`
    /// FMAs: there [`Simd::Avx512`], which upcasts, is faster than [`Simd::Avx512Bf16`].)
    pub(super) fn best(simd: Simd) -> Option<Bf16Isa> {
        match simd {
            Simd::Amx => Some(Bf16Isa::Amx),
            Simd::Avx512Bf16 => Some(Bf16Isa::Dot),
            _ => None,
        }
    }

    #[cfg(test)]
    fn is_available(self) -> bool {
        match self {
            Bf16Isa::Amx => Simd::Amx.is_available(),
            Bf16Isa::Dot => Simd::Avx512Bf16.is_available(),
        }
    }
}

/// Tells whether AMX computes this GEMM of split `f32`. The answer depends on sizes alone.
pub(super) fn takes(p: &Gemm, simd: Simd) -> bool {
    simd == Simd::Amx && p.m.min(p.n) >= MIN_MN && p.k >= MIN_K
}

/// Tells whether AMX computes a GEMM of this size with an im2col view as the A operand.
pub(super) fn takes_im2col_lhs(size: GemmSize) -> bool {
    [size.m, size.k, size.n].iter().all(|n| *n >= MIN_K)
}

/// Tells whether AMX computes weights times an im2col view. Channels that pad a tile, and the gaps between columns,
/// must be at most a third of the computed elements.
pub(super) fn takes_weights(size: ConvSize, columns: &[usize]) -> bool {
    let span = columns.last().map_or(0, |last| last + 1 - columns[0]);
    let computed = size.channels.next_multiple_of(TILE_K) * span.next_multiple_of(pack_tiles::PANEL);
    size.out_channels >= MIN_K && computed * 2 <= size.channels * columns.len() * 3
}

/// Computes `out = a · b` of bf16 with the epilogue, each tile of the output by one thread. An output of `f32` has the
/// unrounded sums.
pub(super) fn run_bf16<O: TileElement>(
    p: &Gemm,
    engine: &Engine,
    isa: Bf16Isa,
    operands: (Base<O>, [Base<bf16>; 2]),
    epilogue: Epilogue<O>,
) {
    // Reading and packing mostly waits for memory.
    let costs = PanelCosts { in_place: 7.0, transposed: 14.0, b: 8.0 };
    run::<bf16, O, 1>(p, engine, isa, costs, operands, epilogue);
}

/// Computes `out = a · b` of `f32` with the epilogue, where AMX [`takes`] it.
pub(super) fn run_f32(p: &Gemm, engine: &Engine, operands: (Base<f32>, [Base<f32>; 2]), epilogue: Epilogue<f32>) {
    let costs = PanelCosts { in_place: 1.5, transposed: 2.5, b: 4.0 };
    run::<f32, f32, 3>(p, engine, Bf16Isa::Amx, costs, operands, epilogue);
}

/// The cost of reading or packing one tile of depth of a micro-panel, in units of multiplying one A micro-panel by one
/// B micro-panel.
#[derive(Clone, Copy)]
struct PanelCosts {
    /// An A micro-panel of unit column stride.
    in_place: f64,
    /// An A micro-panel that must be transposed.
    transposed: f64,
    /// The cost of a B micro-panel.
    b: f64,
}

fn run<T: SplitBf16<TERMS>, O: TileElement, const TERMS: usize>(
    p: &Gemm,
    engine: &Engine,
    isa: Bf16Isa,
    costs: PanelCosts,
    (out, [a, b]): (Base<O>, [Base<T>; 2]),
    epilogue: Epilogue<O>,
) {
    if p.k == 0 && epilogue.only_accumulates() {
        return;
    }
    let partition = partition::<TERMS>(p, engine.threads.count(), costs);
    p.for_each_task(engine, partition, GRAIN, |Task { batch: [o, i, j], size, row, column }| {
        let out = matrix(out.at(o), p.out).offset(row, column);
        let a = matrix(a.at(i).cast_const(), p.a).offset(row, 0);
        let b = matrix(b.at(j).cast_const(), p.b).offset(0, column);
        let epilogue = epilogue.offset(row, column);
        // SAFETY: each tile of the output belongs to one task; the rows of `a` and columns of `b` that it needs are in
        // their operands. The CPU supports `isa`, which comes from the engine's `Simd`.
        unsafe { tile_loops::gemm::<T, O, TERMS>(isa, size, out, a, b, epilogue) };
    });
}

/// The partition that takes least time, about, in units of multiplying one A micro-panel by one B micro-panel along a
/// tile's depth.
fn partition<const TERMS: usize>(p: &Gemm, threads: usize, costs: PanelCosts) -> Partition {
    let transposed = tile_loops::is_transposed(p.out);
    let a_cost = if if transposed { p.b[0] } else { p.a[1] } == 1 { costs.in_place } else { costs.transposed };
    // For split `f32`, which AMX alone multiplies.
    let at_once = tile_loops::panels_per_block::<TERMS>(p.k, tile_loops::kc_of(Bf16Isa::Amx, p.k));
    let limits = PartitionLimits { grain: GRAIN, imbalance: IMBALANCE, multiple: [pack_tiles::PANEL; 2] };
    Partition::cheapest(p, threads, limits, |[rows, columns]| {
        let panels = |n: usize| n.div_ceil(pack_tiles::PANEL);
        let [a_panels, b_panels] = if transposed { [columns, rows] } else { [rows, columns] }.map(panels);
        // Panels of bf16 are packed once, or read in place; those of split `f32` are packed for each block of B
        // micro-panels.
        let packed = if TERMS == 1 { a_panels } else { a_panels * b_panels.div_ceil(at_once) };
        ((a_panels * b_panels) as f64 + packed as f64 * a_cost + b_panels as f64 * costs.b) * p.k as f64
    })
}
