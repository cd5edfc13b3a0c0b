// i64 as a pair of words, the low one first. Arithmetic wraps, as everywhere.

fn wg_add_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn wg_neg_i64(a: vec2<u32>) -> vec2<u32> {
    return wg_add_i64(~a, vec2<u32>(1u, 0u));
}

fn wg_sub_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn wg_mul_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = wg_wide_mul(a.x, b.x);
    return vec2<u32>(low.y, low.x + a.x * b.y + a.y * b.x);
}

fn wg_eq_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x == b.x && a.y == b.y;
}

fn wg_ne_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return !wg_eq_i64(a, b);
}

fn wg_lt_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return bitcast<i32>(a.y) < bitcast<i32>(b.y) || (a.y == b.y && a.x < b.x);
}

fn wg_le_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return !wg_lt_i64(b, a);
}

fn wg_below_u64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn wg_max_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(a, b, wg_lt_i64(a, b));
}

fn wg_min_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(a, b, wg_lt_i64(b, a));
}

fn wg_negative_i64(a: vec2<u32>) -> bool {
    return (a.y >> 31u) == 1u;
}

fn wg_abs_i64(a: vec2<u32>) -> vec2<u32> {
    return select(a, wg_neg_i64(a), wg_negative_i64(a));
}

fn wg_sign_i64(a: vec2<u32>) -> vec2<u32> {
    let positive = vec2<u32>(select(0u, 1u, (a.x | a.y) != 0u), 0u);
    return select(positive, vec2<u32>(0xffffffffu, 0xffffffffu), wg_negative_i64(a));
}

fn wg_and_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return a & b;
}

fn wg_or_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return a | b;
}

fn wg_xor_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return a ^ b;
}

fn wg_shl_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let n = b.x & 63u;
    if (n == 0u) { return a; }
    if (n >= 32u) { return vec2<u32>(0u, a.x << (n - 32u)); }
    return vec2<u32>(a.x << n, (a.y << n) | (a.x >> (32u - n)));
}

fn wg_shr_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let n = b.x & 63u;
    let high = bitcast<i32>(a.y);
    if (n == 0u) { return a; }
    if (n >= 32u) { return vec2<u32>(bitcast<u32>(high >> (n - 32u)), bitcast<u32>(high >> 31u)); }
    return vec2<u32>((a.x >> n) | (a.y << (32u - n)), bitcast<u32>(high >> n));
}

// Quotient and remainder of magnitudes, bit by bit where one word does not do.
fn wg_divide_u64(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
    if ((a.y | b.y) == 0u) {
        let q = a.x / b.x;
        return vec4<u32>(q, 0u, a.x - q * b.x, 0u);
    }
    var q = vec2<u32>(0u, 0u);
    var r = vec2<u32>(0u, 0u);
    for (var step = 0u; step < 64u; step++) {
        let bit = 63u - step;
        let next = select((a.x >> (bit & 31u)) & 1u, (a.y >> (bit & 31u)) & 1u, bit >= 32u);
        let over = (r.y >> 31u) == 1u;
        r = vec2<u32>((r.x << 1u) | next, (r.y << 1u) | (r.x >> 31u));
        q = vec2<u32>(q.x << 1u, (q.y << 1u) | (q.x >> 31u));
        if (over || !wg_below_u64(r, b)) {
            r = wg_sub_i64(r, b);
            q.x |= 1u;
        }
    }
    return vec4<u32>(q, r);
}

fn wg_div_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if ((b.x | b.y) == 0u) { return vec2<u32>(0u, 0u); }
    let q = wg_divide_u64(wg_abs_i64(a), wg_abs_i64(b)).xy;
    return select(q, wg_neg_i64(q), wg_negative_i64(a) != wg_negative_i64(b));
}

fn wg_rem_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if ((b.x | b.y) == 0u) { return vec2<u32>(0u, 0u); }
    let size = wg_divide_u64(wg_abs_i64(a), wg_abs_i64(b)).zw;
    let r = select(size, wg_neg_i64(size), wg_negative_i64(a));
    let across = (r.x | r.y) != 0u && wg_negative_i64(r) != wg_negative_i64(b);
    return select(r, wg_add_i64(r, b), across);
}

fn wg_pow_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let one = vec2<u32>(1u, 0u);
    if (wg_negative_i64(b)) {
        let minus = vec2<u32>(0xffffffffu, 0xffffffffu);
        if (wg_eq_i64(a, one)) { return one; }
        if (wg_eq_i64(a, minus)) { return select(minus, one, (b.x & 1u) == 0u); }
        return vec2<u32>(0u, 0u);
    }
    var result = one;
    var square = a;
    var left = b;
    while ((left.x | left.y) != 0u) {
        if ((left.x & 1u) == 1u) { result = wg_mul_i64(result, square); }
        square = wg_mul_i64(square, square);
        left = vec2<u32>((left.x >> 1u) | (left.y << 31u), left.y >> 1u);
    }
    return result;
}

fn wg_i64_from_i32(x: i32) -> vec2<u32> {
    return vec2<u32>(bitcast<u32>(x), bitcast<u32>(x >> 31u));
}

fn wg_i64_from_u32(x: u32) -> vec2<u32> {
    return vec2<u32>(x, 0u);
}

fn wg_i64_from_u8(x: u32) -> vec2<u32> {
    return vec2<u32>(x, 0u);
}

fn wg_i64_from_bool(x: bool) -> vec2<u32> {
    return vec2<u32>(select(0u, 1u, x), 0u);
}

fn wg_i32_from_i64(x: vec2<u32>) -> i32 {
    return bitcast<i32>(x.x);
}

fn wg_u32_from_i64(x: vec2<u32>) -> u32 {
    return x.x;
}

fn wg_u8_from_i64(x: vec2<u32>) -> u32 {
    return x.x & 0xffu;
}

fn wg_bool_from_i64(x: vec2<u32>) -> bool {
    return (x.x | x.y) != 0u;
}

// The nearest, ties to even.
fn wg_f32_from_i64(x: vec2<u32>) -> f32 {
    let a = wg_abs_i64(x);
    if ((a.x | a.y) == 0u) { return 0f; }
    let zeros = select(countLeadingZeros(a.y), 32u + countLeadingZeros(a.x), a.y == 0u);
    let top = wg_shl_i64(a, vec2<u32>(zeros, 0u));
    let kept = top.y >> 8u;
    let rest = top.y & 0xffu;
    let up = rest > 128u || (rest == 128u && (top.x != 0u || (kept & 1u) == 1u));
    let bits = ((190u - zeros) << 23u) + (kept & 0x7fffffu) + select(0u, 1u, up);
    return bitcast<f32>(bits | (x.y & 0x80000000u));
}

// Truncated and saturated; NaN is 0.
fn wg_i64(x: f32) -> vec2<u32> {
    let bits = bitcast<u32>(x);
    let exponent = (bits >> 23u) & 255u;
    let minus = (bits >> 31u) == 1u;
    if (exponent < 127u || wg_nan(x)) { return vec2<u32>(0u, 0u); }
    if (exponent >= 190u) {
        return select(vec2<u32>(0xffffffffu, 0x7fffffffu), vec2<u32>(0u, 0x80000000u), minus);
    }
    let m = (bits & 0x7fffffu) | 0x800000u;
    var a = vec2<u32>(m >> (150u - min(exponent, 150u)), 0u);
    if (exponent > 150u) { a = wg_shl_i64(vec2<u32>(m, 0u), vec2<u32>(exponent - 150u, 0u)); }
    return select(a, wg_neg_i64(a), minus);
}
