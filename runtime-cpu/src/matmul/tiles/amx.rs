//! AMX: products of tiles of 16 × 16 sums. The compiler has no such instructions, the assembler does.

use std::arch::asm;

use super::{SIDE, Tile, image::Image, pack::Strip};

/// Whether the processor has the instructions.
pub(super) fn is_there() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // BF16 and TILE; before it, the system's flag for saving extended registers.
    const INSTRUCTIONS: u32 = 1 << 22 | 1 << 24;
    let saved = __cpuid(1).ecx & 1 << 27 != 0;
    saved && __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & INSTRUCTIONS == INSTRUCTIONS
}

/// Whether they are there and the system lets this process use them, for which it must be asked: it then keeps 8 KiB of registers for
/// each thread that uses them.
#[cfg(target_os = "linux")]
pub(crate) fn is_available() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call changes nothing but this process' permission to use these registers.
    is_there() && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// How other systems grant the registers is not known here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_available() -> bool {
    false
}

/// Palette 1, and eight registers of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Palette([u8; 64]);

static PALETTE: Palette = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Palette(bytes)
};

/// The tile registers of this thread, until dropped: the system then no longer saves them.
pub(super) struct Registers(());

impl Registers {
    /// # Safety
    /// [`is_available`].
    pub(super) unsafe fn new() -> Self {
        // SAFETY: the caller's promise; the palette is one the processor has.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const PALETTE, options(nostack, readonly)) };
        Registers(())
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: there are registers, so the processor has the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

macro_rules! kernel {
    ($name:ident, step of $tiles:literal tiles, sums: [$(($sum:literal, $at:literal)),*], $($step:expr),* $(,)?) => {
        /// `sums += a · b` (`sums = a · b` where there are none yet), `steps` tiles long.
        ///
        /// # Safety
        /// The strip has its rows and steps, so many tiles a step lie at `b`, four sums at `sums`, which nothing else sees.
        unsafe fn $name(a: Strip, b: *const Tile, sums: *mut Tile, steps: usize, more: bool) {
            // SAFETY: the caller's promise; every register the text writes is named.
            unsafe {
                asm!(
                    "test {more:e}, {more:e}",
                    "jnz 2f",
                    $(concat!("tilezero tmm", $sum),)*
                    "jmp 3f",
                    "2:",
                    $(concat!("tileloadd tmm", $sum, ", [{sums} + {line} + ", $at, "]"),)*
                    "3:",
                    $($step,)*
                    "add {a}, {step}",
                    "add {low}, {step}",
                    concat!("add {b}, 1024 * ", $tiles),
                    "dec {steps}",
                    "jnz 3b",
                    $(concat!("tilestored [{sums} + {line} + ", $at, "], tmm", $sum),)*
                    a = inout(reg) a.at => _,
                    low = inout(reg) a.at.wrapping_byte_offset(a.line * SIDE as isize) => _,
                    across = in(reg) a.line,
                    step = in(reg) a.step,
                    b = inout(reg) b => _,
                    steps = inout(reg) steps => _,
                    sums = in(reg) sums,
                    line = in(reg) 64usize,
                    more = in(reg) u32::from(more),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

// Columns come from the second cache and are marked as not to be kept in the first, where the strip stays: 2000 instead of 1500 GFLOP/s
// at 16 steps. Products between the loads: 3 % more.
macro_rules! load {
    (a 0, $piece:literal) => {
        concat!("tileloadd tmm4, [{a} + {across} + 2048 * ", $piece, "]\n")
    };
    (a 1, $piece:literal) => {
        concat!("tileloadd tmm5, [{low} + {across} + 2048 * ", $piece, "]\n")
    };
    (b 0, $piece:literal) => {
        concat!("tileloaddt1 tmm6, [{b} + {line} + 2048 * ", $piece, "]\n")
    };
    (b 1, $piece:literal) => {
        concat!("tileloaddt1 tmm7, [{b} + {line} + 1024 + 2048 * ", $piece, "]\n")
    };
}
macro_rules! multiply {
    (0 0) => {
        "tdpbf16ps tmm0, tmm4, tmm6\n"
    };
    (0 1) => {
        "tdpbf16ps tmm1, tmm4, tmm7\n"
    };
    (1 0) => {
        "tdpbf16ps tmm2, tmm5, tmm6\n"
    };
    (1 1) => {
        "tdpbf16ps tmm3, tmm5, tmm7\n"
    };
}

/// Kernels of one and two tiles of rows by one and two of columns: products of the loaded pieces of both sides, and after other pieces of one
/// side were loaded.
macro_rules! both {
    (one: $a:literal, $b:literal) => {
        concat!(load!(b 0, $b), load!(a 0, $a), multiply!(0 0))
    };
    (wide: $a:literal, $b:literal) => {
        concat!(both!(one: $a, $b), load!(b 1, $b), multiply!(0 1))
    };
    (high: $a:literal, $b:literal) => {
        concat!(both!(one: $a, $b), load!(a 1, $a), multiply!(1 0))
    };
    (full: $a:literal, $b:literal) => {
        concat!(both!(high: $a, $b), load!(b 1, $b), multiply!(0 1), multiply!(1 1))
    };
}
macro_rules! other_rows {
    (one: $a:literal) => {
        concat!(load!(a 0, $a), multiply!(0 0))
    };
    (wide: $a:literal) => {
        concat!(other_rows!(one: $a), multiply!(0 1))
    };
    (high: $a:literal) => {
        concat!(other_rows!(one: $a), load!(a 1, $a), multiply!(1 0))
    };
    (full: $a:literal) => {
        concat!(other_rows!(wide: $a), load!(a 1, $a), multiply!(1 0), multiply!(1 1))
    };
}
macro_rules! other_columns {
    (one: $b:literal) => {
        concat!(load!(b 0, $b), multiply!(0 0))
    };
    (wide: $b:literal) => {
        concat!(other_columns!(one: $b), load!(b 1, $b), multiply!(0 1))
    };
    (high: $b:literal) => {
        concat!(other_columns!(one: $b), multiply!(1 0))
    };
    (full: $b:literal) => {
        concat!(other_columns!(high: $b), load!(b 1, $b), multiply!(0 1), multiply!(1 1))
    };
}
macro_rules! kernels {
    ($($one:ident, $three:ident: $shape:ident, $sums:tt;)*) => {$(
        kernel!($one, step of 2 tiles, sums: $sums, both!($shape: 0, 0));
        // Six products of three pieces, the largest last.
        kernel!(
            $three, step of 6 tiles, sums: $sums, both!($shape: 0, 2), other_columns!($shape: 1), other_rows!($shape: 1),
            other_columns!($shape: 0), other_rows!($shape: 2), other_rows!($shape: 0),
        );
    )*};
}
kernels! {
    one, one_of_three: one, [(0, 0)];
    wide, wide_of_three: wide, [(0, 0), (1, 1024)];
    high, high_of_three: high, [(0, 0), (2, 2048)];
    full, full_of_three: full, [(0, 0), (1, 1024), (2, 2048), (3, 3072)];
}

/// A strip against a panel, of numbers of one or three pieces, as [`super::block`] wants it: `steps > 0`.
///
/// # Safety
/// As for the kernels; this thread has [`Registers`].
pub(super) unsafe fn multiply<const P: usize>(
    a: Strip,
    b: *const Tile,
    sums: *mut Tile,
    steps: usize,
    more: bool,
    tiles: [usize; 2],
) {
    const { assert!(P == 1 || P == 3) };
    let kernel = match (tiles, P) {
        ([1, 1], 1) => one,
        ([1, _], 1) => wide,
        ([_, 1], 1) => high,
        (_, 1) => full,
        ([1, 1], _) => one_of_three,
        ([1, _], _) => wide_of_three,
        ([_, 1], _) => high_of_three,
        _ => full_of_three,
    };
    // SAFETY: the caller's promise.
    unsafe { kernel(a, b, sums, steps, more) }
}

macro_rules! part {
    ($text:expr $(, $name:ident: $value:expr)*) => {
        asm!(
            $text,
            $($name = in(reg) $value,)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// [`multiply`] of packed operands, two tiles by two, with other work between four products and the next: the processor computes them
/// meanwhile, if the work is no more than some tens of instructions. `beside` is called [`calls`] times a step.
///
/// # Safety
/// As for [`multiply`]; `beside` uses no tile registers.
#[inline]
pub(super) unsafe fn multiply_beside<const P: usize>(
    mut a: *const Tile,
    mut b: *const Tile,
    sums: *mut Tile,
    steps: usize,
    more: bool,
    mut beside: impl FnMut(),
) {
    const { assert!(P == 1 || P == 3) };
    let line = 64usize;
    // SAFETY: the caller's promise. What is in these registers stays there from one text to the next: no other code uses them.
    unsafe {
        match more {
            true => part!(
                "tileloadd tmm0, [{sums} + {line}]\n tileloadd tmm1, [{sums} + {line} + 1024]\n \
                 tileloadd tmm2, [{sums} + {line} + 2048]\n tileloadd tmm3, [{sums} + {line} + 3072]",
                sums: sums, line: line
            ),
            false => part!("tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3"),
        }
        for _ in 0..steps {
            let low = a.add(1);
            if P == 1 {
                part!(both!(full: 0, 0), a: a, low: low, across: line, b: b, line: line);
                beside();
            } else {
                part!(both!(full: 0, 2), a: a, low: low, across: line, b: b, line: line);
                beside();
                part!(other_columns!(full: 1), b: b, line: line);
                beside();
                part!(other_rows!(full: 1), a: a, low: low, across: line);
                beside();
                part!(other_columns!(full: 0), b: b, line: line);
                beside();
                part!(other_rows!(full: 2), a: a, low: low, across: line);
                beside();
                part!(other_rows!(full: 0), a: a, low: low, across: line);
                beside();
            }
            (a, b) = (a.add(2 * P), b.add(2 * P));
        }
        part!(
            "tilestored [{sums} + {line}], tmm0\n tilestored [{sums} + {line} + 1024], tmm1\n \
             tilestored [{sums} + {line} + 2048], tmm2\n tilestored [{sums} + {line} + 3072], tmm3",
            sums: sums, line: line
        );
    }
}

/// How often [`multiply_beside`] calls.
pub(super) const fn calls(pieces: usize) -> usize {
    pieces * (pieces + 1) / 2
}

/// Kernels of one and two tiles of packed rows by two tiles of an image, whose places are looked up.
macro_rules! high {
    (wide: $($text:expr),*) => {
        ""
    };
    (full: $($text:expr),*) => {
        concat!($($text),*)
    };
}
macro_rules! packed_rows {
    ($shape:ident: $a:literal) => {
        concat!(
            "tileloaddt1 tmm4, [{a} + {line} + 2048 * ", $a, "]\n", multiply!(0 0), multiply!(0 1),
            high!($shape: "tileloaddt1 tmm5, [{a} + {line} + 1024 + 2048 * ", $a, "]\n", multiply!(1 0), multiply!(1 1)),
        )
    };
}
macro_rules! image_columns {
    ($shape:ident) => {
        concat!(
            "tileloadd tmm6, [{b} + {across}]\n", multiply!(0 0), high!($shape: multiply!(1 0)),
            "tileloadd tmm7, [{b} + {across} + 64]\n", multiply!(0 1), high!($shape: multiply!(1 1)),
        )
    };
}
macro_rules! image_kernel {
    ($name:ident: $shape:ident, sums: [$(($sum:literal, $at:literal)),*]) => {
        /// # Safety
        /// As for [`multiply_image`].
        unsafe fn $name(a: *const Tile, image: Image, steps: &[usize], sums: *mut Tile) {
            let piece = image.plane * size_of::<u16>();
            // SAFETY: the caller's promise; every register the text writes is named.
            unsafe {
                asm!(
                    $(concat!("tilezero tmm", $sum),)*
                    "2:",
                    "mov {b}, [{steps}]",
                    "add {b}, {image}",
                    // The order of products is that of packed columns.
                    "tileloadd tmm6, [{b} + {across}]",
                    "tileloadd tmm7, [{b} + {across} + 64]",
                    packed_rows!($shape: 0),
                    "sub {b}, {piece}",
                    image_columns!($shape),
                    packed_rows!($shape: 1),
                    "sub {b}, {piece}",
                    image_columns!($shape),
                    packed_rows!($shape: 2),
                    packed_rows!($shape: 0),
                    "add {a}, 1024 * 6",
                    "add {steps}, 8",
                    "cmp {steps}, {end}",
                    "jne 2b",
                    $(concat!("tilestored [{sums} + {line} + ", $at, "], tmm", $sum),)*
                    a = inout(reg) a => _,
                    b = out(reg) _,
                    image = in(reg) image.at.wrapping_byte_add(2 * piece),
                    across = in(reg) image.group * size_of::<u16>(),
                    piece = in(reg) piece,
                    steps = inout(reg) steps.as_ptr() => _,
                    end = in(reg) steps.as_ptr_range().end,
                    sums = in(reg) sums,
                    line = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}
image_kernel!(wide_image: wide, sums: [(0, 0), (1, 1024)]);
image_kernel!(full_image: full, sums: [(0, 0), (1, 1024), (2, 2048), (3, 3072)]);

/// A packed strip of one or two tiles of rows against 32 neighbours of an image, of which two channels' numbers lie side by side: in the
/// bytes from the first of them on that each step names.
///
/// # Safety
/// Six tiles a step lie at `a`, 16 pairs of channels at each step, four sums at `sums`, which nothing else sees; there is a step, and this thread
/// has [`Registers`].
pub(super) unsafe fn multiply_image(a: *const Tile, image: Image, steps: &[usize], sums: *mut Tile, tiles: usize) {
    debug_assert!(!steps.is_empty());
    // SAFETY: the caller's promise.
    unsafe { if tiles == 1 { wide_image(a, image, steps, sums) } else { full_image(a, image, steps, sums) } }
}
