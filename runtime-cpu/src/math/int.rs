//! Element functions of the integers: they wrap and never panic.

/// Element functions of an integer type. Arithmetic wraps around; nothing panics.
///
/// Calls must be written as `Int::max(x, y)` or on a generic `T: Int`, as for [`Math`](super::Math). On a concrete type
/// `x.max(y)` could also resolve to `Ord`.
pub(crate) trait Int: Copy + PartialOrd {
    /// The wrapping sum `self + y`.
    fn add(self, y: Self) -> Self;
    /// The wrapping difference `self − y`.
    fn sub(self, y: Self) -> Self;
    /// The wrapping product `self · y`.
    fn mul(self, y: Self) -> Self;
    /// The wrapping negation `−self`.
    fn neg(self) -> Self;
    /// The quotient `self / y`, truncated toward zero; 0 where `y` is 0, and `MIN / −1` is `MIN`.
    fn div(self, y: Self) -> Self;
    /// The remainder with the sign of `y`, as in Python: `self − y·⌊self/y⌋`; 0 where `y` is 0.
    fn rem(self, y: Self) -> Self;
    /// The magnitude; of `MIN` it is `MIN`.
    fn abs(self) -> Self;
    /// The sign: −1, 0 or 1.
    fn sign(self) -> Self;
    /// The larger of two values.
    fn max(self, y: Self) -> Self;
    /// The smaller of two values.
    fn min(self, y: Self) -> Self;
    /// The value of `self` raised to `y`, by squaring. To a negative power it is 0, except for 1 and −1.
    fn pow(self, y: Self) -> Self;
    /// Shifted left by the low bits of `y` (`y` modulo the width).
    fn shl(self, y: Self) -> Self;
    /// A right shift by the low bits of `y`; arithmetic for signed integers.
    fn shr(self, y: Self) -> Self;
    /// The bitwise and.
    fn and(self, y: Self) -> Self;
    /// The bitwise or.
    fn or(self, y: Self) -> Self;
    /// The bitwise exclusive or.
    fn xor(self, y: Self) -> Self;
}

/// Methods of two operands.
macro_rules! binary {
    ($($name:ident |$x:ident, $y:ident| $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $y: Self) -> Self {
            let $x = self;
            $body
        }
    )*};
}

/// Methods with one definition for signed and unsigned integers.
macro_rules! common {
    ($int:ident) => {
        binary! {
            add |x, y| x.wrapping_add(y);
            sub |x, y| x.wrapping_sub(y);
            mul |x, y| x.wrapping_mul(y);
            div |x, y| if y == 0 { 0 } else { x.wrapping_div(y) };
            max |x, y| Ord::max(x, y);
            min |x, y| Ord::min(x, y);
            shl |x, y| x.wrapping_shl(y as u32);
            shr |x, y| x.wrapping_shr(y as u32);
            and |x, y| x & y;
            or |x, y| x | y;
            xor |x, y| x ^ y;
        }
        #[inline(always)]
        fn neg(self) -> Self {
            self.wrapping_neg()
        }
    };
}

/// Computes `base` raised to a non-negative power, for any count of bits in it.
macro_rules! by_squaring {
    ($base:ident, $exponent:ident) => {{
        let (mut result, mut square, mut left) = (1, $base, $exponent);
        while left > 0 {
            if left & 1 == 1 {
                result = square.wrapping_mul(result);
            }
            square = square.wrapping_mul(square);
            left >>= 1;
        }
        result
    }};
}

macro_rules! signed {
    ($($int:ident)*) => {$(
        impl Int for $int {
            common!($int);
            binary! {
                rem |x, y| {
                    let r = if y == 0 { 0 } else { x.wrapping_rem(y) };
                    if r != 0 && (r < 0) != (y < 0) { r + y } else { r }
                };
                pow |x, y| {
                    let odd = y & 1 == 1;
                    match x {
                        _ if y >= 0 => by_squaring!(x, y),
                        1 => 1,
                        -1 => if odd { -1 } else { 1 },
                        _ => 0,
                    }
                };
            }
            #[inline(always)]
            fn abs(self) -> Self {
                self.wrapping_abs()
            }
            #[inline(always)]
            fn sign(self) -> Self {
                self.signum()
            }
        }
    )*};
}

macro_rules! unsigned {
    ($($int:ident)*) => {$(
        impl Int for $int {
            common!($int);
            binary! {
                rem |x, y| if y == 0 { 0 } else { x % y };
                pow |x, y| by_squaring!(x, y);
            }
            #[inline(always)]
            fn abs(self) -> Self {
                self
            }
            #[inline(always)]
            fn sign(self) -> Self {
                Ord::min(self, 1)
            }
        }
    )*};
}

signed!(i32 i64);
unsigned!(u32 u8);
