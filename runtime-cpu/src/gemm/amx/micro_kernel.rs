//! The micro-kernel of AMX: two tiles of A by two tiles of B. The compiler has no intrinsics for it, so it is written
//! in assembly.

use std::arch::asm;

use half::bf16;

use super::{TILE_DIM, TILE_K, Tile, split_image::SplitImage};
use crate::gemm::Matrix;

/// The location of a micro-panel's tiles in memory.
pub(super) trait TileSource: Copy {
    /// True if the tiles stay in L1 while the other operand streams through it. Streamed tiles are loaded with a hint
    /// not to keep them in L1: 2000 instead of 1500 GFLOP/s at 16 tiles.
    const REUSED_IN_L1: bool;

    /// The bytes from a row of a tile to the next, and from the first tile of a pair to the second.
    fn strides(self) -> [isize; 2];

    /// The first of the two tiles of a term, at tile `k_tile` along the depth.
    fn tile(self, k_tile: usize, term: usize) -> *const u8;
}

/// The tiles of a micro-panel at equal distances, packed or in place. The second tile's rows follow the first's.
#[derive(Clone, Copy)]
pub(super) struct PanelTiles {
    pub at: *const bf16,
    /// Bytes between rows of a tile.
    pub row_bytes: isize,
    /// Bytes between tiles along `k`.
    pub k_tile_bytes: isize,
}

impl PanelTiles {
    /// Rows of bf16 with unit column stride, in place.
    pub(super) fn in_place<T>(a: Matrix<*const T>) -> PanelTiles {
        let element = size_of::<bf16>() as isize;
        PanelTiles { at: a.at.cast(), row_bytes: a.row * element, k_tile_bytes: TILE_K as isize * element }
    }

    /// Packed tiles of `terms` terms.
    pub(super) fn packed(tiles: *const Tile, terms: usize) -> PanelTiles {
        let row_bytes = (size_of::<Tile>() / TILE_DIM) as isize;
        PanelTiles { at: tiles.cast(), row_bytes, k_tile_bytes: (2 * terms * size_of::<Tile>()) as isize }
    }

    /// The micro-panel from tile `k_tile` of its depth on.
    pub(super) fn offset(self, k_tile: usize) -> PanelTiles {
        PanelTiles { at: self.at.wrapping_byte_offset(k_tile as isize * self.k_tile_bytes), ..self }
    }
}

impl TileSource for PanelTiles {
    const REUSED_IN_L1: bool = true;

    #[inline(always)]
    fn strides(self) -> [isize; 2] {
        [self.row_bytes, self.row_bytes * TILE_DIM as isize]
    }

    #[inline(always)]
    fn tile(self, k_tile: usize, term: usize) -> *const u8 {
        self.offset(k_tile).at.cast::<u8>().wrapping_add(term * 2 * size_of::<Tile>())
    }
}

/// A micro-panel that comes from L2.
#[derive(Clone, Copy)]
pub(super) struct Streamed(pub PanelTiles);

impl TileSource for Streamed {
    const REUSED_IN_L1: bool = false;

    #[inline(always)]
    fn strides(self) -> [isize; 2] {
        self.0.strides()
    }

    #[inline(always)]
    fn tile(self, k_tile: usize, term: usize) -> *const u8 {
        self.0.tile(k_tile, term)
    }
}

/// The 32 adjacent columns of an im2col view, read in place from an image that holds 16 pairs of channels in planes.
#[derive(Clone, Copy)]
pub(super) struct ImageTiles<'a> {
    pub image: SplitImage,
    /// The offset of each tile along the depth, in bytes from the image's first element of the first column.
    pub k_tiles: &'a [usize],
}

impl TileSource for ImageTiles<'_> {
    const REUSED_IN_L1: bool = true;

    #[inline(always)]
    fn strides(self) -> [isize; 2] {
        [(self.image.group * size_of::<u16>()) as isize, size_of::<[u16; 2 * TILE_DIM]>() as isize]
    }

    #[inline(always)]
    fn tile(self, k_tile: usize, term: usize) -> *const u8 {
        let at = self.k_tiles[k_tile] + term * self.image.plane * size_of::<u16>();
        self.image.at.cast::<u8>().wrapping_add(at)
    }
}

/// Loads a tile register, with or without the hint to keep it in L1.
macro_rules! load {
    (@ $how:literal, $register:literal, $at:expr, $line:expr) => {
        asm!(
            concat!($how, " tmm", $register, ", [{at} + {line}]"),
            at = in(reg) $at, line = in(reg) $line, options(nostack, readonly)
        )
    };
    ($register:literal, $reused:expr, $at:expr, $line:expr) => {
        if $reused { load!(@ "tileloadd", $register, $at, $line) } else { load!(@ "tileloaddt1", $register, $at, $line) }
    };
}

/// Adds the products of the rows in one tile register and the columns in another to the accumulators in a third.
macro_rules! fma {
    ($($acc:literal $rows:literal $columns:literal),*) => {
        asm!($(concat!("tdpbf16ps tmm", $acc, ", tmm", $rows, ", tmm", $columns)),*, options(nostack, nomem))
    };
}

/// Computes `acc = a · b (+ acc)` over `k_tiles` tiles along `k`, with `background` after every four multiplications.
///
/// The CPU runs both at once, if `background` is no more than some tens of instructions. It is called
/// [`slots_per_k_tile`] times for each tile along `k`. With three terms, six products are added, the largest last.
///
/// # Safety
/// Both micro-panels, of `TERMS` terms, are valid for `k_tiles`, and `acc` for four tiles, which no other thread
/// accesses. This thread has a [`TileConfig`](super::tile_config::TileConfig), and `background` uses no tile registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub(super) unsafe fn multiply<A: TileSource, B: TileSource, const TERMS: usize>(
    (a, b): (A, B),
    acc: *mut Tile,
    k_tiles: usize,
    accumulate: bool,
    mut background: impl FnMut(),
) {
    const { assert!(TERMS == 1 || TERMS == 3) };
    let ([a_line, low], [b_line, right]) = (a.strides(), b.strides());
    // SAFETY: the caller guarantees the micro-panels and the accumulators. Tile registers keep their contents from one
    // `asm!` to the next, since no other code uses them.
    unsafe {
        // Loads alternate with multiplications: 3 % more than loads first.
        macro_rules! rows {
            ($at:ident) => {
                load!("4", A::REUSED_IN_L1, $at, a_line);
                fma!("0" "4" "6", "1" "4" "7");
                load!("5", A::REUSED_IN_L1, $at.wrapping_offset(low), a_line);
                fma!("2" "5" "6", "3" "5" "7");
                background();
            };
        }
        macro_rules! columns {
            ($at:ident) => {
                load!("6", B::REUSED_IN_L1, $at, b_line);
                fma!("0" "4" "6", "2" "5" "6");
                load!("7", B::REUSED_IN_L1, $at.wrapping_offset(right), b_line);
                fma!("1" "4" "7", "3" "5" "7");
                background();
            };
        }
        load_acc(acc, accumulate);
        for k_tile in 0..k_tiles {
            dummy_add();
            let (first, last) = (a.tile(k_tile, 0), b.tile(k_tile, TERMS - 1));
            load!("6", B::REUSED_IN_L1, last, b_line);
            load!("4", A::REUSED_IN_L1, first, a_line);
            fma!("0" "4" "6");
            load!("5", A::REUSED_IN_L1, first.wrapping_offset(low), a_line);
            fma!("2" "5" "6");
            load!("7", B::REUSED_IN_L1, last.wrapping_offset(right), b_line);
            fma!("1" "4" "7", "3" "5" "7");
            background();
            if TERMS == 3 {
                let ([second, third], [large, middle]) =
                    ([1, 2].map(|p| a.tile(k_tile, p)), [0, 1].map(|p| b.tile(k_tile, p)));
                columns!(middle);
                rows!(second);
                columns!(large);
                rows!(third);
                rows!(first);
            }
        }
        store_acc(acc);
    }
}

/// The number of times that [`multiply`] calls `background` for each tile of the depth.
pub(super) const fn slots_per_k_tile(terms: usize) -> usize {
    terms * (terms + 1) / 2
}

/// Adds zero to zero between multiplications. One scalar addition in 24 multiplications makes them a tenth faster on
/// Intel's model 167 (675 → 750 GFLOP/s of `f32` on two cores). An integer instruction does not, and the cause is not
/// documented. Background work has additions enough.
#[inline(always)]
fn dummy_add() {
    // SAFETY: it adds zero to zero, in a register that the compiler picks.
    unsafe { asm!("vxorps {x}, {x}, {x}", "vaddss {x}, {x}, {x}", x = out(xmm_reg) _, options(nostack, nomem)) };
}

/// # Safety
/// `acc` is valid for four tiles, and this thread has a tile configuration.
#[inline(always)]
unsafe fn load_acc(acc: *mut Tile, accumulate: bool) {
    // SAFETY: the caller guarantees tiles and configuration.
    unsafe {
        match accumulate {
            true => asm!(
                "tileloadd tmm0, [{acc} + {line}]",
                "tileloadd tmm1, [{acc} + {line} + 1024]",
                "tileloadd tmm2, [{acc} + {line} + 2048]",
                "tileloadd tmm3, [{acc} + {line} + 3072]",
                acc = in(reg) acc, line = in(reg) 64usize, options(nostack, readonly)
            ),
            false => asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)),
        }
    }
}

/// # Safety
/// `acc` is valid for four tiles, which no other thread accesses, and this thread has a tile configuration.
#[inline(always)]
unsafe fn store_acc(acc: *mut Tile) {
    // SAFETY: the caller guarantees tiles and configuration.
    unsafe {
        asm!(
            "tilestored [{acc} + {line}], tmm0",
            "tilestored [{acc} + {line} + 1024], tmm1",
            "tilestored [{acc} + {line} + 2048], tmm2",
            "tilestored [{acc} + {line} + 3072], tmm3",
            acc = in(reg) acc, line = in(reg) 64usize, options(nostack)
        );
    }
}
