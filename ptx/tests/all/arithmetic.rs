//! Opcodes that compute, against their definitions.

use crate::support::warp;

/// Checks `opcode` on pairs of words that the lanes load, in one register class.
fn words(opcode: &str, expected: impl Fn(u32, u32) -> u32) {
    let edges = [0u32, 1, 2, 31, 32, 33, 255, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x0001_0000, 12_345];
    for b in edges {
        let body = format!(
            "mul.wide.u32 %d1, %t, 4; add.s64 %d1, %d1, %from; ld.global.u32 %r1, [%d1];
             {opcode} %r2, %r1, {b}; st.global.u32 [%at], %r2;"
        );
        let input: Vec<u32> = (0..32).map(|i| edges[i % edges.len()].wrapping_add(i as u32 / 12)).collect();
        let want: Vec<u32> = input.iter().map(|a| expected(*a, b)).collect();
        assert_eq!(warp(&body, &input), want, "{opcode} with {b}");
    }
}

#[test]
fn integers_wrap_and_shifts_stop() {
    words("add.s32", u32::wrapping_add);
    words("sub.u32", u32::wrapping_sub);
    words("mul.lo.s32", u32::wrapping_mul);
    words("mul.hi.u32", |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    words("mul.hi.s32", |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
    words("min.s32", |a, b| (a as i32).min(b as i32) as u32);
    words("max.u32", u32::max);
    words("shl.b32", |a, b| if b > 31 { 0 } else { a << b });
    words("shr.u32", |a, b| if b > 31 { 0 } else { a >> b });
    words("shr.s32", |a, b| ((a as i32) >> b.min(31)) as u32);
    words("and.b32", |a, b| a & b);
    words("xor.b32", |a, b| a ^ b);
    words("div.u32", |a, b| a.checked_div(b).unwrap_or(u32::MAX));
    words("rem.u32", |a, b| a.checked_rem(b).unwrap_or(a));
    words("div.s32", |a, b| if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 });
}

#[test]
fn bits_are_moved() {
    // bfi: 8 bits of the lane from place 4 on; prmt: bytes reversed.
    let got = warp("bfi.b32 %r1, %t, -1, 4, 8; st.global.u32 [%at], %r1;", &[0]);
    assert_eq!(got, (0..32).map(|i| !0xff0 | i << 4).collect::<Vec<u32>>());
    let got = warp("add.u32 %r1, %t, 0x01020300; prmt.b32 %r1, %r1, 0, 0x0123; st.global.u32 [%at], %r1;", &[0]);
    assert_eq!(got, (0..32u32).map(|i| (0x0102_0300 + i).swap_bytes()).collect::<Vec<u32>>());
    let body = "mov.b64 %d1, {%t, 7}; mov.b64 {_, %r1}, %d1; mov.b64 {%r2, _}, %d1; mad.lo.s32 %r1, %r1, 100, %r2;
                st.global.u32 [%at], %r1;";
    assert_eq!(warp(body, &[0]), (0..32).map(|i| 700 + i).collect::<Vec<u32>>());
}

#[test]
fn carries_go_on() {
    // (2^64 - 1 - lane) + (2^32 lane + 1) in three words, and the same less the second again.
    let body = "not.b32 %r1, %t; mov.u32 %r2, -1; mov.u32 %r3, 5;
        add.cc.u32 %r1, %r1, 1; addc.cc.u32 %r2, %r2, %t; addc.u32 %r3, %r3, 0;
        mad.lo.cc.u32 %r4, %r2, 3, %r1; madc.hi.u32 %r5, %r2, 3, %r3;
        sub.cc.u32 %r6, %r1, 1; subc.u32 %r7, %r2, %t;
        xor.b32 %r8, %r1, %r3; xor.b32 %r8, %r8, %r4; xor.b32 %r8, %r8, %r5; xor.b32 %r8, %r8, %r6;
        xor.b32 %r8, %r8, %r7; st.global.u32 [%at], %r8;";
    let want = |lane: u64| {
        let sum = (u128::from(5u32) << 64) + u128::from(!lane) + (u128::from(lane) << 32) + 1;
        let word = |at: u32| (sum >> (32 * at)) as u32;
        let product = u64::from(word(1)) * 3 + u64::from(word(0)) + (u64::from(word(2)) << 32);
        let less = (sum as u64).wrapping_sub(1 + (lane << 32));
        word(0) ^ word(2) ^ product as u32 ^ (product >> 32) as u32 ^ less as u32 ^ (less >> 32) as u32
    };
    assert_eq!(warp(body, &[0]), (0..32).map(want).collect::<Vec<_>>());
}

#[test]
fn conversions_keep_the_sign_and_round() {
    let body = "sub.s32 %r1, %t, 16; cvt.s64.s32 %d1, %r1; shr.s64 %d1, %d1, 1; cvt.u32.u64 %r2, %d1;
                st.global.u32 [%at], %r2;";
    assert_eq!(warp(body, &[0]), (0..32).map(|i| ((i - 16) >> 1) as u32).collect::<Vec<_>>());
    // A conversion reads the lower half of a larger register.
    let body = "mul.wide.u32 %d1, %t, 0x40000001; cvt.s64.s32 %d2, %d1; shr.s64 %d2, %d2, 32; cvt.u32.u64 %r1, %d2;
                st.global.u32 [%at], %r1;";
    let high = |i: u32| i64::from(i.wrapping_mul(0x4000_0001) as i32) >> 32;
    assert_eq!(warp(body, &[0]), (0..32).map(|i| high(i) as u32).collect::<Vec<_>>());
    let body = "cvt.rn.f32.s32 %f1, %t; mul.f32 %f1, %f1, 0f3DCCCCCD; cvt.rn.f16x2.f32 %r1, %f1, %f1;
                mov.b32 {%h1, %h2}, %r1; cvt.f32.f16 %f2, %h2; st.global.f32 [%at], %f2;";
    for (i, bits) in warp(body, &[0]).into_iter().enumerate() {
        let (got, want) = (f32::from_bits(bits), i as f32 * 0.1);
        assert!((got - want).abs() <= want * 2f32.powi(-11), "{i}: {got}");
    }
}

#[test]
fn comparisons_know_nan() {
    // Lane 0 has NaN, the others their number; each bit is one comparison with 3.
    let names = ["lt", "le", "gt", "ge", "eq", "ne", "ltu", "leu", "gtu", "geu", "equ", "neu", "num", "nan"];
    let tests: String = names
        .iter()
        .enumerate()
        .map(|(bit, name)| {
            format!("setp.{name}.f32 %p2, %f1, 0f40400000; selp.b32 %r1, {}, 0, %p2; or.b32 %r2, %r2, %r1;\n", 1 << bit)
        })
        .collect();
    let body = format!(
        "cvt.rn.f32.u32 %f1, %t; setp.eq.s32 %p1, %t, 0; @%p1 mov.f32 %f1, 0f7FC00000; mov.u32 %r2, 0;
         {tests} st.global.u32 [%at], %r2;"
    );
    let want = |i: u32| {
        let (a, b) = (if i == 0 { f32::NAN } else { i as f32 }, 3f32);
        let nan = a.is_nan();
        let ordered = [a < b, a <= b, a > b, a >= b, a == b, !nan && a != b];
        let all = ordered.into_iter().chain(ordered.map(|holds| holds || nan)).chain([!nan, nan]);
        all.enumerate().fold(0, |bits, (bit, holds)| bits | u32::from(holds) << bit)
    };
    assert_eq!(warp(&body, &[0]), (0..32).map(want).collect::<Vec<_>>());
}
