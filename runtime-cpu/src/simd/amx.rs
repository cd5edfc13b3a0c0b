//! The availability of AMX on the CPU and the system.

/// Tells whether the CPU has the instructions.
pub(crate) fn has_amx_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // AMX-BF16 and AMX-TILE; and the system's flag for saving extended registers.
    const INSTRUCTIONS: u32 = 1 << 22 | 1 << 24;
    let saved = __cpuid(1).ecx & 1 << 27 != 0;
    saved && __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & INSTRUCTIONS == INSTRUCTIONS
}

/// Tells whether the CPU has AMX and the system lets this process use it. A process must request the registers, since
/// the system then saves 8 KiB of registers for each thread that uses them.
#[cfg(target_os = "linux")]
pub(crate) fn has_amx() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call changes nothing but this process' permission to use these registers.
    has_amx_instructions() && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// Tells that AMX is unavailable: other systems grant the registers in ways that this runtime does not know.
#[cfg(not(target_os = "linux"))]
pub(crate) fn has_amx() -> bool {
    false
}
