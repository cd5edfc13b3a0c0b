//! Running values of scans, which have about twice the digits of the lanes that are scanned.

use crate::element::Lane;

/// A type of arithmetic in which a scan runs.
pub(super) trait Scanned: Lane {
    type Running: Running<Self>;
}

/// A running value over lanes of type `L`.
pub(super) trait Running<L>: Copy {
    fn of(x: L) -> Self;
    fn add(self, x: L) -> Self;
    fn mul(self, x: L) -> Self;
    fn value(self) -> L;
}

impl Scanned for f32 {
    type Running = f64;
}

impl Running<f32> for f64 {
    #[inline(always)]
    fn of(x: f32) -> Self {
        x.into()
    }
    #[inline(always)]
    fn add(self, x: f32) -> Self {
        self + f64::from(x)
    }
    #[inline(always)]
    fn mul(self, x: f32) -> Self {
        self * f64::from(x)
    }
    #[inline(always)]
    fn value(self) -> f32 {
        self as f32
    }
}

/// A sum of two numbers, of which the second is the rounding error of the first.
#[derive(Clone, Copy)]
pub(super) struct Twofold {
    high: f64,
    low: f64,
}

impl Scanned for f64 {
    type Running = Twofold;
}

impl Running<f64> for Twofold {
    #[inline(always)]
    fn of(x: f64) -> Self {
        Twofold { high: x, low: 0.0 }
    }
    /// Adds `x`, with the exact rounding error of the sum (Knuth 1969).
    #[inline(always)]
    fn add(self, x: f64) -> Self {
        let high = self.high + x;
        let added = high - self.high;
        Twofold { high, low: self.low + ((self.high - (high - added)) + (x - added)) }
    }
    /// Multiplies by `x`, with the exact rounding error of the product by a fused multiply-add.
    #[inline(always)]
    fn mul(self, x: f64) -> Self {
        let high = self.high * x;
        Twofold { high, low: self.low.mul_add(x, self.high.mul_add(x, -high)) }
    }
    /// The rounded value. If the high part is infinite or NaN, the low part is meaningless and left out; a zero keeps
    /// its sign.
    #[inline(always)]
    fn value(self) -> f64 {
        if self.high.is_finite() && self.low != 0.0 { self.high + self.low } else { self.high }
    }
}

macro_rules! exact {
    ($($t:ty),*) => {$(
        impl Scanned for $t {
            type Running = $t;
        }

        impl Running<$t> for $t {
            #[inline(always)]
            fn of(x: $t) -> Self {
                x
            }
            #[inline(always)]
            fn add(self, x: $t) -> Self {
                self.wrapping_add(x)
            }
            #[inline(always)]
            fn mul(self, x: $t) -> Self {
                self.wrapping_mul(x)
            }
            #[inline(always)]
            fn value(self) -> $t {
                self
            }
        }
    )*};
}
exact!(i32, i64, u32, u8);
