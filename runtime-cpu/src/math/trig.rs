//! The functions `sin`, `cos`, `tan`.
//!
//! The argument is reduced to `x = n·π/2 + r`, `|r| ≤ π/4` (Cody and Waite with FMAs, the first of which is exact);
//! sine and cosine of `r` are both computed, and the last two bits of `n` choose. The polynomials are minimax fits by
//! the Remez exchange algorithm, computed for this crate.
//!
//! `f32` is computed in `f64` and is accurate for every argument. `f64` is accurate up to [`TRIG_LIMIT`]: a full
//! reduction would cost every argument several table look-ups. Beyond, sine and cosine only stay within `[-1, 1]`, and
//! from 32 times that limit on the angle is taken as 0; callers that may get such arguments recompute them by the host
//! reference, as the steps of programs do.

use super::real::{Real, polynomial};

/// The largest magnitude at which the `f64` reduction finds the multiple of π/2: 2⁴⁵.
pub(crate) const TRIG_LIMIT: f64 = 35_184_372_088_832.0;

/// The constant π/2 to 159 bits.
const PIO2: [f64; 3] = [f64::PIO2, f64::PIO2_LO, -1.4973849048591698e-33];

/// The constants `(x, 2^-E, 2^E mod 2π in two parts)`: from `x = 2^(E+23)` on, every `f32` is a multiple of `2^E`. For
/// 27, 53 and 79.
const TURNS: [(f32, f64, f64, f64); 3] = [
    (1125899906842624.0, 7.450580596923828e-09, -0.868565626261989, -9.019323986564577e-18),
    (7.5557864e22, 1.1102230246251565e-16, -2.1276428765770463, -1.3415010681967913e-16),
    (5.0706024e30, 1.6543612251060553e-24, -0.5159693243550164, 1.6137747064895307e-17),
];

/// Sine and cosine of the remainder, and `n + ROUNDER`.
struct Reduced {
    sin: f64,
    cos: f64,
    n: f64,
}

impl Reduced {
    /// The reduction of `x + low` up to 2⁵⁰ in magnitude, to `f32`'s precision (2^-37 and 2^-43).
    #[inline(always)]
    fn short(x: f64, low: f64) -> Reduced {
        let n = x.mul_add(std::f64::consts::FRAC_2_PI, f64::ROUNDER);
        let k = n - f64::ROUNDER;
        let r = k.mul_add(-PIO2[1], k.mul_add(-PIO2[0], x)) + low;
        let z = r * r;
        let s = polynomial(
            z,
            [-0.16666666639725805, 0.008333329180621374, -0.00019839272314319274, 2.7177408478192717e-06],
        );
        let c = polynomial(
            z,
            [0.04166666661751392, -0.0013888883332051592, 2.4799416292813986e-05, -2.720216084141367e-07],
        );
        Reduced { sin: (r * z).mul_add(s, r), cos: (z * z).mul_add(c, z.mul_add(-0.5, 1.0)), n }
    }

    /// An `f32` of any size. A large one is `a·2^E` with a whole `a`, whose remainder is that of `a·(2^E mod 2π)`.
    #[inline(always)]
    fn of_f32(x: f32) -> Reduced {
        let (mut scale, mut turn, mut turn_low) = (1.0, 1.0, 0.0);
        for (from, s, t, low) in TURNS {
            let beyond = x.abs() >= from;
            scale = if beyond { s } else { scale };
            turn = if beyond { t } else { turn };
            turn_low = if beyond { low } else { turn_low };
        }
        let a = f64::from(x) * scale;
        let high = a * turn;
        Reduced::short(high, a.mul_add(turn_low, a.mul_add(turn, -high)))
    }

    /// An `f64`, with its remainder in two parts; one too large to reduce is taken as 0.
    #[inline(always)]
    fn of_f64(x: f64) -> Reduced {
        let x = if x.abs() <= 32.0 * TRIG_LIMIT { x } else { 0.0 * x };
        let n = x.mul_add(std::f64::consts::FRAC_2_PI, f64::ROUNDER);
        let k = n - f64::ROUNDER;
        // first − k·PIO2[1] as r + low: either may be the larger (Knuth's sum).
        let first = k.mul_add(-PIO2[0], x);
        let second = k * PIO2[1];
        let second_low = k.mul_add(PIO2[1], -second);
        let r = first - second;
        let back = r - first;
        let lost = (first - (r - back)) - (second + back);
        let low = k.mul_add(-PIO2[2], lost - second_low);
        let z = r * r;
        // 2^-57.8 and 2^-63.8
        let s = polynomial(
            z,
            [
                -0.1666666666666663,
                0.008333333333321744,
                -0.00019841269829236262,
                2.755731348574176e-06,
                -2.505072493070638e-08,
                1.5894830666207003e-10,
            ],
        );
        let c = polynomial(
            z,
            [
                0.04166666666666659,
                -0.0013888888888872186,
                2.480158728829539e-05,
                -2.755731401512238e-07,
                2.0875678084755285e-09,
                -1.1357336714511838e-11,
            ],
        );
        // cos(r + low) = (1 − z/2) + (what that lost + z²·c − r·low), as in fdlibm's k_cos.c.
        let half = 0.5 * z;
        let w = 1.0 - half;
        let lost = (1.0 - w) - half;
        Reduced { sin: r + (r * z).mul_add(s, low), cos: w + (z * z).mul_add(c, (-r).mul_add(low, lost)), n }
    }

    #[inline(always)]
    fn sine(self) -> f64 {
        let y = if self.n.bit(0) { self.cos } else { self.sin };
        if self.n.bit(1) { -y } else { y }
    }

    #[inline(always)]
    fn cosine(self) -> f64 {
        let y = if self.n.bit(0) { self.sin } else { self.cos };
        if self.n.bit(0) != self.n.bit(1) { -y } else { y }
    }

    #[inline(always)]
    fn tangent(self) -> f64 {
        let odd = self.n.bit(0);
        let a = if odd { -self.cos } else { self.sin };
        let b = if odd { self.sin } else { self.cos };
        a / b
    }
}

/// Reduction of one type and rounding back to it.
pub(crate) trait Trig: Real {
    /// The sine of an angle in radians.
    fn sine(self) -> Self;
    /// The cosine of an angle in radians.
    fn cosine(self) -> Self;
    /// The tangent of an angle in radians.
    fn tangent(self) -> Self;
}

macro_rules! trig {
    ($float:ident, $reduce:ident) => {
        impl Trig for $float {
            #[inline(always)]
            fn sine(self) -> Self {
                let y = Reduced::$reduce(self).sine() as $float;
                if self == 0.0 { self } else { y }
            }
            #[inline(always)]
            fn cosine(self) -> Self {
                Reduced::$reduce(self).cosine() as $float
            }
            #[inline(always)]
            fn tangent(self) -> Self {
                let y = Reduced::$reduce(self).tangent() as $float;
                if self == 0.0 { self } else { y }
            }
        }
    };
}

trig!(f32, of_f32);
trig!(f64, of_f64);
