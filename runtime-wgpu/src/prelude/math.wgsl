// The functions of f32: WGSL's own may err in the fifth digit. A fused step cannot be relied on, so arguments are reduced with
// constants of few bits (Cody and Waite 1980), whose products are exact. The polynomials are those of the CPU runtime, or of
// Cephes (Moshier) where named.

fn wg_sqrt(x: f32) -> f32 {
    return sqrt(x);
}

fn wg_sign_f32(x: f32) -> f32 {
    if (wg_nan(x)) { return x; }
    return select(wg_copysign(1f, x), 0f, x == 0f);
}

fn wg_max(a: f32, b: f32) -> f32 {
    return select(b, a, a > b || wg_nan(a));
}

fn wg_min(a: f32, b: f32) -> f32 {
    return select(b, a, a < b || wg_nan(a));
}

// x·2ⁿ in two steps, so that the result may be subnormal or the factor too large.
fn wg_scale(x: f32, n: i32) -> f32 {
    let half = n >> 1u;
    return x * bitcast<f32>(u32(half + 127i) << 23u) * bitcast<f32>(u32(n - half + 127i) << 23u);
}

fn wg_within(x: f32, low: f32, high: f32) -> f32 {
    let y = select(x, low, x < low);
    return select(y, high, y > high);
}

// n and r of x = n·ln 2 + r.
fn wg_ln2_reduce(x: f32) -> vec2<f32> {
    let n = round(x * 1.4426950408889634f);
    return vec2<f32>(n, (x - n * 0.693359375f) - n * -2.12194440e-4f);
}

// (eʳ − 1 − r) / r²
fn wg_exp_tail(r: f32) -> f32 {
    return ((((0.0001978181f * r + 0.0013932916f) * r + 0.0083335275f) * r + 0.041666497f) * r + 0.16666666f) * r + 0.5f;
}

// eˣ·2ᵏ of x + low. Underflow happens far below the smallest value: a driver may put a later factor first.
fn wg_exp_scaled(x: f32, low: f32, k: i32) -> f32 {
    let c = wg_within(x, -128f, 90f);
    let reduced = wg_ln2_reduce(c);
    let r = reduced.y + low;
    return wg_scale((r * r * wg_exp_tail(r) + r) + 1f, wg_i32(reduced.x) + k);
}

fn wg_exp(x: f32) -> f32 {
    return wg_exp_scaled(x, 0f, 0i);
}

fn wg_exp2(x: f32) -> f32 {
    let c = wg_within(x, -180f, 129f);
    let n = round(c);
    let r = c - n;
    let p = ((((0.00015498482f * r + 0.0013389124f) * r + 0.0096179675f) * r + 0.055503633f) * r + 0.2402265f) * r + 0.6931472f;
    return wg_scale(r * p + 1f, wg_i32(n));
}

fn wg_expm1(x: f32) -> f32 {
    if (abs(x) < 1e-9f) { return x; }
    let reduced = wg_ln2_reduce(wg_within(x, -20f, 89f));
    let r = reduced.y;
    // With 2ⁿ⁻¹, which is finite, and a factor of 2 at the end.
    let s = bitcast<f32>(u32(wg_i32(reduced.x) + 126i) << 23u);
    return 2f * (s * (r * r) * wg_exp_tail(r) + (s * r + (s - 0.5f)));
}

// e and f of x = 2ᵉ·(1 + f), 1 + f in [from, 2·from), from the bits of a positive value and of `from`.
fn wg_split_from(bits: u32, start: u32) -> vec2<f32> {
    var b = bits;
    var e = -127i;
    if (b < 0x800000u) {
        let zeros = countLeadingZeros(b) - 8u;
        b = b << zeros;
        e = e - i32(zeros);
    }
    let shifted = b + (0x3f800000u - start);
    let m = bitcast<f32>((shifted & 0x7fffffu) + start);
    return vec2<f32>(f32(i32(shifted >> 23u) + e), m - 1f);
}

// From 2/3.
fn wg_split(bits: u32) -> vec2<f32> {
    return wg_split_from(bits, 0x3f2aaaabu);
}

// log(1 + f) − f
fn wg_log_tail(f: f32) -> f32 {
    let z = f * f;
    let even = (((-0.1305949f * z - 0.12151401f) * z - 0.1668191f) * z - 0.24999811f) * z - 0.5f;
    let odd = ((0.1400822f * z + 0.14003249f) * z + 0.2001045f) * z + 0.33333215f;
    return z * (odd * f + even);
}

// The value of a logarithm at zero and below, infinity and NaN: by the bits, because a device may take subnormals for 0.
fn wg_log_ends(x: f32, y: f32) -> f32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) == 0u) { return wg_bits(0xff800000u); }
    if (bits > 0x80000000u) { return wg_bits(0x7fc00000u); }
    return select(y, x, bits >= 0x7f800000u);
}

fn wg_log(x: f32) -> f32 {
    let p = wg_split(bitcast<u32>(x));
    return wg_log_ends(x, p.x * 0.693359375f + (p.y + (wg_log_tail(p.y) + p.x * -2.12194440e-4f)));
}

fn wg_log2(x: f32) -> f32 {
    // From √½: where e is not 0 the logarithm is not small, and nothing cancels.
    let p = wg_split_from(bitcast<u32>(x), 0x3f3504f3u);
    let f = p.y;
    let z = f * f;
    // Cephes.
    let q = (((((((7.0376836292e-2f * f - 1.1514610310e-1f) * f + 1.1676998740e-1f) * f - 1.2420140846e-1f) * f + 1.4249322787e-1f) * f - 1.6668057665e-1f) * f + 2.0000714765e-1f) * f - 2.4999993993e-1f) * f + 3.3333331174e-1f;
    let tail = f * z * q - 0.5f * z;
    let sum = wg_sum(p.x, f);
    return wg_log_ends(x, sum.x + (sum.y + (tail + (tail + f) * 0.44269504088896340736f)));
}

fn wg_log1p(x: f32) -> f32 {
    if (abs(x) < 0.33f) { return x + wg_log_tail(x); }
    let u = wg_keep(1f + x);
    let lost = x - (u - 1f);
    let p = wg_split(bitcast<u32>(u));
    // The rounding error of the sum, relative to 2ᵉ; far out it is far below the last place.
    let f = p.y + select(0f, lost * exp2(-p.x), abs(p.x) < 60f);
    let y = p.x * 0.693359375f + (f + (wg_log_tail(f) + p.x * -2.12194440e-4f));
    return wg_log_ends(u, y);
}

fn wg_tanh(x: f32) -> f32 {
    let a = abs(x);
    if (a < 0.625f) {
        let z = x * x;
        // Cephes.
        let p = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z - 3.33332819422e-1f;
        return p * z * x + x;
    }
    if (wg_nan(x)) { return x; }
    return wg_copysign(1f - 2f / (wg_exp(2f * min(a, 20f)) + 1f), x);
}

fn wg_sinh(x: f32) -> f32 {
    let a = abs(x);
    if (a < 1f) {
        let z = x * x;
        // Cephes.
        return ((2.03721912945e-4f * z + 8.33028376239e-3f) * z + 1.66667160211e-1f) * z * x + x;
    }
    let h = wg_exp_scaled(a, 0f, -1i);
    return wg_copysign(h - 0.25f / h, x);
}

fn wg_cosh(x: f32) -> f32 {
    let h = wg_exp_scaled(abs(x), 0f, -1i);
    return h + 0.25f / h;
}

const wg_two_over_pi = array<u32, 9>(0u, 0xA2F9836Eu, 0x4E441529u, 0xFC2757D1u, 0xF534DDC0u, 0xDB629599u, 0x3C439041u, 0xFE5163ABu, 0xDEBBC561u);

fn wg_pi_word(i: u32) -> u32 {
    var table = wg_two_over_pi;
    return table[i];
}

// r and the last two bits of n of x = n·π/2 + r, |r| ≤ π/4 (Payne and Hanek 1983): the mantissa times those 96 bits of 2/π that
// matter for its exponent, in integers.
fn wg_pi_reduce(x: f32) -> vec2<f32> {
    let bits = bitcast<u32>(x);
    let a = bits & 0x7fffffffu;
    if (a < 0x3f490fdbu) { return vec2<f32>(x, 0f); }
    if (a >= 0x7f800000u) { return vec2<f32>(wg_bits(0x7fc00000u), 0f); }
    let m = (a & 0x7fffffu) | 0x800000u;
    let skip = (a >> 23u) - 120u;
    let word = skip >> 5u;
    let shift = skip & 31u;
    var w = vec4<u32>(wg_pi_word(word), wg_pi_word(word + 1u), wg_pi_word(word + 2u), wg_pi_word(word + 3u));
    if (shift != 0u) {
        w = (w << vec4<u32>(shift)) | (w.yzwx >> vec4<u32>(32u - shift));
    }
    let low = wg_wide_mul(m, w.z);
    let mid = wg_wide_mul(m, w.y);
    let second = mid.y + low.x;
    let first = m * w.x + mid.x + select(0u, 1u, second < mid.y);
    var n = first >> 30u;
    // The fraction of a quarter turn, as 64 bits, the low word first.
    var f = vec2<u32>((second << 2u) | (low.y >> 30u), (first << 2u) | (second >> 30u));
    let past = (f.y >> 31u) == 1u;
    if (past) {
        n = n + 1u;
        f = wg_neg_i64(f);
    }
    let zeros = select(countLeadingZeros(f.y), 32u + countLeadingZeros(f.x), f.y == 0u);
    let top = wg_shl_i64(f, vec2<u32>(min(zeros, 63u), 0u));
    // π/2 as 1.31 bits.
    let size = f32(wg_wide_mul(top.y, 0xC90FDAA2u).x) * 4.656612873077393e-10f * bitcast<f32>((127u - min(zeros, 64u)) << 23u);
    let minus = past != ((bits >> 31u) == 1u);
    n = select(n, 0u - n, (bits >> 31u) == 1u) & 3u;
    return vec2<f32>(select(size, -size, minus), f32(n));
}

fn wg_sin_near(r: f32) -> f32 {
    let z = r * r;
    return r + r * z * (((2.7177408e-06f * z - 0.00019839272f) * z + 0.008333329f) * z - 0.16666667f);
}

fn wg_cos_near(r: f32) -> f32 {
    let z = r * r;
    return (1f - 0.5f * z) + z * z * (((-2.7202161e-07f * z + 2.4799416e-05f) * z - 0.0013888883f) * z + 0.041666668f);
}

fn wg_sin(x: f32) -> f32 {
    let p = wg_pi_reduce(x);
    let n = u32(p.y);
    let y = select(wg_sin_near(p.x), wg_cos_near(p.x), (n & 1u) == 1u);
    return select(y, -y, (n & 2u) == 2u);
}

fn wg_cos(x: f32) -> f32 {
    let p = wg_pi_reduce(x);
    let n = u32(p.y);
    let y = select(wg_cos_near(p.x), wg_sin_near(p.x), (n & 1u) == 1u);
    return select(y, -y, n == 1u || n == 2u);
}

fn wg_tan(x: f32) -> f32 {
    let p = wg_pi_reduce(x);
    let z = p.x * p.x;
    // Cephes.
    let q = ((((9.38540185543e-3f * z + 3.11992232697e-3f) * z + 2.44301354525e-2f) * z + 5.34112807005e-2f) * z + 1.33387994085e-1f) * z + 3.33331568548e-1f;
    let y = q * z * p.x + p.x;
    return select(y, -1f / y, (u32(p.y) & 1u) == 1u);
}

// s and rest of asin s = s + rest: s = a up to 1/2, and beyond s = √((1 − a)/2), where asin a = π/2 − 2·asin s.
fn wg_asin_parts(a: f32) -> vec2<f32> {
    let folded = (1f - a) * 0.5f;
    let z = select(a * a, folded, a > 0.5f);
    let s = select(a, wg_sqrt(folded), a > 0.5f);
    let tail = (((0.04216067f * z + 0.024183648f) * z + 0.045469318f) * z + 0.07495309f) * z + 0.16666752f;
    return vec2<f32>(s, s * z * tail);
}

fn wg_asin(x: f32) -> f32 {
    let a = abs(x);
    let p = wg_asin_parts(a);
    let near_one = (1.5707964f - 2f * p.x) + (-4.371139e-8f - 2f * p.y);
    return wg_copysign(select(p.x + p.y, near_one, a > 0.5f), x);
}

fn wg_acos(x: f32) -> f32 {
    let a = abs(x);
    let p = wg_asin_parts(a);
    let twice = 2f * (p.x + p.y);
    let minus = x < 0f;
    let near_one = select(twice, (3.1415927f - twice) + -8.742278e-8f, minus);
    let q = select(p, -p, minus);
    let near_zero = 1.5707964f - (q.x - (-4.371139e-8f - q.y));
    return select(near_zero, near_one, a > 0.5f);
}

// atan(a/b) of positive a and b: around 0, π/4 or π/2, whichever is nearest.
fn wg_atan_ratio(a: f32, b: f32) -> f32 {
    var top = a - b;
    var bottom = a + b;
    var quarters = 1f;
    if (a > 2.4142137f * b) {
        top = -b;
        bottom = a;
        quarters = 2f;
    } else if (a <= 0.41421357f * b) {
        top = a;
        bottom = b;
        quarters = 0f;
    }
    let t = top / bottom;
    let z = t * t;
    let tail = (((-0.0608996f * z + 0.105991445f) * z - 0.1424439f) * z + 0.19998528f) * z - 0.33333316f;
    let rest = t * z * tail + quarters * -2.1855695e-8f;
    return quarters * 0.7853982f + (t + rest);
}

fn wg_atan(x: f32) -> f32 {
    if (wg_nan(x)) { return x; }
    return wg_copysign(wg_atan_ratio(abs(x), 1f), x);
}

fn wg_atan2(y: f32, x: f32) -> f32 {
    if (wg_nan(x) || wg_nan(y)) { return x + y; }
    let a = abs(y);
    let b = abs(x);
    // Huge sides must not overflow in a sum, tiny ones not be rounded in a comparison; equal sides, which may be infinite or
    // zero, are the ratio 1 or 0.
    let unit = select(268435456f, 0.25f, a > 1e29f || b > 1e29f);
    let same = a == b;
    let angle = wg_atan_ratio(select(a * unit, select(1f, 0f, a == 0f), same), select(b * unit, 1f, same));
    let minus = (bitcast<u32>(x) >> 31u) == 1u;
    return wg_copysign(select(angle, (3.1415927f - angle) + -8.742278e-8f, minus), y);
}

fn wg_erf(x: f32) -> f32 {
    if (wg_nan(x)) { return x; }
    let a = min(abs(x), 3.93f);
    let curve = ((((((-9.313916e-6f * a + 0.000118215066f) * a - 0.0006351029f) * a + 0.0016716068f) * a - 0.00016547831f) * a - 0.019149981f) * a + 0.10277688f) * a + 0.6366195f;
    let rest = a * (a * curve - 5.863538e-8f);
    return wg_copysign(wg_expm1(-(a * 1.1283792f + rest)), x);
}

// exp(−x²)·s·p(1 − s) with s = 6/(x + 3), as on the CPU (Shepherd & Laframboise 1981).
fn wg_erfc(x: f32) -> f32 {
    if (wg_nan(x)) { return x; }
    let a = min(abs(x), 10.1f);
    let s = 6f / (a + 3f);
    let t = 1f - s;
    let curve = ((((((((-5.5671633e-05f * t - 8.327932e-05f) * t + 0.0005129282f) * t - 0.00020281963f) * t - 0.0044727405f) * t + 0.019921213f) * t - 0.05174444f) * t + 0.0983714f) * t - 0.14723241f) * t + 0.17900115f;
    let square = wg_product(a, a);
    let y = wg_exp(-square.x) * (1f - square.y) * (s * curve);
    return select(y, 2f - y, x < 0f);
}
