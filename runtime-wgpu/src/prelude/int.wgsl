// Integers of 32 and 8 bits, where the language's own is not defined as here: division by 0, shifts beyond the width.

fn wg_sign_i32(x: i32) -> i32 {
    return select(select(0i, 1i, x > 0i), -1i, x < 0i);
}

fn wg_sign_u32(x: u32) -> u32 {
    return min(x, 1u);
}

fn wg_sign_u8(x: u32) -> u32 {
    return min(x, 1u);
}

fn wg_div_u32(a: u32, b: u32) -> u32 {
    if (b == 0u) { return 0u; }
    return a / b;
}

fn wg_div_u8(a: u32, b: u32) -> u32 {
    return wg_div_u32(a, b);
}

fn wg_div_i32(a: i32, b: i32) -> i32 {
    if (b == 0i) { return 0i; }
    if (b == -1i) { return 0i - a; }
    return a / b;
}

fn wg_rem_u32(a: u32, b: u32) -> u32 {
    if (b == 0u) { return 0u; }
    return a % b;
}

fn wg_rem_u8(a: u32, b: u32) -> u32 {
    return wg_rem_u32(a, b);
}

fn wg_rem_i32(a: i32, b: i32) -> i32 {
    if (b == 0i || b == -1i) { return 0i; }
    let r = a - (a / b) * b;
    return select(r, r + b, r != 0i && (r < 0i) != (b < 0i));
}

fn wg_pow_u32(a: u32, b: u32) -> u32 {
    var result = 1u;
    var square = a;
    var left = b;
    while (left > 0u) {
        if ((left & 1u) == 1u) { result *= square; }
        square *= square;
        left >>= 1u;
    }
    return result;
}

fn wg_pow_u8(a: u32, b: u32) -> u32 {
    return wg_pow_u32(a, b) & 0xffu;
}

fn wg_pow_i32(a: i32, b: i32) -> i32 {
    if (b < 0i) {
        let sign = select(-1i, 1i, (b & 1i) == 0i);
        return select(select(0i, sign, a == -1i), 1i, a == 1i);
    }
    return bitcast<i32>(wg_pow_u32(bitcast<u32>(a), bitcast<u32>(b)));
}

fn wg_shl_u32(a: u32, b: u32) -> u32 {
    return a << (b & 31u);
}

fn wg_shl_i32(a: i32, b: i32) -> i32 {
    return bitcast<i32>(bitcast<u32>(a) << (bitcast<u32>(b) & 31u));
}

fn wg_shl_u8(a: u32, b: u32) -> u32 {
    return (a << (b & 7u)) & 0xffu;
}

fn wg_shr_u32(a: u32, b: u32) -> u32 {
    return a >> (b & 31u);
}

fn wg_shr_i32(a: i32, b: i32) -> i32 {
    return a >> (bitcast<u32>(b) & 31u);
}

fn wg_shr_u8(a: u32, b: u32) -> u32 {
    return a >> (b & 7u);
}
