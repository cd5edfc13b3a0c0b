//! The availability of AMX on the CPU and the system, and the tile configuration of a thread.

use std::arch::asm;

/// Tells whether the CPU has the instructions.
pub(super) fn is_there() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // AMX-BF16 and AMX-TILE; and the system's flag for saving extended registers.
    const INSTRUCTIONS: u32 = 1 << 22 | 1 << 24;
    let saved = __cpuid(1).ecx & 1 << 27 != 0;
    saved && __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & INSTRUCTIONS == INSTRUCTIONS
}

/// Tells whether the CPU has AMX and the system lets this process use it. A process must request the registers, since
/// the system then saves 8 KiB of registers for each thread that uses them.
#[cfg(target_os = "linux")]
pub(crate) fn is_available() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call changes nothing but this process' permission to use these registers.
    is_there() && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// Tells that AMX is unavailable: other systems grant the registers in ways that this runtime does not know.
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

/// The configured tile registers of this thread, until dropped: the system then no longer saves them.
pub(super) struct TileConfig(());

impl TileConfig {
    /// # Safety
    /// [`is_available`] has returned true.
    pub(super) unsafe fn new() -> Self {
        // SAFETY: the caller guarantees that AMX is available; every CPU with AMX has palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const PALETTE, options(nostack, readonly)) };
        TileConfig(())
    }
}

impl Drop for TileConfig {
    fn drop(&mut self) {
        // SAFETY: `self` exists, so AMX is available.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
