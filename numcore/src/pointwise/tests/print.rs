//! Exact text of printed programs.

use super::*;
use crate::pointwise::Dialect;

fn body(p: &Program, dtype: DType, dialect: Dialect) -> String {
    p.print(&p.resolve(&vec![dtype; p.inputs()], &[]).unwrap(), dialect).unwrap()
}

fn check(got: &str, want: &str) {
    let lines = |s: &str| s.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("\n");
    assert_eq!(lines(got), lines(want), "\n{got}");
}

/// A program with every kind of value: a launch value, a constant without a literal, a `select`, random bits, a
/// position.
fn sample() -> Program {
    Program::build("sample", 2, 2, |b, x, s| {
        let decay = 1.0 - s[1];
        let kept = x[0].lt(x[1]).select(x[0].exp() * decay, b.c(f64::INFINITY));
        vec![kept, b.random(0, 3).cast_like(x[1]) + b.index()]
    })
}

#[test]
fn to_read() {
    check(
        &sample().to_string(),
        "sample(2 inputs, 2 scalars) {
           v4 = sub(1.0, s1)
           v5 = lt(in0, in1)
           v6 = exp(in0)
           v7 = mul(v4, v6)
           v9 = select(v5, v7, inf)
           v11 = cast_like(random(s0, 3), in1)
           v13 = add(v11, index)
           return v9, v13
         }",
    );
    let gelu = Program::new("gelu", |[x], []| [x.gelu().cast(DType::BF16)]);
    assert!(gelu.to_string().contains("cast(v12) to bf16"), "{gelu}");
    assert_eq!(format!("{:?}", sample()), "Program(sample #d58fb2fa9a236958)");
}

#[test]
fn as_rust() {
    check(
        &body(&sample(), DType::F64, Dialect::Rust),
        "let v5: bool = in0 < in1;
         let v6: f64 = Math::exp(in0);
         let v7: f64 = s0 * v6;
         let v9: f64 = if v5 { v7 } else { f64::from_bits(0x7ff0000000000000) };
         let v10: u32 = random(seed0, 3, index);
         let v11: f64 = v10 as f64;
         let v12: f64 = index as f64;
         let v13: f64 = v11 + v12;
         out0 = v9;
         out1 = v13;",
    );
}

/// A product that only a sum reads is rounded once, with the sum.
#[test]
fn as_rust_with_fused_products() {
    let p = Program::new("fused", |[a, b, c], []| [a * b + c, a * c - b, c - b * 2.0, a * a, a * a + 1.0]);
    check(
        &body(&p, DType::F32, Dialect::Rust),
        "let v4: f32 = in0.mul_add(in1, in2);
         let v6: f32 = in0.mul_add(in2, -in1);
         let v9: f32 = (-in1).mul_add(2.0f32, in2);
         let v10: f32 = in0 * in0;
         let v12: f32 = v10 + 1.0f32;
         out0 = v4;
         out1 = v6;
         out2 = v9;
         out3 = v10;
         out4 = v12;",
    );
}

#[test]
fn as_cuda() {
    check(
        &body(&sample(), DType::BF16, Dialect::Cuda),
        "const bool v5 = in0 < in1;
         const float v6 = exp(in0);
         const float v7 = s0 * v6;
         const float v9 = v5 ? v7 : __int_as_float(0x7f800000);
         const unsigned int v10 = wg_random(seed0, 3u, index);
         const float v11 = wg_bf16((float)v10);
         const float v12 = (float)index;
         const float v13 = v11 + v12;
         out0 = v9;
         out1 = v13;",
    );
}

#[test]
fn as_wgsl() {
    check(
        &body(&sample(), DType::F32, Dialect::Wgsl),
        "let v5: bool = in0 < in1;
         let v6: f32 = wg_exp(in0);
         let v7: f32 = s0 * v6;
         let v9: f32 = select(wg_bits(0x7f800000u), v7, v5);
         let v10: u32 = wg_random(seed0, 3u, index);
         let v11: f32 = f32(v10);
         let v12: f32 = f32(index);
         let v13: f32 = v11 + v12;
         out0 = v9;
         out1 = v13;",
    );
}

/// Integer arithmetic wraps in every dialect, and is defined where the language's own is not.
#[test]
fn integers() {
    let p = Program::new("ints", |[x], []| [x / 3 + x, (x - 7).cast(DType::F16), x.gt(2) ^ x.eq(5)]);
    check(
        &body(&p, DType::I32, Dialect::Cuda),
        "const int v2 = wg_div(in0, (int)3);
         const int v3 = (int)((unsigned int)in0 + (unsigned int)v2);
         const int v5 = (int)((unsigned int)in0 - (unsigned int)(int)7);
         const float v6 = wg_f16((float)v5);
         const bool v8 = (int)2 < in0;
         const bool v10 = in0 == (int)5;
         const bool v11 = v8 ^ v10;
         out0 = v3;
         out1 = v6;
         out2 = v11;",
    );
    check(
        &body(&p, DType::U8, Dialect::Wgsl),
        "let v2: u32 = (wg_div_u8(in0, u32(3))) & 0xffu;
         let v3: u32 = (in0 + v2) & 0xffu;
         let v5: u32 = (in0 - u32(7)) & 0xffu;
         let v6: f32 = wg_f16(f32(v5));
         let v8: bool = u32(2) < in0;
         let v10: bool = in0 == u32(5);
         let v11: bool = v8 != v10;
         out0 = v3;
         out1 = v6;
         out2 = v11;",
    );
    check(
        &body(&Program::new("low", |[x], []| [x * -3]), DType::I64, Dialect::Rust),
        "let v2: i64 = Int::mul(in0, (-3i64));
         out0 = v2;",
    );
}

/// WGSL has no 64-bit types: an `i64` is two words, with a function for every op.
#[test]
fn pairs_of_words() {
    let p =
        Program::new("pairs", |[x], []| [x * -3 + x.abs(), x.lt(1).select(x, x / x), x.cast(DType::U8).cast_like(x)]);
    check(
        &body(&p, DType::I64, Dialect::Wgsl),
        "let v2: vec2<u32> = wg_mul_i64(in0, vec2<u32>(4294967293u, 4294967295u));
         let v3: vec2<u32> = wg_abs_i64(in0);
         let v4: vec2<u32> = wg_add_i64(v2, v3);
         let v6: bool = wg_lt_i64(in0, vec2<u32>(1u, 0u));
         let v7: vec2<u32> = wg_div_i64(in0, in0);
         let v8: vec2<u32> = select(v7, in0, v6);
         let v9: u32 = (wg_u8_from_i64(in0)) & 0xffu;
         let v10: vec2<u32> = wg_i64_from_u8(v9);
         out0 = v4;
         out1 = v8;
         out2 = v10;",
    );
}

/// Expressions that a driver may simplify are hidden from it, and random values equal the CPU's to the last bit.
#[test]
fn wgsl_keeps_what_counts() {
    let p = Program::new("kept", |[x], []| [x * 0.0, x - x]);
    check(
        &body(&p, DType::F32, Dialect::Wgsl),
        "let v2: f32 = in0 * wg_bits(0x0u ^ wg_zero);
         let v3: f32 = in0 - wg_keep(in0);
         out0 = v2;
         out1 = v3;",
    );
    let p = Program::build("drawn", 0, 3, |b, _, s| vec![b.random(0, 0).cast(DType::F32) * s[1] + s[2]]);
    check(
        &body(&p, DType::F32, Dialect::Wgsl),
        "let v0: u32 = wg_random(seed0, 0u, index);
         let v1: f32 = f32(v0);
         let v3: f32 = s0 * v1;
         let v5: f32 = wg_fma(s0, v1, s1);
         out0 = v5;",
    );
}

#[test]
fn types_a_dialect_lacks_are_refused() {
    let double = Program::new("double", |[x], []| [x * 2]);
    let typed = double.resolve(&[DType::F64], &[]).unwrap();
    let error = double.print(&typed, Dialect::Wgsl).unwrap_err().to_string();
    let why = "Wgsl cannot compute in this type; cast to a narrower one on the host";
    assert_eq!(error, format!("double: dtypes f64: {why}"));
}
