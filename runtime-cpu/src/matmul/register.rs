//! Vector registers of the instruction sets, as the innermost loop of a product needs them. Explicit, unlike in the other kernels:
//! a tile of sums written as arrays is kept in registers at some sizes and spilled at others (at 12 rows × 32 columns 60 % of the
//! peak, at 14 rows 1 %).

use crate::element::Lane;

/// A register of numbers of type `T`. Who has one has asked the processor: it is only made by functions that are unsafe for that
/// reason, so computing with it is not.
pub(crate) trait Register<T>: Copy {
    /// Numbers in a register.
    const LANES: usize;
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn splat(x: T) -> Self;
    /// # Safety
    /// As for [`splat`](Register::splat), and `LANES` numbers lie there in one operand.
    unsafe fn load(at: *const T) -> Self;
    /// # Safety
    /// `LANES` numbers lie there in one operand that nothing else sees.
    unsafe fn store(self, at: *mut T);
    fn add(self, x: Self) -> Self;
    fn mul(self, x: Self) -> Self;
    /// `self · x + y`, rounded once.
    fn mul_add(self, x: Self, y: Self) -> Self;
}

/// A number products are computed in, and its registers.
pub(crate) trait Registers: Lane {
    #[cfg(target_arch = "x86_64")]
    type Avx512: Register<Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Register<Self>;
    type Baseline: Register<Self>;
}

macro_rules! registered {
    ($t:ty, $avx512:ident $avx2:ident) => {
        impl Registers for $t {
            #[cfg(target_arch = "x86_64")]
            type Avx512 = std::arch::x86_64::$avx512;
            #[cfg(target_arch = "x86_64")]
            type Avx2 = std::arch::x86_64::$avx2;
            type Baseline = Portable<$t>;
        }

        impl Register<$t> for Portable<$t> {
            const LANES: usize = 4;
            // SAFETY: the trait says what callers promise.
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                Portable([x; 4])
            }
            // SAFETY: the trait says what callers promise.
            #[inline(always)]
            unsafe fn load(at: *const $t) -> Self {
                // SAFETY: the trait's contract.
                Portable(unsafe { at.cast::<[$t; 4]>().read() })
            }
            // SAFETY: the trait says what callers promise.
            #[inline(always)]
            unsafe fn store(self, at: *mut $t) {
                // SAFETY: the trait's contract.
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

/// What every processor has.
#[derive(Clone, Copy)]
pub(crate) struct Portable<T>([T; 4]);

registered!(f32, __m512 __m256);
registered!(f64, __m512d __m256d);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Register;

    macro_rules! registers {
        ($($register:ty: $t:ty, $lanes:literal,
            $splat:ident $load:ident $store:ident $add:ident $mul:ident $mul_add:ident;)*) => {$(
            impl Register<$t> for $register {
                const LANES: usize = $lanes;
                // SAFETY: the trait says what callers promise.
                #[inline(always)]
                unsafe fn splat(x: $t) -> Self {
                    // SAFETY: the trait's contract.
                    unsafe { $splat(x) }
                }
                // SAFETY: the trait says what callers promise.
                #[inline(always)]
                unsafe fn load(at: *const $t) -> Self {
                    // SAFETY: the trait's contract.
                    unsafe { $load(at) }
                }
                // SAFETY: the trait says what callers promise.
                #[inline(always)]
                unsafe fn store(self, at: *mut $t) {
                    // SAFETY: the trait's contract.
                    unsafe { $store(at, self) }
                }
                #[inline(always)]
                fn add(self, x: Self) -> Self {
                    // SAFETY: there is a register, so the processor has the instructions.
                    unsafe { $add(self, x) }
                }
                #[inline(always)]
                fn mul(self, x: Self) -> Self {
                    // SAFETY: there is a register, so the processor has the instructions.
                    unsafe { $mul(self, x) }
                }
                #[inline(always)]
                fn mul_add(self, x: Self, y: Self) -> Self {
                    // SAFETY: there is a register, so the processor has the instructions.
                    unsafe { $mul_add(self, x, y) }
                }
            }
        )*};
    }

    #[rustfmt::skip]
    registers! {
        __m512: f32, 16, _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_mul_ps _mm512_fmadd_ps;
        __m512d: f64, 8, _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_add_pd _mm512_mul_pd _mm512_fmadd_pd;
        __m256: f32, 8, _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_mul_ps _mm256_fmadd_ps;
        __m256d: f64, 4, _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_add_pd _mm256_mul_pd _mm256_fmadd_pd;
    }
}
