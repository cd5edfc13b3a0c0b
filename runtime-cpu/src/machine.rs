//! The properties that the CPU reports about itself: its caches, which determine block sizes, and its maker, which
//! determines prefetch distances.

use std::sync::OnceLock;

/// The L2 size of a CPU, and its prefetch distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Machine {
    /// The bytes of L2 for one core.
    pub l2: usize,
    /// The prefetch distance of sums in bytes, or 0 where the hardware prefetcher is faster alone. `record/` has the
    /// measurements.
    pub sum_ahead: usize,
}

impl Machine {
    /// The properties of Intel's CPUs, and of CPUs that were never measured.
    const DEFAULT: Machine = Machine { l2: 1 << 20, sum_ahead: 2048 };
    /// The distance on AMD's CPUs, measured on Zen 4.
    const AMD_SUM_AHEAD: usize = 0;

    /// The properties of this machine.
    pub(crate) fn get() -> &'static Machine {
        static MACHINE: OnceLock<Machine> = OnceLock::new();
        MACHINE.get_or_init(Machine::detect)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Machine {
        let amd = cpuid::is_amd();
        let l2 = cpuid::cache(amd, 2).unwrap_or(Machine::DEFAULT.l2).clamp(256 << 10, 4 << 20);
        Machine { l2, sum_ahead: if amd { Machine::AMD_SUM_AHEAD } else { Machine::DEFAULT.sum_ahead } }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Machine {
        Machine::DEFAULT
    }
}

#[cfg(target_arch = "x86_64")]
mod cpuid {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    /// Tells whether the CPU is AMD's or of its design.
    pub(super) fn is_amd() -> bool {
        let id = __cpuid(0);
        let vendor = [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes);
        [b"AuthenticAMD", b"HygonGenuine"].contains(&vendor.as_flattened().as_array().unwrap_or(&[0; 12]))
    }

    /// The bytes of the data or unified cache of this level. Intel's leaf 4 and AMD's 0x8000_001D describe one cache in
    /// each subleaf, alike.
    pub(super) fn cache(amd: bool, level: u32) -> Option<usize> {
        let (leaf, most) = if amd { (0x8000_001D, __cpuid(0x8000_0000).eax) } else { (4, __cpuid(0).eax) };
        let found = |i| {
            let id = __cpuid_count(leaf, i);
            let (kind, size) = (id.eax & 31, [id.ebx >> 22, id.ebx >> 12 & 1023, id.ebx & 4095, id.ecx]);
            let holds_data = kind == 1 || kind == 3;
            (holds_data && id.eax >> 5 & 7 == level).then(|| size.iter().map(|&n| n as usize + 1).product())
        };
        if most < leaf { None } else { (0..8).find_map(found) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reported_is_a_cache() {
        let l2 = Machine::get().l2;
        assert!((256 << 10..=4 << 20).contains(&l2), "{l2} bytes");
    }

    /// The kernel reads the same registers.
    #[test]
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn the_kernel_reports_the_same_cache() {
        let read = |file| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index2/{file}"));
        let (Ok(level), Ok(size)) = (read("level"), read("size")) else { return };
        if let (Some(kib), "2") = (size.trim().strip_suffix('K').and_then(|n| n.parse::<usize>().ok()), level.trim()) {
            assert_eq!(Machine::get().l2, (kib << 10).clamp(256 << 10, 4 << 20));
        }
    }
}
