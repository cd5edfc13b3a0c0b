//! Stored element types and the lanes they are computed in, for the kernels that are not pointwise programs.

use half::{bf16, f16};

use crate::math;

/// An element as it is stored in memory.
pub(crate) trait Stored: Copy + Send + Sync + 'static {
    /// The type it is computed in.
    type Lane: Lane;
    /// True if it is stored in the type in which it is computed.
    const IS_LANE: bool;
    fn load(self) -> Self::Lane;
    fn store(x: Self::Lane) -> Self;
    /// The elements as lanes, if they are stored in the type they are computed in.
    fn lanes(x: &[Self]) -> Option<&[Self::Lane]>;
    /// The elements as lanes for writing, if they are stored in the type they are computed in.
    fn lanes_mut(x: &mut [Self]) -> Option<&mut [Self::Lane]>;
}

/// A type of arithmetic. Integers wrap; the larger and the smaller of two let NaN win.
pub(crate) trait Lane: Copy + PartialEq + Default + Send + Sync + 'static {
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;
    const HIGHEST: Self;
    fn add(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    fn max(self, o: Self) -> Self;
    fn min(self, o: Self) -> Self;
    fn is_nan(self) -> bool;
    /// A key whose unsigned order is the order of the values: equal values have equal keys, NaN the largest.
    fn key(self) -> u64;
}

macro_rules! float {
    ($t:ty, $bits:ty, $signed:ty) => {
        impl Lane for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = <$t>::NEG_INFINITY;
            const HIGHEST: Self = <$t>::INFINITY;
            #[inline(always)]
            fn add(self, o: Self) -> Self {
                self + o
            }
            #[inline(always)]
            fn mul(self, o: Self) -> Self {
                self * o
            }
            // The first comparison keeps a NaN on the left, the second takes one on the right.
            #[inline(always)]
            fn max(self, o: Self) -> Self {
                if self >= o || self.is_nan() { self } else { o }
            }
            #[inline(always)]
            fn min(self, o: Self) -> Self {
                if self <= o || self.is_nan() { self } else { o }
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                <$t>::is_nan(self)
            }
            #[inline(always)]
            fn key(self) -> u64 {
                const TOP: $bits = 1 << (<$bits>::BITS - 1);
                if self.is_nan() {
                    return <$bits>::MAX as u64;
                }
                let bits = (self + 0.0).to_bits();
                (if bits & TOP == 0 { bits | TOP } else { !bits }) as u64
            }
        }
    };
}
float!(f32, u32, i32);
float!(f64, u64, i64);

macro_rules! int {
    ($($t:ty, $flip:expr;)*) => {$(
        impl Lane for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const LOWEST: Self = <$t>::MIN;
            const HIGHEST: Self = <$t>::MAX;
            #[inline(always)]
            fn add(self, o: Self) -> Self {
                self.wrapping_add(o)
            }
            #[inline(always)]
            fn mul(self, o: Self) -> Self {
                self.wrapping_mul(o)
            }
            #[inline(always)]
            fn max(self, o: Self) -> Self {
                if self >= o { self } else { o }
            }
            #[inline(always)]
            fn min(self, o: Self) -> Self {
                if self <= o { self } else { o }
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                false
            }
            #[inline(always)]
            fn key(self) -> u64 {
                (self as i64 as u64) ^ $flip
            }
        }
    )*};
}
int! { i32, 1 << 63; i64, 1 << 63; u32, 0; u8, 0; }

macro_rules! same {
    ($($t:ty),*) => {$(
        impl Stored for $t {
            type Lane = $t;
            const IS_LANE: bool = true;
            #[inline(always)]
            fn load(self) -> $t {
                self
            }
            #[inline(always)]
            fn store(x: $t) -> $t {
                x
            }
            fn lanes(x: &[Self]) -> Option<&[$t]> {
                Some(x)
            }
            fn lanes_mut(x: &mut [Self]) -> Option<&mut [$t]> {
                Some(x)
            }
        }
    )*};
}
same!(f32, f64, i32, i64, u32, u8);

macro_rules! narrow {
    ($($t:ty, $widen:ident, $round:ident;)*) => {$(
        impl Stored for $t {
            type Lane = f32;
            const IS_LANE: bool = false;
            #[inline(always)]
            fn load(self) -> f32 {
                math::$widen(self.to_bits())
            }
            #[inline(always)]
            fn store(x: f32) -> $t {
                <$t>::from_bits(math::$round(x))
            }
            fn lanes(_: &[Self]) -> Option<&[f32]> {
                None
            }
            fn lanes_mut(_: &mut [Self]) -> Option<&mut [f32]> {
                None
            }
        }
    )*};
}
narrow! { f16, f16_to_f32, f32_to_f16; bf16, bf16_to_f32, f32_to_bf16; }

/// Evaluates an expression with a type alias for the stored form of an element type; `bool` and 8-bit floats
/// are stored as `u8`.
macro_rules! by_dtype {
    ($dtype:expr, $T:ident => $e:expr) => {
        by_dtype!(@ $dtype, $T => $e; F32 f32, F64 f64, F16 half::f16, BF16 half::bf16, I32 i32, I64 i64, U32 u32, U8 u8, Bool u8, F8E4M3 u8, F8E5M2 u8)
    };
    (@ $dtype:expr, $T:ident => $e:expr; $($d:ident $t:ty),*) => {
        match $dtype { $(numcore::DType::$d => { type $T = $t; $e })* }
    };
}
pub(crate) use by_dtype;

/// Calls a generic function for a dtype, like [`by_dtype`], with the type that an element is computed in.
macro_rules! by_lane {
    ($dtype:expr, $T:ident => $e:expr) => {
        by_lane!(@ $dtype, $T => $e; F32|F16|BF16|F8E4M3|F8E5M2 f32, F64 f64, I32 i32, I64 i64, U32 u32, U8|Bool u8)
    };
    (@ $dtype:expr, $T:ident => $e:expr; $($($d:ident)|+ $t:ty),*) => {
        match $dtype { $($(numcore::DType::$d)|+ => { type $T = $t; $e })* }
    };
}
pub(crate) use by_lane;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_the_numbers_do() {
        let f = [f64::NEG_INFINITY, -1.5, -f64::MIN_POSITIVE, 0.0, 1e-310, 2.0, f64::INFINITY, f64::NAN];
        assert!(f.windows(2).all(|w| w[0].key() < w[1].key()));
        assert!(f.windows(2).all(|w| (w[0] as f32).key() <= (w[1] as f32).key()));
        assert_eq!((-0.0f32).key(), 0.0f32.key());
        assert!([i64::MIN, -1, 0, 1, i64::MAX].windows(2).all(|w| w[0].key() < w[1].key()));
        assert!([i32::MIN, -1, 0, i32::MAX].windows(2).all(|w| w[0].key() < w[1].key()));
    }

    #[test]
    fn nan_wins_on_either_side() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            assert!(Lane::max(a, b).is_nan() && Lane::min(a, b).is_nan());
        }
        assert_eq!((Lane::max(2.0f64, 1.0), Lane::min(2.0f64, 1.0)), (2.0, 1.0));
    }
}
