//! Loads, stores, atomic operations and copies.

use ptx::{FaultKind, PtxModule, Space};

use crate::support::{Memory, fault, grid, kernel, run, warp};

#[test]
fn vectors_and_narrow_elements() {
    // Lane i of 8 reverses the words of its vector.
    let body = "mul.wide.u32 %d1, %t, 16; add.s64 %d2, %d1, %from; add.s64 %d3, %d1, %to;
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2]; st.global.v4.u32 [%d3], {%r4, %r3, %r2, %r1};";
    let input: Vec<u32> = (0..32).map(|i| i * 3).collect();
    let got = run(&kernel(body), grid(1, 8), 32, &input).unwrap();
    let want: Vec<u32> = input.chunks(4).flat_map(|four| four.iter().rev().copied()).collect();
    assert_eq!(got, want);
    // Bytes with their sign, and halves without.
    let body = "cvt.u64.u32 %d1, %t; add.s64 %d1, %d1, %from; ld.global.s8 %r1, [%d1]; and.b32 %r1, %r1, 0xffff;
        mul.wide.u32 %d2, %t, 2; add.s64 %d2, %d2, %from; ld.global.u16 %h1, [%d2]; cvt.u32.u16 %r2, %h1;
        shl.b32 %r2, %r2, 16; or.b32 %r1, %r1, %r2; st.global.u32 [%at], %r1;";
    let input: Vec<u32> = (0..16).map(|i| 0x9080_7060 + i).collect();
    let bytes: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
    let half = |i: usize| u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
    let want: Vec<u32> = (0..32).map(|i| half(i) << 16 | u32::from(bytes[i] as i8 as i16 as u16)).collect();
    assert_eq!(warp(body, &input), want);
}

#[test]
fn atomic_operations_of_all_blocks_count() {
    let body = "red.global.add.u32 [%to], 2; atom.global.or.b32 %r1, [%to+4], 8;";
    assert_eq!(run(&kernel(body), grid(3, 64), 2, &[0]).unwrap(), [2 * 3 * 64, 8]);
}

#[test]
fn accesses_are_inside_and_aligned() {
    let global = Space::Global;
    let body = "ld.global.u32 %r1, [%from+1024];";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::OutOfBounds { space, bytes: 4, .. } if space == global));
    let body = "ld.global.v2.u32 {%r1, %r2}, [%from+1020];";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::Misaligned { bytes: 8, .. }));
    let body = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%from+8];";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::Misaligned { bytes: 16, .. }));
    let body = ".shared .align 16 .b8 all[64]; st.shared.u32 [all+64], %t;";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::OutOfBounds { space: Space::Shared, address: 64, .. }));
    let body = "ld.param.u64 %d1, [k_1+8];";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::OutOfBounds { space: Space::Parameters, .. }));
    let body = ".local .align 4 .b8 own[8]; st.local.u32 [own+16], %t;";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::OutOfBounds { space: Space::Local, .. }));
    // A null pointer.
    let body = "mov.u64 %d1, 0; st.global.u32 [%d1], %t;";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::OutOfBounds { address: 0, .. }));
}

/// Copies of 16 bytes a thread to shared memory, from where they go to the output after `between`.
fn copied(between: &str) -> String {
    format!(
        ".shared .align 16 .b8 all[1024]; mov.u32 %r1, all; mad.lo.s32 %r1, %t, 16, %r1;
         mul.wide.u32 %d1, %t, 16; add.s64 %d1, %d1, %from; and.b32 %r3, %t, 1; mul.lo.s32 %r3, %r3, 16;
         cp.async.cg.shared.global [%r1], [%d1], 16, %r3; cp.async.commit_group; {between}
         ld.shared.u32 %r2, [%r1+4]; st.global.u32 [%at], %r2;"
    )
}

#[test]
fn copies_arrive_at_the_wait() {
    let input: Vec<u32> = (0..256).collect();
    let got = run(&kernel(&copied("cp.async.wait_group 0;")), grid(1, 64), 64, &input).unwrap();
    assert_eq!(got, (0..64).map(|i| if i % 2 == 1 { 4 * i + 1 } else { 0 }).collect::<Vec<u32>>());
    let early = fault(&copied(""), grid(1, 64));
    assert!(matches!(&early, FaultKind::Race { earlier, .. } if earlier.contains("asynchronous copy")), "{early}");
    // One group may stay under way, and that is the one which is read.
    assert!(matches!(fault(&copied("cp.async.wait_group 1;"), grid(1, 64)), FaultKind::Race { .. }));
    let body = ".shared .align 16 .b8 all[16]; cp.async.cg.shared.global [all], [%from], 16; cp.async.commit_group;";
    assert_eq!(fault(body, grid(1, 1)), FaultKind::CopiesUnderWay);
}

#[test]
fn arguments_fit_the_parameters() {
    let text = ".visible .entry k(.param .u32 a, .param .align 8 .b8 b[24], .param .u64 c) .maxntid 64, 1, 1\n\
                { .reg .b64 %d<4>; .reg .b32 %r<2>;
                  ld.param.u64 %d1, [c]; mov.b64 %d2, b; ld.param.u32 %r1, [%d2+20]; st.global.u32 [%d1], %r1; ret; }";
    let kernel = PtxModule::parse(text).unwrap().kernel("k").unwrap();
    let offsets: Vec<_> = kernel.parameters().iter().map(|p| (p.offset, p.bytes)).collect();
    assert_eq!(offsets, [(0, 4), (8, 24), (32, 8)]);
    let mut memory = Memory::default();
    let at = memory.words(&[0]).to_le_bytes();
    let mut b = [0u8; 24];
    b[20] = 77;
    kernel.launch(grid(1, 1), &[&[0; 4], &b, &at], &memory).unwrap();
    assert_eq!(memory.read(u64::from_le_bytes(at)), [77]);
    let refused = |grid, arguments: &[&[u8]]| kernel.launch(grid, arguments, &memory).unwrap_err().to_string();
    assert_eq!(
        refused(grid(1, 1), &[&[0; 4], &b[..20], &at]),
        "kernel k: argument 1 has 20 bytes, and the parameter 24"
    );
    assert_eq!(refused(grid(1, 1), &[&at]), "kernel k: 1 arguments for 3 parameters");
    assert!(refused(grid(1, 65), &[&[0; 4], &b, &at]).contains("at most 64"));
    assert!(refused(grid(0, 1), &[&[0; 4], &b, &at]).contains("without threads"));
}

#[test]
fn a_partial_copy_reads_its_bytes_alone() {
    // The input ends behind them.
    let body = ".shared .align 16 .b8 all[16]; setp.eq.s32 %p1, %t, 0;
                @%p1 cp.async.cg.shared.global [all], [%from], 16, 8; cp.async.wait_all; bar.sync 0;
                mov.u32 %r1, all; mad.lo.s32 %r1, %t, 4, %r1; ld.shared.u32 %r2, [%r1]; st.global.u32 [%at], %r2;";
    assert_eq!(run(&kernel(body), grid(1, 4), 4, &[7, 9]).unwrap(), [7, 9, 0, 0]);
}

#[test]
fn matrices_need_a_whole_warp() {
    let body = ".shared .align 16 .b8 all[512]; mov.u32 %r1, all;
                ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%r1];";
    assert!(matches!(fault(body, grid(1, 16)), FaultKind::InactiveLanes { instruction: "ldmatrix", .. }));
}
