//! AMX's products: two tiles of rows by two of columns. The compiler has no such instructions, the assembler does.

use std::arch::asm;

use half::bf16;

use super::{SIDE, STEP, Tile, image::Image};
use crate::matmul::Matrix;

/// Where the tiles of an operand lie, step by step.
pub(super) trait Tiled: Copy {
    /// Whether they stay in the first cache while the other operand's pass through it. Those are marked as not to be kept there: 2000 instead of
    /// 1500 GFLOP/s at 16 steps.
    const STAYS: bool;

    /// Bytes from a line of a tile to the next, and from the first of two tiles to the second.
    fn apart(self) -> [isize; 2];

    /// The first tile of a step's numbers, or of such a piece of them.
    fn tile(self, step: usize, piece: usize) -> *const u8;
}

/// Where the tiles of a strip or a panel lie, and bytes from a line of a tile to the next, the second tile's after the first's, and from a step to
/// the next.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub at: *const bf16,
    pub line: isize,
    pub step: isize,
}

impl Strip {
    /// Rows of bf16 whose numbers lie side by side in memory.
    pub(super) fn in_place<T>(a: Matrix<*const T>) -> Strip {
        let number = size_of::<bf16>() as isize;
        Strip { at: a.at.cast(), line: a.row * number, step: STEP as isize * number }
    }

    /// Packed tiles, of so many pieces.
    pub(super) fn packed(tiles: *const Tile, pieces: usize) -> Strip {
        let line = (size_of::<Tile>() / SIDE) as isize;
        Strip { at: tiles.cast(), line, step: (2 * pieces * size_of::<Tile>()) as isize }
    }

    /// What begins so many tiles of steps later.
    pub(super) fn part(self, step: usize) -> Strip {
        Strip { at: self.at.wrapping_byte_offset(step as isize * self.step), ..self }
    }
}

impl Tiled for Strip {
    const STAYS: bool = true;

    #[inline(always)]
    fn apart(self) -> [isize; 2] {
        [self.line, self.line * SIDE as isize]
    }

    #[inline(always)]
    fn tile(self, step: usize, piece: usize) -> *const u8 {
        self.part(step).at.cast::<u8>().wrapping_add(piece * 2 * size_of::<Tile>())
    }
}

/// A strip or a panel that comes from the second cache.
#[derive(Clone, Copy)]
pub(super) struct Passing(pub Strip);

impl Tiled for Passing {
    const STAYS: bool = false;

    #[inline(always)]
    fn apart(self) -> [isize; 2] {
        self.0.apart()
    }

    #[inline(always)]
    fn tile(self, step: usize, piece: usize) -> *const u8 {
        self.0.tile(step, piece)
    }
}

/// 32 neighbours of an image, of which two channels' numbers lie side by side: in the bytes from the first of them on that each step names, 16
/// pairs of channels at each.
#[derive(Clone, Copy)]
pub(super) struct Neighbours<'a> {
    pub image: Image,
    pub steps: &'a [usize],
}

impl Tiled for Neighbours<'_> {
    const STAYS: bool = true;

    #[inline(always)]
    fn apart(self) -> [isize; 2] {
        [(self.image.group * size_of::<u16>()) as isize, size_of::<[u16; 2 * SIDE]>() as isize]
    }

    #[inline(always)]
    fn tile(self, step: usize, piece: usize) -> *const u8 {
        let at = self.steps[step] + piece * self.image.plane * size_of::<u16>();
        self.image.at.cast::<u8>().wrapping_add(at)
    }
}

/// Loads a tile register, from where numbers stay in the first cache or pass through it.
macro_rules! load {
    (@ $how:literal, $register:literal, $at:expr, $line:expr) => {
        asm!(
            concat!($how, " tmm", $register, ", [{at} + {line}]"),
            at = in(reg) $at, line = in(reg) $line, options(nostack, readonly)
        )
    };
    ($register:literal, $stays:expr, $at:expr, $line:expr) => {
        if $stays { load!(@ "tileloadd", $register, $at, $line) } else { load!(@ "tileloaddt1", $register, $at, $line) }
    };
}

/// Adds the products of rows in one register and columns in another to the sums in a third.
macro_rules! add {
    ($($sums:literal $rows:literal $columns:literal),*) => {
        asm!($(concat!("tdpbf16ps tmm", $sums, ", tmm", $rows, ", tmm", $columns)),*, options(nostack, nomem))
    };
}

/// `sums += a · b` (`sums = a · b` where they are not `kept`), so many steps long, with other work between four products and the next: the
/// processor multiplies meanwhile, if the work is no more than some tens of instructions. `beside` is called [`calls`] times a step.
///
/// Of numbers of three pieces six products are added up, the largest last.
///
/// # Safety
/// Steps of both operands, of `P` pieces, lie where they say; four sums lie at `sums`, which nothing else sees; this thread has
/// [`Registers`](super::amx::Registers), and `beside` uses none of them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub(super) unsafe fn multiply<A: Tiled, B: Tiled, const P: usize>(
    (a, b): (A, B),
    sums: *mut Tile,
    steps: usize,
    kept: bool,
    mut beside: impl FnMut(),
) {
    const { assert!(P == 1 || P == 3) };
    let ([a_line, low], [b_line, right]) = (a.apart(), b.apart());
    // SAFETY: the caller's promise. What is in tile registers stays there from one text to the next: no other code uses them.
    unsafe {
        // One after the other, with products between the loads: 3 % more than loads first.
        macro_rules! rows {
            ($at:ident) => {
                load!("4", A::STAYS, $at, a_line);
                add!("0" "4" "6", "1" "4" "7");
                load!("5", A::STAYS, $at.wrapping_offset(low), a_line);
                add!("2" "5" "6", "3" "5" "7");
                beside();
            };
        }
        macro_rules! columns {
            ($at:ident) => {
                load!("6", B::STAYS, $at, b_line);
                add!("0" "4" "6", "2" "5" "6");
                load!("7", B::STAYS, $at.wrapping_offset(right), b_line);
                add!("1" "4" "7", "3" "5" "7");
                beside();
            };
        }
        load_sums(sums, kept);
        for step in 0..steps {
            stay_awake();
            let (first, last) = (a.tile(step, 0), b.tile(step, P - 1));
            load!("6", B::STAYS, last, b_line);
            load!("4", A::STAYS, first, a_line);
            add!("0" "4" "6");
            load!("5", A::STAYS, first.wrapping_offset(low), a_line);
            add!("2" "5" "6");
            load!("7", B::STAYS, last.wrapping_offset(right), b_line);
            add!("1" "4" "7", "3" "5" "7");
            beside();
            if P == 3 {
                let ([second, third], [large, middle]) =
                    ([1, 2].map(|p| a.tile(step, p)), [0, 1].map(|p| b.tile(step, p)));
                columns!(middle);
                rows!(second);
                columns!(large);
                rows!(third);
                rows!(first);
            }
        }
        store_sums(sums);
    }
}

/// How often [`multiply`] calls.
pub(super) const fn calls(pieces: usize) -> usize {
    pieces * (pieces + 1) / 2
}

/// An addition in 24 products makes them a tenth faster on Intel's model 167 (675 → 750 GFLOP/s of `f32` on two cores; no integer instruction
/// does). Why is not documented; where other work lies between products, it has additions enough.
#[inline(always)]
fn stay_awake() {
    // SAFETY: zero and zero.
    unsafe { asm!("vxorps {x}, {x}, {x}", "vaddss {x}, {x}, {x}", x = out(xmm_reg) _, options(nostack, nomem)) };
}

/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn load_sums(sums: *mut Tile, kept: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        match kept {
            true => asm!(
                "tileloadd tmm0, [{sums} + {line}]",
                "tileloadd tmm1, [{sums} + {line} + 1024]",
                "tileloadd tmm2, [{sums} + {line} + 2048]",
                "tileloadd tmm3, [{sums} + {line} + 3072]",
                sums = in(reg) sums, line = in(reg) 64usize, options(nostack, readonly)
            ),
            false => asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)),
        }
    }
}

/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn store_sums(sums: *mut Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            "tilestored [{sums} + {line} + 3072], tmm3",
            sums = in(reg) sums, line = in(reg) 64usize, options(nostack)
        );
    }
}
