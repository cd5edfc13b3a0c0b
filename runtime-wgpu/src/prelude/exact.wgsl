// Sums and products with their rounding errors, and functions built on them: powers, remainders, an FMA.

// a·b and its rounding error (Dekker 1971), for values whose product is normal.
fn wg_product(a: f32, b: f32) -> vec2<f32> {
    let p = wg_keep(a * b);
    let ah = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
    let bh = bitcast<f32>(bitcast<u32>(b) & 0xfffff000u);
    let al = a - ah;
    let bl = b - bh;
    return vec2<f32>(p, ((ah * bh - p) + ah * bl + al * bh) + al * bl);
}

// a + b and its rounding error, for |a| ≥ |b| or a = 0.
fn wg_sum(a: f32, b: f32) -> vec2<f32> {
    let s = wg_keep(a + b);
    return vec2<f32>(s, b - (s - a));
}

// log x as a sum of two, for a positive finite value: e·ln 2 + 2s + (2/3)s³ + s⁵·T(s²), s = f/(2 + f), the first three in pairs.
fn wg_log_pair(x: f32) -> vec2<f32> {
    let p = wg_split(bitcast<u32>(x));
    let f = p.y;
    let g = wg_keep(2f + f);
    let g_low = f - (g - 2f);
    let s = f / g;
    let back = wg_product(s, g);
    let s_low = (((f - back.x) - back.y) - s * g_low) / g;
    let z = wg_product(s, s);
    let z_low = z.y + 2f * s * s_low;
    let cube = wg_product(s, z.x);
    let cube_low = cube.y + s * z_low + s_low * z.x;
    let third = wg_product(cube.x, 0.6666667f);
    let third_low = third.y + cube.x * -1.9868216e-8f + cube_low * 0.6666667f;
    let t = (((0.15384615f * z.x + 0.18181818f) * z.x + 0.22222222f) * z.x + 0.2857143f) * z.x + 0.4f;
    let rest = cube.x * z.x * t;
    let ln2 = p.x * 0.693359375f;
    let first = wg_sum(ln2, 2f * s);
    let second = wg_sum(first.x, third.x);
    let low = first.y + second.y + (2f * s_low + third_low + rest + p.x * -2.1219444e-4f);
    return wg_sum(second.x, low);
}

fn wg_positive_pow(a: f32, y: f32) -> f32 {
    let c = wg_within(y, -1e18f, 1e18f);
    let log = wg_log_pair(a);
    let p = wg_product(c, log.x);
    if (p.x > 100f) { return wg_bits(0x7f800000u); }
    if (p.x < -120f) { return 0f; }
    return wg_exp_scaled(p.x, p.y + c * log.y, 0i);
}

// With C's special values.
fn wg_pow_f32(x: f32, y: f32) -> f32 {
    if (y == 0f || x == 1f) { return 1f; }
    if (wg_nan(x) || wg_nan(y)) { return x + y; }
    let a = abs(x);
    let infinity = wg_bits(0x7f800000u);
    var size = select(0f, infinity, (a == 0f) == (y < 0f));
    if (a == 1f) { size = 1f; } else if (a != 0f && a < infinity) { size = wg_positive_pow(a, y); }
    let half = y * 0.5f;
    let whole = trunc(y) == y;
    let odd = whole && trunc(half) != half;
    let minus = (bitcast<u32>(x) >> 31u) == 1u;
    if (minus && a != 0f && a < infinity && !whole) { return wg_bits(0x7fc00000u); }
    return select(size, -size, minus && odd);
}

// The exact remainder with the sign of b, by long division of the mantissas.
fn wg_rem_f32(a: f32, b: f32) -> f32 {
    let x = bitcast<u32>(a) & 0x7fffffffu;
    let y = bitcast<u32>(b) & 0x7fffffffu;
    if (x >= 0x7f800000u || y > 0x7f800000u || y == 0u) { return wg_bits(0x7fc00000u); }
    var bits = x;
    if (x >= y && y < 0x7f800000u) {
        let ex = max(x >> 23u, 1u);
        let ey = max(y >> 23u, 1u);
        var m = select((x & 0x7fffffu) | 0x800000u, x, x < 0x800000u);
        let d = select((y & 0x7fffffu) | 0x800000u, y, y < 0x800000u);
        m = m % d;
        for (var e = ex; e > ey; e--) {
            m = (m << 1u) % d;
        }
        // Back to a float: m·2^(ey − 150).
        if (m == 0u) { return bitcast<f32>(bitcast<u32>(a) & 0x80000000u); }
        let shift = min(countLeadingZeros(m) - 8u, ey - 1u);
        m = m << shift;
        bits = select((m & 0x7fffffu) | ((ey - shift) << 23u), m, m < 0x800000u);
    }
    let r = bitcast<f32>(bits | (bitcast<u32>(a) & 0x80000000u));
    let across = bits != 0u && ((bitcast<u32>(a) ^ bitcast<u32>(b)) >> 31u) == 1u;
    return select(r, r + b, across);
}

// a + b and its rounding error (Knuth), for any two values.
fn wg_two_sum(a: f32, b: f32) -> vec2<f32> {
    let s = wg_keep(a + b);
    let back = wg_keep(s - a);
    return vec2<f32>(s, (a - wg_keep(s - back)) + (b - back));
}

// a + b rounded to odd: inexact sums end in 1.
fn wg_odd_sum(a: f32, b: f32) -> f32 {
    let s = wg_two_sum(a, b);
    let bits = bitcast<u32>(s.x);
    if (s.y == 0f || (bits & 1u) == 1u) { return s.x; }
    return bitcast<f32>(select(bits - 1u, bits + 1u, (s.y > 0f) == (s.x > 0f)));
}

// a·b + c rounded once (Boldo and Melquiond 2008), which WGSL's own does not promise.
fn wg_fma(a: f32, b: f32, c: f32) -> f32 {
    let plain = a * b + c;
    if ((bitcast<u32>(plain) & 0x7f800000u) == 0x7f800000u) { return plain; }
    let u = wg_product(a, b);
    let t = wg_two_sum(c, u.y);
    let v = wg_two_sum(u.x, t.x);
    return v.x + wg_odd_sum(t.y, v.y);
}
