//! Instruction sets. Every kernel is one generic source, compiled for each level and selected once at run time. All
//! levels compute the same bits, except in the matrix products that AMX computes and those of bf16.
//!
//! The environment variable `WEFTGRAD_MAX_CPU_ISA` (`baseline`, `avx2`, `avx512`, `avx512bf16` or `amx`) caps the level
//! for a whole process, as `ONEDNN_MAX_CPU_ISA` does for oneDNN: for tests of every level that a CPU has, and for tools
//! that support fewer instructions.

#[cfg(target_arch = "x86_64")]
mod amx;
mod transpose;

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::has_amx;
#[cfg(target_arch = "x86_64")]
pub(crate) use transpose::read_transposed;
pub(crate) use transpose::transpose;

/// An instruction set for which the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Simd {
    /// The baseline of the target, which every CPU of the target supports.
    Baseline,
    /// AVX2 with fused multiply-add and F16C.
    Avx2,
    /// AVX-512 with the extensions F, VL, BW and DQ.
    Avx512,
    /// AVX-512 with BF16 dot products, for matrix products of bf16. Their last bits differ from other levels.
    Avx512Bf16,
    /// AVX-512 with BF16, and AMX for matrix products of bf16 and of `f32`. An `f32` product splits each element into
    /// three bf16 terms and sums six products of terms. It is as precise as `f32`, with last bits that differ from
    /// other levels. (Elements below 2⁻¹²⁶ count as zero in it, and so do the last bits of elements below 2⁻¹⁰².)
    Amx,
}

impl Simd {
    /// The levels, narrowest first.
    pub const ALL: [Simd; 5] = [Simd::Baseline, Simd::Avx2, Simd::Avx512, Simd::Avx512Bf16, Simd::Amx];

    /// The highest level that this CPU supports and the cap (`WEFTGRAD_MAX_CPU_ISA`) allows.
    pub fn best() -> Simd {
        Self::ALL.into_iter().rev().find(|s| s.is_available()).unwrap_or(Simd::Baseline)
    }

    /// Tells whether this CPU supports the level, and the cap (`WEFTGRAD_MAX_CPU_ISA`) allows it.
    pub fn is_available(self) -> bool {
        self <= cap() && self.is_supported()
    }

    /// The level with this `name`; `None` if there is none.
    pub fn named(name: &str) -> Option<Simd> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }

    /// Tells whether this CPU supports the level.
    #[cfg(target_arch = "x86_64")]
    pub fn is_supported(self) -> bool {
        macro_rules! has {
            ($($f:tt)*) => { true $(&& std::arch::is_x86_feature_detected!($f))* };
        }
        let avx2 = || has!("avx2" "fma" "f16c" "bmi1" "bmi2");
        let avx512 = || avx2() && has!("avx512f" "avx512vl" "avx512bw" "avx512dq");
        match self {
            Simd::Baseline => true,
            Simd::Avx2 => avx2(),
            Simd::Avx512 => avx512(),
            Simd::Avx512Bf16 => avx512() && has!("avx512bf16"),
            Simd::Amx => Simd::Avx512Bf16.is_supported() && has_amx(),
        }
    }

    /// Tells whether this CPU supports the level.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_supported(self) -> bool {
        self == Simd::Baseline
    }

    /// The name of the level in tables and in `WEFTGRAD_MAX_CPU_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Simd::Baseline => "baseline",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
            Simd::Avx512Bf16 => "avx512bf16",
            Simd::Amx => "amx",
        }
    }
}

/// The highest level that may be used, read from the environment once.
fn cap() -> Simd {
    static CAP: OnceLock<Simd> = OnceLock::new();
    *CAP.get_or_init(|| std::env::var(CAP_VARIABLE).map_or(Simd::Amx, |name| cap_named(&name)))
}

const CAP_VARIABLE: &str = "WEFTGRAD_MAX_CPU_ISA";

/// Warns of a name that is not a level, which caps nothing: a process that requested less must not seem to have got it.
fn cap_named(name: &str) -> Simd {
    Simd::named(name).unwrap_or_else(|| {
        let names = Simd::ALL.map(Simd::name).join(", ");
        eprintln!("{CAP_VARIABLE}: `{name}` is no instruction set of weftgrad ({names}); the widest is used");
        Simd::Amx
    })
}

/// Prefetches `count` elements from `at` on into L1. The address need not be valid.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T, count: usize) {
    prefetch_into::<T, { hint::L1 }>(at, count);
}

/// Prefetches `count` elements from `at` on into L2. The address need not be valid.
#[inline(always)]
pub(crate) fn prefetch_far<T>(at: *const T, count: usize) {
    prefetch_into::<T, { hint::L2 }>(at, count);
}

/// The cache into which a prefetch loads.
#[cfg(target_arch = "x86_64")]
mod hint {
    pub(super) const L1: i32 = std::arch::x86_64::_MM_HINT_T0;
    pub(super) const L2: i32 = std::arch::x86_64::_MM_HINT_T1;
}
#[cfg(not(target_arch = "x86_64"))]
mod hint {
    pub(super) const L1: i32 = 0;
    pub(super) const L2: i32 = 1;
}

#[inline(always)]
fn prefetch_into<T, const HINT: i32>(at: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..(count * size_of::<T>()).div_ceil(64) {
        // SAFETY: every x86-64 CPU has the instruction, and a prefetch never faults, for any address.
        unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(at.wrapping_byte_add(line * 64).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, count);
}

/// A loop whose vectors the compiler interleaves: `interleaved! { for i in range => { body } }`.
///
/// LLVM interleaves the vectors of a loop with a reduction, which is the reason for the reduction in it. Where an
/// element takes many dependent instructions, the CPU's reorder window holds too few vectors to hide their latency. (In
/// cache, `exp`, `tanh` and `gelu` took 1.5, 1.3 and 1.3 times as long on Cascade Lake without.)
///
/// A macro, because a closure need not be inlined, and then has no vectors: the gradient of GELU took 12 times as long.
macro_rules! interleaved {
    (for $i:ident in $range:expr => $body:block) => {
        let mut reduced = 0;
        for $i in $range {
            $body
            reduced ^= $i as u32;
        }
        std::hint::black_box(reduced);
    };
}
pub(crate) use interleaved;

/// A function compiled for every instruction set: `multiversion! { fn f<T: (Bound)>(a: A) -> R { body } }` defines
/// `f(simd, a)`.
///
/// The body is one generic source; it and all it calls `#[inline(always)]` is compiled with each level's instructions.
macro_rules! multiversion {
    ($(
        $(#[$m:meta])*
        $vis:vis fn $name:ident $(<$($T:ident: ($($B:tt)*)),*>)? ($($a:ident: $t:ty),* $(,)?) $(-> $r:ty)? $body:block
    )*) => {$(
        $(#[$m])*
        // `simd` is one argument more than was written.
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($T: $($B)*),*>)? (simd: $crate::Simd, $($a: $t),*) $(-> $r)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn generic $(<$($T: $($B)*),*>)? ($($a: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
            #[allow(clippy::too_many_arguments)]
            fn avx2 $(<$($T: $($B)*),*>)? ($($a: $t),*) $(-> $r)? { generic$(::<$($T),*>)?($($a),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,avx512f,avx512vl,avx512bw,avx512dq")]
            #[allow(clippy::too_many_arguments)]
            fn avx512 $(<$($T: $($B)*),*>)? ($($a: $t),*) $(-> $r)? { generic$(::<$($T),*>)?($($a),*) }
            match simd {
                // SAFETY: a runtime is only built with a `Simd` that this CPU supports.
                #[cfg(target_arch = "x86_64")]
                $crate::Simd::Avx2 => unsafe { avx2$(::<$($T),*>)?($($a),*) },
                // SAFETY: a runtime is only built with a `Simd` that this CPU supports.
                #[cfg(target_arch = "x86_64")]
                $crate::Simd::Avx512 | $crate::Simd::Avx512Bf16 | $crate::Simd::Amx => unsafe { avx512$(::<$($T),*>)?($($a),*) },
                _ => generic$(::<$($T),*>)?($($a),*),
            }
        }
    )*};
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_found_by_name() {
        assert!(Simd::ALL.into_iter().all(|level| Simd::named(level.name()) == Some(level)));
        assert_eq!((Simd::named("AVX2"), cap_named("avx2"), cap_named("axv2")), (None, Simd::Avx2, Simd::Amx));
    }

    #[test]
    fn each_level_has_what_the_ones_before_it_have() {
        let supported = Simd::ALL.map(Simd::is_supported);
        assert!(supported.is_sorted_by(|a, b| a >= b), "{supported:?}");
        assert!(Simd::best().is_supported() && Simd::best() <= cap());
    }
}
