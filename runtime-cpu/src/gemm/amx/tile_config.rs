//! The tile configuration of a thread.

use std::arch::asm;

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
    /// [`has_amx`](crate::simd::has_amx) has returned true.
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
