//! Accuracy against `libm`, special values, equal bits on every instruction set, f16 and bf16 exhaustively, integer
//! edge cases.

use super::*;

/// Deterministic arguments (splitmix64).
struct Arguments(u64);

impl Arguments {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn within(&mut self, (low, high): (f64, f64)) -> f64 {
        low + (high - low) * ((self.bits() >> 11) as f64 / (1u64 << 53) as f64)
    }
}

/// The requirements of the accuracy tests on a type, and its special values.
trait Tested: Math + std::fmt::LowerExp {
    const DIGITS: i32;
    const LOWEST_EXPONENT: i32;
    const MAX: f64;
    fn of(x: f64) -> Self;
    fn of_bits(bits: u64) -> Self;
    fn wide(self) -> f64;
    fn same_bits(self, y: Self) -> bool;
}

macro_rules! tested {
    ($($float:ident, $bits:ident;)*) => {$(
        impl Tested for $float {
            const DIGITS: i32 = $float::MANTISSA_DIGITS as i32;
            const LOWEST_EXPONENT: i32 = $float::MIN_EXP - $float::MANTISSA_DIGITS as i32;
            const MAX: f64 = $float::MAX as f64;
            fn of(x: f64) -> Self {
                x as $float
            }
            fn of_bits(bits: u64) -> Self {
                $float::from_bits(bits as $bits)
            }
            fn wide(self) -> f64 {
                self as f64
            }
            fn same_bits(self, y: Self) -> bool {
                self.to_bits() == y.to_bits() || self.is_nan() && y.is_nan()
            }
        }
    )*};
}
tested!(f32, u32; f64, u64;);

/// Zeros, ones, ends of the range, subnormals, infinities, NaN: of `f32`, and also meaningful in `f64`.
fn awkward<T: Tested>() -> Vec<T> {
    let positive = [0.0, 1.0, 0.5, 1.5, 2.0, 3.0, 1e-3, 1e9, 1e9 + 1.0, 16_777_217.0, 1e-30, 88.722_84, 88.723, 103.98]
        .into_iter()
        .chain([
            709.78,
            709.79,
            710.475,
            710.476,
            745.13,
            745.14,
            T::MAX,
            T::MIN_NORMAL.wide(),
            f64::INFINITY,
            f64::NAN,
        ])
        .chain([1.0 + f64::EPSILON, 1.0 - f64::EPSILON / 2.0, 1.0 + 1.0 / 8_388_608.0, 1.0 - 1.0 / 16_777_216.0])
        .map(T::of);
    let subnormal = [1, 2, 12_345].map(T::of_bits);
    positive.chain(subnormal).flat_map(|x| [x, -x]).collect()
}

/// The distance of `got` from `exact`, in units of the last place. It is infinite where only one is NaN or infinite, or
/// two zeros differ in sign.
fn error<T: Tested>(got: T, exact: f64) -> f64 {
    let rounded = T::of(exact);
    if got.same_bits(rounded) {
        return 0.0;
    }
    let mismatch = got.wide().is_nan() || exact.is_nan() || got.wide().is_infinite() || rounded.wide().is_infinite();
    if mismatch || got.wide() == 0.0 && rounded.wide() == 0.0 {
        return f64::INFINITY;
    }
    let exponent = libm::ilogb(exact.abs().max(f64::MIN_POSITIVE)) + 1 - T::DIGITS;
    (got.wide() - exact).abs() / libm::scalbn(1.0, Ord::max(exponent, T::LOWEST_EXPONENT))
}

/// Fails if `f` errs by more than `limit` anywhere among awkward, dense and arbitrary arguments.
fn check<T: Tested>(
    name: &str,
    f: fn(T, T) -> T,
    exact: fn(f64, f64) -> f64,
    limit: f64,
    ranges: &[(f64, f64)],
    other: (f64, f64),
) {
    let mut random = Arguments(name.len() as u64);
    let mut arguments: Vec<(T, T)> = Vec::new();
    for x in awkward() {
        arguments.extend(awkward().into_iter().map(|y| (x, y)));
    }
    for &range in ranges {
        arguments.extend((0..60_000).map(|_| (T::of(random.within(range)), T::of(random.within(other)))));
    }
    arguments.extend((0..60_000).map(|_| (T::of_bits(random.bits()), T::of_bits(random.bits()))));
    for (x, y) in arguments {
        let reach =
            x.wide().abs() <= super::trig::TRIG_LIMIT || T::DIGITS == 24 || !["sin", "cos", "tan"].contains(&name);
        if !reach {
            continue;
        }
        let (got, exact) = (f(x, y), exact(x.wide(), y.wide()));
        let ulp = error(got, exact);
        assert!(ulp <= limit, "{name}({x:e}, {y:e}) = {got:e}, exactly {exact:e}: {ulp:.2} ULP");
    }
}

/// Rows `name |x, y| = exact, limits of f32 and f64, ranges`. The f64 limits hold the reference's own error, at most 1
/// ULP.
macro_rules! accuracy {
    ($($name:ident |$x:ident, $y:ident| = $exact:expr, $limit32:literal, $limit64:literal, $ranges:expr;)*) => {$(
        #[test]
        fn $name() {
            let exact: fn(f64, f64) -> f64 = |$x, $y| { let _ = $y; $exact };
            check::<f32>(stringify!($name), |$x, $y| call!($name $x $y), exact, $limit32, &$ranges, (-20.0, 20.0));
            check::<f64>(stringify!($name), |$x, $y| call!($name $x $y), exact, $limit64, &$ranges, (-20.0, 20.0));
        }
    )*};
}

macro_rules! call {
    (pow $x:ident $y:ident) => {
        Math::pow($x, $y)
    };
    (atan2 $x:ident $y:ident) => {
        Math::atan2($x, $y)
    };
    ($name:ident $x:ident $y:ident) => {{
        let _ = $y;
        Math::$name($x)
    }};
}

mod accuracy {
    use super::*;

    accuracy! {
        exp |x, y| = libm::exp(x), 1.1, 2.0, [(-104.0, 89.0), (-1.0, 1.0), (-746.0, 710.0), (-746.0, -700.0)];
        expm1 |x, y| = libm::expm1(x), 1.5, 2.5, [(-2.0, 2.0), (-20.0, 90.0), (0.3, 0.4), (-50.0, 710.0)];
        exp2 |x, y| = libm::exp2(x), 1.1, 2.0, [(-152.0, 130.0), (-1.0, 1.0), (-1080.0, 1030.0)];
        log |x, y| = libm::log(x), 1.1, 2.0, [(0.5, 2.0), (0.0, 100.0), (0.9, 1.1)];
        log1p |x, y| = libm::log1p(x), 1.8, 2.5, [(-1.0, 1.0), (-0.1, 0.1), (-1.0, 1e3), (0.2, 0.8)];
        log2 |x, y| = libm::log2(x), 1.5, 2.0, [(0.5, 2.0), (0.0, 100.0), (0.9, 1.1)];
        rsqrt |x, y| = 1.0 / x.sqrt(), 1.5, 2.5, [(0.0, 4.0), (0.0, 1e6)];
        sin |x, y| = libm::sin(x), 0.51, 2.0, [(-10.0, 10.0), (-1e5, 1e5), (-3e13, 3e13)];
        cos |x, y| = libm::cos(x), 0.51, 2.0, [(-10.0, 10.0), (-1e5, 1e5), (-3e13, 3e13)];
        tan |x, y| = libm::tan(x), 0.51, 3.5, [(-10.0, 10.0), (-1e5, 1e5), (-3e13, 3e13)];
        tanh |x, y| = libm::tanh(x), 3.7, 4.7, [(-1.0, 1.0), (-10.0, 10.0), (-25.0, 25.0)];
        sinh |x, y| = libm::sinh(x), 2.2, 3.5, [(-2.0, 2.0), (-90.0, 90.0), (-711.0, 711.0)];
        cosh |x, y| = libm::cosh(x), 1.6, 2.5, [(-2.0, 2.0), (-90.0, 90.0), (-711.0, 711.0)];
        asin |x, y| = libm::asin(x), 2.1, 3.0, [(-1.0, 1.0), (0.99, 1.0)];
        acos |x, y| = libm::acos(x), 1.4, 2.5, [(-1.0, 1.0), (0.99, 1.0)];
        atan |x, y| = libm::atan(x), 2.0, 3.0, [(-3.0, 3.0), (-100.0, 100.0)];
        atan2 |x, y| = libm::atan2(x, y), 2.0, 3.0, [(-5.0, 5.0), (-100.0, 100.0)];
        erf |x, y| = libm::erf(x), 1.7, 2.8, [(-1.0, 1.0), (-6.0, 6.0), (0.0, 0.1)];
        pow |x, y| = libm::pow(x, y), 0.51, 2.3, [(0.0, 10.0), (0.9, 1.1), (0.0, 1e3)];
    }
}

#[test]
fn powers_where_the_exponent_matters_most() {
    let mut random = Arguments(7);
    for _ in 0..100_000 {
        let x = random.within((0.0, 10.0));
        let y = random.within((-1074.0, 1024.0)) / libm::log2(x);
        let ulp = error(Math::pow(x, y), libm::pow(x, y));
        assert!(ulp <= 2.3, "{x:e} to {y:e}: {ulp:.2} ULP");
        let (whole, n) = (-x.floor(), y.trunc());
        let ulp = error(Math::pow(whole, n), libm::pow(whole, n));
        assert!(ulp <= 2.3, "{whole} to {n}: {ulp:.2} ULP");
    }
}

/// Arguments known to be negative take fewer operations, with equal bits.
#[test]
fn exponentials_of_negative_numbers() {
    let same = |x: f32| assert!(Math::exp_negative(x).same_bits(Math::exp(x)), "{x:e}");
    ((-0.0f32).to_bits()..=f32::NEG_INFINITY.to_bits()).step_by(997).for_each(|bits| same(f32::from_bits(bits)));
    let mut random = Arguments(5);
    for x in awkward::<f64>().into_iter().chain((0..1_000_000).map(|_| random.within((-746.0, 0.0)))) {
        assert!(x > 0.0 || Math::exp_negative(x).same_bits(Math::exp(x)), "{x:e}");
    }
}

/// Tests that beyond the limit of the reduction sine and cosine still are on the circle's range, and infinity has none.
#[test]
fn large_angles() {
    let mut random = Arguments(3);
    for _ in 0..100_000 {
        let x = f64::from_bits(random.bits()).abs() * 1e15;
        let values = [Math::sin(x), Math::cos(x)];
        assert!(values.iter().all(|v| v.abs() <= 1.0 || !x.is_finite()), "{x:e}: {values:?}");
    }
    assert!(
        Math::sin(f64::INFINITY).is_nan() && Math::cos(-f32::INFINITY).is_nan() && Math::tan(f64::INFINITY).is_nan()
    );
}

/// Rounding, sign, extremes and remainder, where there is nothing to approximate.
#[test]
fn exact_functions() {
    fn of<T: Tested>() {
        let n = T::of;
        for (x, floor, ceil, even, trunc, sign) in [
            (2.5, 2.0, 3.0, 2.0, 2.0, 1.0),
            (-2.5, -3.0, -2.0, -2.0, -2.0, -1.0),
            (3.5, 3.0, 4.0, 4.0, 3.0, 1.0),
            (-0.0, -0.0, -0.0, -0.0, -0.0, 0.0),
            (f64::NAN, f64::NAN, f64::NAN, f64::NAN, f64::NAN, f64::NAN),
            (f64::INFINITY, f64::INFINITY, f64::INFINITY, f64::INFINITY, f64::INFINITY, 1.0),
        ] {
            let x = n(x);
            let got = [x.floor(), x.ceil(), x.round_ties_even(), x.trunc(), x.sign()];
            let expected = [floor, ceil, even, trunc, sign].map(n);
            assert!(got.iter().zip(expected).all(|(g, e)| g.same_bits(e)), "{x:e}");
        }
        for (x, y, max, min) in
            [(1.0, 2.0, 2.0, 1.0), (f64::NAN, 2.0, f64::NAN, f64::NAN), (1.0, f64::NAN, f64::NAN, f64::NAN)]
        {
            assert!(n(x).max(n(y)).same_bits(n(max)) && n(x).min(n(y)).same_bits(n(min)));
        }
        // torch.remainder
        for (x, y, r) in [
            (5.0, 3.0, 2.0),
            (-5.0, 3.0, 1.0),
            (5.0, -3.0, -1.0),
            (-5.0, -3.0, -2.0),
            (-1.0, f64::INFINITY, f64::INFINITY),
            (1.0, f64::INFINITY, 1.0),
            (1e30, 3.0, T::of(1e30).wide() % 3.0),
            (1.0, 0.0, f64::NAN),
            (f64::INFINITY, 2.0, f64::NAN),
        ] {
            assert!(n(x).rem(n(y)).same_bits(n(r)), "{x} rem {y}");
        }
        assert!(n(4.0).recip().same_bits(n(0.25)) && n(-0.0).recip().same_bits(n(f64::NEG_INFINITY)));
    }
    of::<f32>();
    of::<f64>();
}

/// Computes every function in one loop, compiled for an instruction set.
#[inline(always)]
fn all<T: Math>(x: &[T], y: &[T], out: &mut [Vec<T>]) {
    macro_rules! each {
        ($k:expr; $($name:ident)*; $($pair:ident)*) => {{
            let mut k = $k;
            $(for (out, &x) in out[k].iter_mut().zip(x) { *out = x.$name(); } k += 1;)*
            $(for ((out, &x), &y) in out[k].iter_mut().zip(x).zip(y) { *out = x.$pair(y); } k += 1;)*
            assert_eq!(k, FUNCTIONS);
        }};
    }
    each!(0; exp expm1 exp2 log log1p log2 sqrt rsqrt recip sin cos tan tanh sinh cosh asin acos atan erf sign
        floor ceil trunc round_ties_even; pow atan2 rem max min);
}
const FUNCTIONS: usize = 29;

#[cfg(target_arch = "x86_64")]
mod instruction_sets {
    use super::*;

    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
    fn avx2<T: Math>(x: &[T], y: &[T], out: &mut [Vec<T>]) {
        all(x, y, out);
    }

    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,avx512f,avx512vl,avx512bw,avx512dq")]
    fn avx512<T: Math>(x: &[T], y: &[T], out: &mut [Vec<T>]) {
        all(x, y, out);
    }

    fn equal_bits<T: Tested>() {
        let mut random = Arguments(11);
        let mut arguments = |scale: f64| -> Vec<T> {
            let dense: Vec<T> = (0..2_000).map(|_| T::of(random.within((-scale, scale)))).collect();
            let any = (0..2_003).map(|_| T::of_bits(random.bits()));
            awkward().into_iter().chain(dense).chain(any).collect()
        };
        let (x, y) = (arguments(20.0), arguments(3.0));
        let zeros = || vec![vec![T::ZERO; x.len()]; FUNCTIONS];
        let mut baseline = zeros();
        all(&x, &y, &mut baseline);
        let agree = |what: &str, out: &[Vec<T>]| {
            for (k, (a, b)) in baseline.iter().zip(out).enumerate() {
                let differs = a.iter().zip(b).position(|(a, b)| !a.same_bits(*b));
                assert_eq!(differs.map(|i| (x[i].wide(), y[i].wide())), None, "function {k} on {what}");
            }
        };
        let mut out = zeros();
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("bmi2") {
            // SAFETY: the features were just found; F16C and BMI1 came earlier than AVX2 and BMI2.
            unsafe { avx2(&x, &y, &mut out) };
            agree("AVX2", &out);
        }
        if is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            // SAFETY: the features were just found; all CPUs with these have F, AVX2, FMA, F16C and BMI.
            unsafe { avx512(&x, &y, &mut out) };
            agree("AVX-512", &out);
        }
    }

    #[test]
    fn have_equal_bits() {
        equal_bits::<f32>();
        equal_bits::<f64>();
    }
}

mod halves {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn widen_as_the_half_crate_does() {
        for h in 0..=u16::MAX {
            let (a, b) = (f16_to_f32(h), f16::from_bits(h).to_f32());
            assert!(a.to_bits() == b.to_bits(), "f16 {h:#06x}: {a} {b}");
            let (a, b) = (bf16_to_f32(h), bf16::from_bits(h).to_f32());
            assert!(a.same_bits(b) && a.is_sign_negative() == b.is_sign_negative(), "bf16 {h:#06x}: {a} {b}");
        }
    }

    #[test]
    fn narrow_as_the_half_crate_does() {
        let mut random = Arguments(5);
        // The neighbourhoods of all half-precision values and of the midpoints between them, and arbitrary values.
        let middles = (0..=u16::MAX).flat_map(|h| [u32::from(h) << 16, f16::from_bits(h).to_f32().to_bits()]);
        let around =
            middles.flat_map(|b| [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001].map(|d| b.wrapping_add(d)));
        let any = (0..2_000_000).map(|_| random.bits() as u32);
        for x in around.chain(any).map(f32::from_bits) {
            let (a, b) = (f32_to_f16(x), f16::from_f32(x));
            assert!(a == b.to_bits(), "f16 of {x:e} ({:#010x}): {a:#06x} {b:?}", x.to_bits());
            let (a, b) = (f32_to_bf16(x), bf16::from_f32(x));
            assert!(a == b.to_bits(), "bf16 of {x:e} ({:#010x}): {a:#06x} {b:?}", x.to_bits());
        }
    }
}

mod integers {
    use super::*;

    #[test]
    fn divide_without_panic() {
        let (min, max) = (i32::MIN, i32::MAX);
        for (x, y, quotient, remainder) in [
            (7, 2, 3, 1),
            (-7, 2, -3, 1),
            (7, -2, -3, -1),
            (-7, -2, 3, -1),
            (6, -3, -2, 0),
            (5, 0, 0, 0),
            (min, -1, min, 0),
            (min, 0, 0, 0),
            (max, min, 0, -1),
        ] {
            assert_eq!((Int::div(x, y), Int::rem(x, y)), (quotient, remainder), "{x} by {y}");
            assert_eq!(Int::rem(i64::from(x), i64::from(y)), i64::from(remainder), "{x} by {y}");
        }
        assert_eq!((Int::div(200u8, 7), Int::rem(200u8, 7), Int::div(1u32, 0), Int::rem(1u32, 0)), (28, 4, 0, 0));
    }

    #[test]
    fn wrap() {
        assert_eq!((Int::add(i32::MAX, 1), Int::sub(i64::MIN, 1), Int::mul(200u8, 2)), (i32::MIN, i64::MAX, 144));
        assert_eq!((Int::neg(i32::MIN), Int::abs(i64::MIN), Int::neg(1u32)), (i32::MIN, i64::MIN, u32::MAX));
        assert_eq!((Int::abs(-3i32), Int::sign(-3i64), Int::sign(0i32), Int::sign(9u8)), (3, -1, 0, 1));
        assert_eq!((Int::max(-1i32, 2), Int::min(-1i64, 2), Int::max(3u8, 2)), (2, -1, 3));
    }

    #[test]
    fn raise_to_powers() {
        assert_eq!((Int::pow(3i32, 4), Int::pow(-2i64, 5), Int::pow(2u8, 7), Int::pow(0i32, 0)), (81, -32, 128, 1));
        assert_eq!((Int::pow(2i32, 33), Int::pow(3u32, 21), Int::pow(3u8, 255)), (0, 1_870_418_611, 171));
        assert_eq!((Int::pow(2i32, -1), Int::pow(1i64, -5), Int::pow(-1i32, -3), Int::pow(-1i32, -4)), (0, 1, -1, 1));
        assert_eq!((Int::pow(0i32, -1), Int::pow(i64::MIN, 1)), (0, i64::MIN));
    }

    #[test]
    fn shift_and_combine_bits() {
        assert_eq!((Int::shl(1i32, 33), Int::shl(1i64, 33), Int::shl(1u8, 9)), (2, 1 << 33, 2));
        assert_eq!((Int::shr(-8i32, 1), Int::shr(0x80u8, 7), Int::shr(u32::MAX, 36)), (-4, 1, u32::MAX >> 4));
        assert_eq!((Int::and(6i32, 3), Int::or(6i64, 3), Int::xor(6u8, 3)), (2, 7, 5));
    }
}
