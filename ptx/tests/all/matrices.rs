//! Matrices over the lanes of a warp, against plain loops.

use crate::support::{grid, kernel, run};

/// An element of `a: [16, 16]` or `b: [16, 8]`, exact in both halves.
fn element(row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3) % 11) as f32 - 5.0
}

fn bits(value: f32, kind: &str) -> u32 {
    // Small integers: an f16 of them by its definition, a bfloat16 by its upper half.
    if kind == "bf16" {
        return value.to_bits() >> 16;
    }
    if value == 0.0 {
        return 0;
    }
    let exponent = value.abs().log2().floor();
    let fraction = value.abs() / exponent.exp2() - 1.0;
    u32::from(value < 0.0) << 15 | ((exponent + 15.0) as u32) << 10 | (fraction * 1024.0) as u32
}

#[test]
fn a_product_of_loaded_tiles() {
    for (kind, trans) in [("f16", ""), ("bf16", ""), ("f16", ".trans"), ("bf16", ".trans")] {
        // `a` row by row in the first 512 bytes of shared memory; `b` behind it, by columns, or by rows for `.trans`.
        let mut words = Vec::new();
        for row in 0..16 {
            words.extend(
                (0..8).map(|pair| bits(element(row, 2 * pair), kind) | bits(element(row, 2 * pair + 1), kind) << 16),
            );
        }
        let b = |k: usize, n: usize| element(n + 5, k);
        let by_columns = |n: usize, k: usize| bits(b(k, n), kind) | bits(b(k + 1, n), kind) << 16;
        let by_rows = |k: usize, n: usize| bits(b(k, n), kind) | bits(b(k, n + 1), kind) << 16;
        if trans.is_empty() {
            (0..8).for_each(|n| words.extend((0..8).map(|pair| by_columns(n, 2 * pair))));
        } else {
            (0..16).for_each(|k| words.extend((0..4).map(|pair| by_rows(k, 2 * pair))));
        }
        // The matrices of `b`: rows of 32 bytes, or of 16. Four are loaded, of which two are used.
        let b_row = if trans.is_empty() {
            "and.b32 %r7, %t, 7; shl.b32 %r7, %r7, 5; and.b32 %r8, %t, 8; shl.b32 %r8, %r8, 1; add.u32 %r7, %r7, %r8;"
        } else {
            "and.b32 %r7, %t, 15; shl.b32 %r7, %r7, 4;"
        };
        let body = format!(
            ".shared .align 16 .b8 all[768];
             mov.u32 %r1, 0; mov.u32 %r2, all;
             $fill: mad.lo.s32 %r3, %r1, 32, %t; mul.wide.u32 %d1, %r3, 4; add.s64 %d1, %d1, %from;
             ld.global.u32 %r4, [%d1]; mad.lo.s32 %r5, %r3, 4, %r2; st.shared.u32 [%r5], %r4;
             add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 6; @%p1 bra $fill;
             bar.sync 0;
             and.b32 %r3, %t, 15; shl.b32 %r3, %r3, 5; shr.u32 %r4, %t, 4; shl.b32 %r4, %r4, 4;
             add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r2;
             ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];
             {b_row} add.u32 %r7, %r7, %r2;
             ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r6, %r9, %r14, %r15}}, [%r7+512];
             mov.f32 %f4, 0f3F800000;
             mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f0, %f1, %f2, %f3}},
               {{%r10, %r11, %r12, %r13}}, {{%r6, %r9}}, {{%f4, %f4, %f4, %f4}};
             mul.wide.u32 %d1, %t, 16; add.s64 %d1, %d1, %to; st.global.v4.f32 [%d1], {{%f0, %f1, %f2, %f3}};"
        );
        let got = run(&kernel(&body), grid(1, 32), 128, &words).unwrap_or_else(|e| panic!("{e}"));
        for (at, bits) in got.into_iter().enumerate() {
            let (lane, word) = (at / 4, at % 4);
            let (row, column) = (lane / 4 + word / 2 * 8, lane % 4 * 2 + word % 2);
            let want: f32 = (0..16).map(|k| element(row, k) * b(k, column)).sum::<f32>() + 1.0;
            assert_eq!(f32::from_bits(bits), want, "{kind}{trans} [{row}, {column}]");
        }
    }
}
