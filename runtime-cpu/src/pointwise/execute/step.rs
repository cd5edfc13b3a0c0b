//! Steps: one operation on a block. Each is a plain loop over an element function, compiled for every instruction set.
//!
//! Operands of a step never overlap its destination (lowering guarantees it), so the loop can be vectorized.

use crate::pointwise::random::random_bits;
use crate::{Simd, element::Lane, math, simd::interleaved};

/// A step, which computes `d[i] = f(a[i], b[i], c[i])` for `i` in `0..n`; operands that the operation does not take are
/// ignored.
///
/// # Safety
/// The operands it takes hold `n` elements of its types, aligned; `d` too, and overlaps none of them.
pub(crate) type StepFn = unsafe fn(d: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize);

/// Defines a function of this name for each level, and the choice among them.
macro_rules! step {
    ($(#[$m:meta])* $name:ident [$($T:ident: ($($B:tt)*)),*] |$d:ident, $a:ident, $b:ident, $c:ident, $n:ident| $body:expr) => {
        $(#[$m])*
        pub(in crate::pointwise) fn $name<$($T: $($B)*),*>(simd: Simd) -> StepFn {
            /// # Safety
            /// [`StepFn`] states what callers guarantee.
            #[inline(always)]
            unsafe fn generic<$($T: $($B)*),*>($d: *mut u8, $a: *const u8, $b: *const u8, $c: *const u8, $n: usize) { $body }
            /// # Safety
            /// [`StepFn`] states what callers guarantee; the CPU supports these instructions.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
            unsafe fn avx2<$($T: $($B)*),*>(d: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
                // SAFETY: the caller upholds the contract of `StepFn`.
                unsafe { generic::<$($T),*>(d, a, b, c, n) }
            }
            /// # Safety
            /// [`StepFn`] states what callers guarantee; the CPU supports these instructions.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,avx512f,avx512vl,avx512bw,avx512dq")]
            unsafe fn avx512<$($T: $($B)*),*>(d: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
                // SAFETY: the caller upholds the contract of `StepFn`.
                unsafe { generic::<$($T),*>(d, a, b, c, n) }
            }
            match simd {
                #[cfg(target_arch = "x86_64")]
                Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => avx512::<$($T),*>,
                #[cfg(target_arch = "x86_64")]
                Simd::Avx2 => avx2::<$($T),*>,
                _ => generic::<$($T),*>,
            }
        }
    };
}

/// A function of one element.
pub(in crate::pointwise) trait Map1<A, D> {
    fn f(a: A) -> D;
}

/// A function whose vector form does not hold for every argument.
pub(in crate::pointwise) trait Patched: Map1<f64, f64> {
    /// Tells whether `x` needs [`exact`](Patched::exact).
    fn beyond(x: f64) -> bool;
    /// The function by scalar code.
    fn exact(x: f64) -> f64;
}

/// A function of two elements.
pub(in crate::pointwise) trait Map2<A, B, D> {
    fn f(a: A, b: B) -> D;
}

/// A function of three elements.
pub(in crate::pointwise) trait Map3<A, B, C, D> {
    fn f(a: A, b: B, c: C) -> D;
}

step! { map1 [A: (Copy), D: (Copy), F: (Map1<A, D>)] |d, a, _b, _c, n| {
    // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
    let (d, a) = unsafe { (out::<D>(d, n), operand::<A>(a, n)) };
    loop1::<A, D, F>(d, a)
} }

step! {
    /// A map like [`map1`] of a function with many instructions that wait for each other.
    long1 [A: (Copy), D: (Copy), F: (Map1<A, D>)] |d, a, _b, _c, n| {
        // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
        let (d, a) = unsafe { (out::<D>(d, n), operand::<A>(a, n)) };
        interleaved! { for i in 0..n => { d[i] = F::f(a[i]); } }
    }
}

step! {
    /// A map like [`map1`] of `f64`, followed by scalar recomputation where [`Patched::beyond`] holds.
    patched [F: (Patched)] |d, a, _b, _c, n| {
        // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
        let (d, a) = unsafe { (out::<f64>(d, n), operand::<f64>(a, n)) };
        loop1::<f64, f64, F>(d, a);
        if a.iter().fold(false, |any, &x| any | F::beyond(x)) {
            patch::<F>(d, a);
        }
    }
}

step! { map2 [A: (Copy), B: (Copy), D: (Copy), F: (Map2<A, B, D>)] |d, a, b, _c, n| {
    // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
    let (d, a, b) = unsafe { (out::<D>(d, n), operand::<A>(a, n), operand::<B>(b, n)) };
    loop2::<A, B, D, F>(d, a, b)
} }

step! { map3 [A: (Copy), B: (Copy), C: (Copy), D: (Copy), F: (Map3<A, B, C, D>)] |d, a, b, c, n| {
    // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
    let (d, a, b, c) = unsafe { (out::<D>(d, n), operand::<A>(a, n), operand::<B>(b, n), operand::<C>(c, n)) };
    loop3::<A, B, C, D, F>(d, a, b, c)
} }

step! {
    /// Computes `d[i] = f(d[i], a[i])`.
    fold [A: (Copy), D: (Copy), F: (Map2<D, A, D>)] |d, a, _b, _c, n| {
        // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
        let (d, a) = unsafe { (out::<D>(d, n), operand::<A>(a, n)) };
        fold_loop::<A, D, F>(d, a)
    }
}

step! {
    /// Copies the elements.
    copy [T: (Copy)] |d, a, _b, _c, n| {
        // SAFETY: the caller guarantees `n` elements of each operand, and a destination that overlaps none.
        unsafe { std::ptr::copy_nonoverlapping(a, d, n * size_of::<T>()) }
    }
}

step! {
    /// Random bits (`u32`) for positions `a`, a seed at `b` and a stream at `c` (`u64` each): word `i % 4` of Philox at
    /// counter `i / 4`.
    random [] |d, a, b, c, n| {
        // SAFETY: the caller guarantees `n` elements of `d` and `a`, and one of `b` and `c`.
        let (d, a, seed, stream) = unsafe { (out::<u32>(d, n), operand::<i64>(a, n), *b.cast::<u64>(), *c.cast::<u64>()) };
        random_bits(d, a, seed, stream as u32)
    }
}

/// # Safety
/// `p` is valid for reads of `n` aligned elements.
#[inline(always)]
unsafe fn operand<'a, T>(p: *const u8, n: usize) -> &'a [T] {
    // SAFETY: the caller guarantees `n` aligned elements.
    unsafe { std::slice::from_raw_parts(p.cast(), n) }
}

/// # Safety
/// `p` is valid for writes of `n` aligned elements, to which nothing else refers.
#[inline(always)]
unsafe fn out<'a, T>(p: *mut u8, n: usize) -> &'a mut [T] {
    // SAFETY: the caller guarantees `n` aligned elements.
    unsafe { std::slice::from_raw_parts_mut(p.cast(), n) }
}

#[inline(always)]
fn loop1<A: Copy, D, F: Map1<A, D>>(d: &mut [D], a: &[A]) {
    for (d, &a) in d.iter_mut().zip(a) {
        *d = F::f(a);
    }
}

#[cold]
fn patch<F: Patched>(d: &mut [f64], a: &[f64]) {
    for (d, &x) in d.iter_mut().zip(a).filter(|(_, x)| F::beyond(**x)) {
        *d = F::exact(x);
    }
}

#[inline(always)]
fn loop2<A: Copy, B: Copy, D, F: Map2<A, B, D>>(d: &mut [D], a: &[A], b: &[B]) {
    for ((d, &a), &b) in d.iter_mut().zip(a).zip(b) {
        *d = F::f(a, b);
    }
}

#[inline(always)]
fn loop3<A: Copy, B: Copy, C: Copy, D, F: Map3<A, B, C, D>>(d: &mut [D], a: &[A], b: &[B], c: &[C]) {
    for (((d, &a), &b), &c) in d.iter_mut().zip(a).zip(b).zip(c) {
        *d = F::f(a, b, c);
    }
}

#[inline(always)]
fn fold_loop<A: Copy, D: Copy, F: Map2<D, A, D>>(d: &mut [D], a: &[A]) {
    for (d, &a) in d.iter_mut().zip(a) {
        *d = F::f(*d, a);
    }
}

/// Sine, cosine and tangent of `f64`: beyond [`math::TRIG_LIMIT`] by the host reference, whose reduction (Payne and
/// Hanek 1983) is accurate for every value.
pub(in crate::pointwise) mod trig {
    use numcore::pointwise::{Number, Unary};

    use super::{Map1, Patched};
    use crate::math::{Math, TRIG_LIMIT};

    macro_rules! trig {
        ($($name:ident $f:ident;)*) => {$(
            pub(in crate::pointwise) struct $name;
            impl Map1<f64, f64> for $name {
                #[inline(always)]
                fn f(x: f64) -> f64 {
                    Math::$f(x)
                }
            }
            impl Patched for $name {
                #[inline(always)]
                fn beyond(x: f64) -> bool {
                    x.abs() > TRIG_LIMIT
                }
                fn exact(x: f64) -> f64 {
                    Unary::$name.eval(Number::Float(x)).to_f64()
                }
            }
        )*};
    }
    trig! { Sin sin; Cos cos; Tan tan; }
}

/// Loads and stores of floats narrower than `f32`, and accumulation into them.
pub(in crate::pointwise) mod narrow {
    use numcore::float8::{E4M3, E5M2};

    use super::*;

    /// A format narrower than `f32`.
    pub(in crate::pointwise) trait Narrow {
        /// The bits of an element.
        type Bits: Copy;
        fn widen(x: Self::Bits) -> f32;
        fn round(x: f32) -> Self::Bits;
    }

    macro_rules! narrow {
        ($name:ident $bits:ident $widen:path, $round:path) => {
            impl Narrow for $name {
                type Bits = $bits;
                #[inline(always)]
                fn widen(x: $bits) -> f32 {
                    $widen(x)
                }
                #[inline(always)]
                fn round(x: f32) -> $bits {
                    $round(x)
                }
            }
        };
    }
    pub(in crate::pointwise) struct F16;
    pub(in crate::pointwise) struct Bf16;
    narrow!(F16 u16 math::f16_to_f32, math::f32_to_f16);
    narrow!(Bf16 u16 math::bf16_to_f32, math::f32_to_bf16);
    narrow!(E4M3 u8 E4M3::decode, E4M3::encode);
    narrow!(E5M2 u8 E5M2::decode, E5M2::encode);

    /// Loads, stores, rounding in place, accumulation: selected by the trait.
    pub(in crate::pointwise) struct Of<H>(H);
    impl<H: Narrow> Map1<H::Bits, f32> for Of<H> {
        #[inline(always)]
        fn f(a: H::Bits) -> f32 {
            H::widen(a)
        }
    }
    impl<H: Narrow> Map2<H::Bits, f32, H::Bits> for Of<H> {
        #[inline(always)]
        fn f(d: H::Bits, a: f32) -> H::Bits {
            H::round(H::widen(d) + a)
        }
    }
    /// Stores: `f32` to the bits of an element.
    pub(in crate::pointwise) struct Rounded<H>(H);
    impl<H: Narrow> Map1<f32, H::Bits> for Rounded<H> {
        #[inline(always)]
        fn f(a: f32) -> H::Bits {
            H::round(a)
        }
    }
}

/// The sum `d + a`, for [`fold`].
pub(in crate::pointwise) struct Sum;
impl<T: Lane> Map2<T, T, T> for Sum {
    #[inline(always)]
    fn f(d: T, a: T) -> T {
        d.add(a)
    }
}
