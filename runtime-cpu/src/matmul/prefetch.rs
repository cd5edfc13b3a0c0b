//! Asking for memory before it is needed. What a product reads and writes is as a rule in no near cache: the layers between have
//! swept through it; and a product visits many short stretches, which hardware does not foresee.

/// Numbers of type `T` in a cache line.
pub(super) const fn numbers<T>() -> usize {
    64 / size_of::<T>()
}

/// Into the first cache.
#[inline(always)]
pub(super) fn near<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has it, and it reads nothing, wherever it points.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
}
