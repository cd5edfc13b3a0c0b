//! SIMD vectors of the instruction sets, as the micro-kernel needs them. They are explicit, unlike in the other
//! kernels: the compiler keeps a micro-tile of accumulators written as arrays in registers at some sizes and spills it
//! at others (at 12 rows × 32 columns 60 % of the peak, at 14 rows 1 %).

use crate::element::{Lane, Stored};

/// A SIMD vector of elements of type `T`. A value of this type proves that the CPU supports it, since only unsafe
/// functions create one. So arithmetic on vectors is safe.
pub(crate) trait Vector<T>: Copy {
    /// Elements of a vector.
    const LANES: usize;
    /// # Safety
    /// The CPU supports the instruction set.
    unsafe fn splat(x: T) -> Self;
    /// # Safety
    /// The CPU supports the instruction set, and `at` is valid for reads of `LANES` elements.
    unsafe fn load(at: *const T) -> Self;
    /// # Safety
    /// `at` is valid for writes of `LANES` elements, which no other thread accesses.
    unsafe fn store(self, at: *mut T);
    fn add(self, x: Self) -> Self;
    fn mul(self, x: Self) -> Self;
    /// The sum `self · x + y`, rounded once.
    fn mul_add(self, x: Self, y: Self) -> Self;
}

/// An element type of a GEMM, and its vectors.
pub(crate) trait Vectors: Lane + Stored<Lane = Self> {
    #[cfg(target_arch = "x86_64")]
    type Avx512: Vector<Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Vector<Self>;
    type Baseline: Vector<Self>;
}

macro_rules! vectorized {
    ($t:ty, $avx512:ident $avx2:ident) => {
        impl Vectors for $t {
            #[cfg(target_arch = "x86_64")]
            type Avx512 = std::arch::x86_64::$avx512;
            #[cfg(target_arch = "x86_64")]
            type Avx2 = std::arch::x86_64::$avx2;
            type Baseline = Portable<$t>;
        }

        impl Vector<$t> for Portable<$t> {
            const LANES: usize = 4;
            // SAFETY: `Vector` states what callers guarantee.
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                Portable([x; 4])
            }
            // SAFETY: `Vector` states what callers guarantee.
            #[inline(always)]
            unsafe fn load(at: *const $t) -> Self {
                // SAFETY: the caller guarantees the instruction set, and `LANES` valid elements where there is a
                // pointer.
                Portable(unsafe { at.cast::<[$t; 4]>().read() })
            }
            // SAFETY: `Vector` states what callers guarantee.
            #[inline(always)]
            unsafe fn store(self, at: *mut $t) {
                // SAFETY: the caller guarantees the instruction set, and `LANES` valid elements where there is a
                // pointer.
                unsafe { at.cast::<[$t; 4]>().write(self.0) }
            }
            #[inline(always)]
            fn add(self, x: Self) -> Self {
                Portable(std::array::from_fn(|i| self.0[i] + x.0[i]))
            }
            #[inline(always)]
            fn mul(self, x: Self) -> Self {
                Portable(std::array::from_fn(|i| self.0[i] * x.0[i]))
            }
            #[inline(always)]
            fn mul_add(self, x: Self, y: Self) -> Self {
                Portable(std::array::from_fn(|i| self.0[i].mul_add(x.0[i], y.0[i])))
            }
        }
    };
}

/// Four elements as an array, for CPUs without vector instructions.
#[derive(Clone, Copy)]
pub(crate) struct Portable<T>([T; 4]);

vectorized!(f32, __m512 __m256);
vectorized!(f64, __m512d __m256d);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Vector;

    macro_rules! vectors {
        ($($register:ty: $t:ty, $lanes:literal,
            $splat:ident $load:ident $store:ident $add:ident $mul:ident $mul_add:ident;)*) => {$(
            impl Vector<$t> for $register {
                const LANES: usize = $lanes;
                // SAFETY: `Vector` states what callers guarantee.
                #[inline(always)]
                unsafe fn splat(x: $t) -> Self {
                    // SAFETY: the caller guarantees the instruction set, and `LANES` valid elements where there is a
                    // pointer.
                    unsafe { $splat(x) }
                }
                // SAFETY: `Vector` states what callers guarantee.
                #[inline(always)]
                unsafe fn load(at: *const $t) -> Self {
                    // SAFETY: the caller guarantees the instruction set, and `LANES` valid elements where there is a
                    // pointer.
                    unsafe { $load(at) }
                }
                // SAFETY: `Vector` states what callers guarantee.
                #[inline(always)]
                unsafe fn store(self, at: *mut $t) {
                    // SAFETY: the caller guarantees the instruction set, and `LANES` valid elements where there is a
                    // pointer.
                    unsafe { $store(at, self) }
                }
                #[inline(always)]
                fn add(self, x: Self) -> Self {
                    // SAFETY: `self` exists, so the CPU supports the instruction set.
                    unsafe { $add(self, x) }
                }
                #[inline(always)]
                fn mul(self, x: Self) -> Self {
                    // SAFETY: `self` exists, so the CPU supports the instruction set.
                    unsafe { $mul(self, x) }
                }
                #[inline(always)]
                fn mul_add(self, x: Self, y: Self) -> Self {
                    // SAFETY: `self` exists, so the CPU supports the instruction set.
                    unsafe { $mul_add(self, x, y) }
                }
            }
        )*};
    }

    #[rustfmt::skip]
    vectors! {
        __m512: f32, 16, _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_mul_ps _mm512_fmadd_ps;
        __m512d: f64, 8, _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_add_pd _mm512_mul_pd _mm512_fmadd_pd;
        __m256: f32, 8, _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_mul_ps _mm256_fmadd_ps;
        __m256d: f64, 4, _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_add_pd _mm256_mul_pd _mm256_fmadd_pd;
    }
}
