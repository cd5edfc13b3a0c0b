// Bits, f16 and bf16, casts of 32-bit types, random words.

// Constant expressions must be finite: the bits of infinities and NaN go through here.
fn wg_bits(b: u32) -> f32 {
    return bitcast<f32>(b);
}

// The operand unchanged, hidden from a compiler that would simplify rounding errors away.
fn wg_keep(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ wg_zero);
}

fn wg_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

// Comparisons with infinities may be simplified away where arithmetic is taken to be finite.
fn wg_infinite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u;
}

fn wg_copysign(x: f32, sign: f32) -> f32 {
    return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(sign) & 0x80000000u));
}

fn wg_widen_f16(h: u32) -> f32 {
    let sign = (h & 0x8000u) << 16u;
    let exponent = (h >> 10u) & 31u;
    let fraction = h & 0x3ffu;
    if (exponent == 31u) {
        return bitcast<f32>(sign | 0x7f800000u | (fraction << 13u) | select(0u, 0x400000u, fraction != 0u));
    }
    if (exponent == 0u) {
        return bitcast<f32>(sign | bitcast<u32>(f32(fraction) * 5.9604644775390625e-8f));
    }
    return bitcast<f32>(sign | ((exponent + 112u) << 23u) | (fraction << 13u));
}

fn wg_narrow_f16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    if (a >= 0x477ff000u) {
        return sign | select(0x7c00u, 0x7e00u | ((a >> 13u) & 0x3ffu), a > 0x7f800000u);
    }
    if (a < 0x38800000u) {
        // Subnormal: rounded by the bits shifted out, ties to even.
        let shift = min(126u - (a >> 23u), 31u);
        let m = (a & 0x7fffffu) | 0x800000u;
        let kept = m >> shift;
        let rest = m & ((1u << shift) - 1u);
        let half = 1u << (shift - 1u);
        let up = rest > half || (rest == half && (kept & 1u) == 1u);
        return sign | (kept + select(0u, 1u, up && a > 0x32800000u));
    }
    return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u)) >> 13u);
}

fn wg_widen_bf16(h: u32) -> f32 {
    let bits = h << 16u;
    return bitcast<f32>(select(bits, bits | 0x400000u, (bits & 0x7fffffffu) > 0x7f800000u));
}

fn wg_narrow_bf16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits | 0x400000u) >> 16u, (bits & 0x7fffffffu) > 0x7f800000u) & 0xffffu;
}

fn wg_f16(x: f32) -> f32 {
    return wg_widen_f16(wg_narrow_f16(x));
}

fn wg_bf16(x: f32) -> f32 {
    return wg_widen_bf16(wg_narrow_bf16(x));
}

fn wg_bool(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) != 0u;
}

// Truncated and saturated; NaN is 0.
fn wg_i32(x: f32) -> i32 {
    if (x >= 2147483648f) { return 2147483647i; }
    if (x <= -2147483648f) { return i32(-2147483648); }
    if (wg_nan(x)) { return 0i; }
    return i32(x);
}

fn wg_u32(x: f32) -> u32 {
    if (x >= 4294967296f) { return 4294967295u; }
    if (wg_nan(x) || x <= 0f) { return 0u; }
    return u32(x);
}

fn wg_u8(x: f32) -> u32 {
    return min(wg_u32(x), 255u);
}

// The high and the low word of a product.
fn wg_wide_mul(a: u32, b: u32) -> vec2<u32> {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let low = al * bl;
    let mid = ah * bl + (low >> 16u);
    let mid2 = al * bh + (mid & 0xffffu);
    return vec2<u32>(ah * bh + (mid >> 16u) + (mid2 >> 16u), (mid2 << 16u) | (low & 0xffffu));
}

// Philox4x32-10 (Salmon et al. 2011): word `index % 4` of counter `(index / 4, 0, stream, 0)`.
fn wg_random(seed: vec2<u32>, stream: u32, index: u32) -> u32 {
    var x = vec4<u32>(index >> 2u, 0u, stream, 0u);
    var k = seed;
    for (var round = 0u; round < 10u; round++) {
        let p = wg_wide_mul(x.x, 0xD2511F53u);
        let q = wg_wide_mul(x.z, 0xCD9E8D57u);
        x = vec4<u32>(q.x ^ x.y ^ k.x, q.y, p.x ^ x.w ^ k.y, p.y);
        k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return x[index & 3u];
}
