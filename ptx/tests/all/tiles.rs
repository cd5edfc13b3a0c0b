//! Products of a warpgroup, against plain loops, and what they find.

use ptx::{FaultKind, LaunchError};

use crate::support::{grid, kernel, run};

/// The columns of `b`.
const COLUMNS: usize = 16;

/// An element of `a: [64, 16]` or `b: [16, 16]`, exact in bf16.
fn element(row: usize, column: usize) -> f32 {
    ((row * 5 + column * 3) % 13) as f32 - 6.0
}

/// Where a tile has 16 bytes: rows of 128 bytes, whose words are permuted by the number of the row.
fn word_of(row: usize, word: usize) -> usize {
    row * 8 + (word ^ (row % 8))
}

/// Tiles in shared memory, in words of 32 bits: `a` in 64 rows of 64 halves, of which 16 from `skipped` on are used. Then
/// comes `b` in rows along its columns, or, transposed, along its sums.
fn image(skipped: usize, transposed: bool) -> Vec<u32> {
    let mut halves = vec![0u16; 64 * 64 + 16 * 64];
    let half = |value: f32| (value.to_bits() >> 16) as u16;
    let mut put = |base: usize, row: usize, column: usize, value: f32| {
        halves[base + word_of(row, column / 8) * 8 + column % 8] = half(value);
    };
    for k in 0..16 {
        (0..64).for_each(|row| put(0, row, skipped + k, element(row, k)));
        for column in 0..COLUMNS {
            let (row, at) = if transposed { (k, column) } else { (column, k) };
            put(64 * 64, row, at, element(k, column + 40));
        }
    }
    halves.as_chunks::<2>().0.iter().map(|[low, high]| u32::from(*low) | u32::from(*high) << 16).collect()
}

const FENCES: [&str; 2] = ["fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;"];
const BARRIER: &str = "bar.sync 0;";
const WAIT: &str = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;";
/// The descriptor of rows of 128 bytes, eight of which begin 1024 bytes after the eight before.
const LAYOUT: &str = "0x4000004000010000";

/// The kernel of `c + a · b`, where `c` is 1 everywhere.
fn body(a: &str, transposed: bool, [writes, barrier, registers, wait]: [&str; 4], layout: &str) -> String {
    let flags = match (a.starts_with('{'), transposed) {
        (true, _) => format!("1, 1, {}", u8::from(transposed)),
        (false, _) => format!("1, 1, 0, {}", u8::from(transposed)),
    };
    let d = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}";
    format!(
        ".shared .align 1024 .b8 all[10240];
         mov.u32 %r2, all; mov.u32 %r1, %t;
         $fill: mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d1, %from; ld.global.u32 %r4, [%d1];
         mad.lo.s32 %r5, %r1, 4, %r2; st.shared.u32 [%r5], %r4;
         add.u32 %r1, %r1, 128; setp.lt.u32 %p1, %r1, 2560; @%p1 bra $fill;
         {writes} {barrier}
         and.b32 %r6, %t, 31; shr.u32 %r7, %r6, 2; shr.u32 %r8, %t, 5; mad.lo.s32 %r7, %r8, 16, %r7;
         and.b32 %r8, %r7, 7; shl.b32 %r8, %r8, 4; mad.lo.s32 %r9, %r7, 128, %r2; and.b32 %r10, %t, 3; shl.b32 %r10, %r10, 2;
         add.u32 %r9, %r9, %r10; mov.u32 %r10, 0; xor.b32 %r10, %r10, %r8; add.u32 %r11, %r9, %r10; ld.shared.u32 %r12, [%r11];
         ld.shared.u32 %r13, [%r11+1024]; mov.u32 %r10, 16; xor.b32 %r10, %r10, %r8; add.u32 %r11, %r9, %r10;
         ld.shared.u32 %r14, [%r11]; ld.shared.u32 %r15, [%r11+1024];
         shr.u32 %r3, %r2, 4; cvt.u64.u32 %d2, %r3; or.b64 %d2, %d2, {layout}; add.s64 %d3, %d2, 512;
         mov.f32 %f0, 0f3F800000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
         mov.f32 %f4, %f0; mov.f32 %f5, %f0; mov.f32 %f6, %f0; mov.f32 %f7, %f0;
         setp.ne.b32 %p2, 1, 0;
         {registers}
         wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {d}, {a}, %d3, %p2, {flags};
         {wait}
         mul.wide.u32 %d1, %t, 32; add.s64 %d1, %d1, %to;
         st.global.v4.f32 [%d1], {{%f0, %f1, %f2, %f3}}; st.global.v4.f32 [%d1+16], {{%f4, %f5, %f6, %f7}};"
    )
}

/// The result `[64, 16]` of a body.
fn result(body: &str, input: &[u32]) -> Result<Vec<f32>, LaunchError> {
    let words = run(&kernel(body), grid(1, 128), 1024, input)?;
    let mut result = vec![0.0; 64 * COLUMNS];
    for (at, bits) in words.into_iter().enumerate() {
        let (thread, word) = (at / 8, at % 8);
        let row = thread / 32 * 16 + thread % 32 / 4 + word % 4 / 2 * 8;
        result[row * COLUMNS + word / 4 * 8 + thread % 4 * 2 + word % 2] = f32::from_bits(bits);
    }
    Ok(result)
}

#[test]
fn products_are_those_of_loops() {
    let [writes, registers] = FENCES;
    for (a, skipped) in [("%d2", 0), ("%d4", 32), ("{%r12, %r13, %r14, %r15}", 0)] {
        for transposed in [false, true] {
            let body = body(a, transposed, [writes, BARRIER, registers, WAIT], LAYOUT);
            // Terms from 32 on begin 64 bytes further in each row.
            let body = body.replace("mov.f32 %f0, 0f", "add.s64 %d4, %d2, 4; mov.f32 %f0, 0f");
            let got = result(&body, &image(skipped, transposed)).unwrap_or_else(|e| panic!("{e}"));
            for (at, got) in got.into_iter().enumerate() {
                let (row, column) = (at / COLUMNS, at % COLUMNS);
                let want: f32 = (0..16).map(|k| element(row, k) * element(k, column + 40)).sum::<f32>() + 1.0;
                assert_eq!(got, want, "{a} {transposed} [{row}, {column}]");
            }
        }
    }
}

#[test]
fn steps_that_are_missing_are_found() {
    let [writes, registers] = FENCES;
    let fault = |steps: [&str; 4], layout: &str| match result(&body("%d2", false, steps, layout), &image(0, false)) {
        Err(LaunchError::Fault(fault)) => fault.kind,
        other => panic!("no fault: {other:?}"),
    };
    let whole = [writes, BARRIER, registers, WAIT];
    let without = |step: usize| std::array::from_fn(|at| if at == step { "" } else { whole[at] });
    assert_eq!(fault(without(0), LAYOUT), FaultKind::UnfencedWrites { thread: 0 });
    assert!(matches!(fault(without(1), LAYOUT), FaultKind::Race { .. } | FaultKind::Uninitialized { .. }));
    assert_eq!(fault(without(2), LAYOUT), FaultKind::UnfencedRegisters);
    assert_eq!(fault(without(3), LAYOUT), FaultKind::ProductsUnderWay);
    assert!(matches!(fault(whole, "0x0000004000010000"), FaultKind::UnknownTile { .. }));
    // Before the wait nobody sees the result.
    let late = body("%d2", false, [writes, BARRIER, registers, ""], LAYOUT) + WAIT;
    assert!(result(&late, &image(0, false)).unwrap().iter().all(|value| value.is_nan()));
}
