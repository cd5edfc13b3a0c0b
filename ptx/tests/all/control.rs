//! Branches, divergence, barriers, shuffles and calls.

use ptx::{FaultKind, PtxModule};

use crate::support::{Memory, fault, grid, kernel, run, warp};

#[test]
fn lanes_that_diverge_join_again() {
    // Collatz's steps, in a loop that each lane leaves at another time; then a shuffle that needs all lanes.
    let body = "add.u32 %r1, %t, 1; mov.u32 %r2, 0;
        $loop: setp.eq.u32 %p1, %r1, 1; @%p1 bra $end;
        and.b32 %r3, %r1, 1; setp.eq.u32 %p2, %r3, 1; @%p2 bra $odd;
        shr.u32 %r1, %r1, 1; bra.uni $next;
        $odd: mad.lo.s32 %r1, %r1, 3, 1;
        $next: add.u32 %r2, %r2, 1; bra $loop;
        $end: shfl.sync.bfly.b32 %r4|%p3, %r2, 1, 31, -1;
        mad.lo.s32 %r2, %r4, 1000, %r2; st.global.u32 [%at], %r2;";
    let steps = |i: u32| {
        let (mut n, mut steps) = (i + 1, 0);
        while n != 1 {
            n = if n % 2 == 1 { 3 * n + 1 } else { n / 2 };
            steps += 1;
        }
        steps
    };
    assert_eq!(warp(body, &[0]), (0..32).map(|i| steps(i ^ 1) * 1000 + steps(i)).collect::<Vec<_>>());
}

#[test]
fn warps_exchange_through_shared_memory() {
    // 96 threads reverse their numbers.
    let body = ".shared .align 4 .b8 all[384];
        mov.u32 %r1, all; mad.lo.s32 %r2, %t, 4, %r1; st.shared.u32 [%r2], %t;
        bar.sync 0;
        sub.s32 %r3, 95, %t; mad.lo.s32 %r2, %r3, 4, %r1; ld.shared.u32 %r4, [%r2]; st.global.u32 [%at], %r4;";
    let got = run(&kernel(body), grid(1, 96), 96, &[0]).unwrap();
    assert_eq!(got, (0..96).rev().collect::<Vec<u32>>());
}

#[test]
fn a_part_of_a_warp_ends_early_and_an_odd_block_runs() {
    let body = "setp.ge.u32 %p1, %t, 40; @%p1 ret; add.u32 %r1, %t, 1; st.global.u32 [%at], %r1;";
    let got = run(&kernel(body), grid(1, 45), 45, &[0]).unwrap();
    assert_eq!(got, (0..45).map(|i| if i < 40 { i + 1 } else { 0 }).collect::<Vec<u32>>());
}

#[test]
fn absent_lanes_are_found() {
    let half = "setp.lt.u32 %p1, %t, 16;";
    let shuffle = "shfl.sync.idx.b32 %r1, %t, 0, 31, -1;";
    let active = |kind| matches!(kind, FaultKind::InactiveLanes { active: 0xffff, needed: u32::MAX, .. });
    assert!(active(fault(&format!("{half} @%p1 {shuffle}"), grid(1, 32))));
    assert!(active(fault(&format!("{half} @!%p1 bra $end; bar.sync 0; $end:"), grid(1, 32))));
    // The mask of a shuffle may leave lanes out, and then they may not be read.
    let left_out = "@%p1 shfl.sync.idx.b32 %r1, %t, 20, 31, 0xffff;";
    assert_eq!(fault(&format!("{half} {left_out}"), grid(1, 32)), FaultKind::ShuffleFromInactive { lane: 20 });
    let body = "setp.ge.u32 %p1, %t, 32; @%p1 ret; bar.sync 0;";
    assert_eq!(fault(body, grid(1, 64)), FaultKind::EndedBeforeBarrier { ended: 32 });
    let body = "setp.ge.u32 %p1, %t, 8; @%p1 ret; bar.sync 0;";
    assert_eq!(fault(body, grid(1, 32)), FaultKind::EndedBeforeBarrier { ended: 24 });
}

#[test]
fn functions_are_called() {
    let text = ".version 8.0\n.target sm_90\n.address_size 64
        .global .align 4 .u32 table[4] = {10, 20, 30, 40};
        .func (.param .b32 result) third(.param .b32 a, .param .b64 b)
        { .reg .b32 %r<4>; .reg .pred %p1; .reg .b64 %d<2>; .reg .b64 %SP; .local .align 8 .b8 depot[8];
          ld.param.u32 %r1, [a]; mov.u64 %SP, depot; st.local.u32 [%SP+4], %r1; ld.local.u32 %r2, [%SP+4];
          setp.gt.u32 %p1, %r2, 1; @%p1 bra $big; st.param.u32 [result], 0; ret;
          $big: ld.param.u64 %d1, [b]; cvt.u32.u64 %r3, %d1; div.u32 %r3, %r3, 3; st.param.u32 [result], %r3; ret; }
        .visible .entry k(.param .u64 k_0)
        { .reg .b32 %r<8>; .reg .b64 %d<8>;
          ld.param.u64 %d1, [k_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
          cvta.to.global.u64 %d1, %d1; and.b32 %r3, %r1, 3; mul.wide.u32 %d4, %r3, 4; mov.u64 %d5, table;
          add.s64 %d5, %d5, %d4; ld.global.u32 %r4, [%d5]; cvt.u64.u32 %d3, %r4;
          { .param .b32 a0; st.param.u32 [a0], %r1; .param .b64 a1; st.param.u64 [a1], %d3; .param .b32 out;
            call.uni (out), third, (a0, a1); ld.param.u32 %r2, [out]; }
          st.global.u32 [%d1], %r2; ret; }";
    let kernel = PtxModule::parse(text).unwrap().kernel("k").unwrap();
    let mut memory = Memory::default();
    let at = memory.words(&[9; 32]);
    kernel.launch(grid(1, 32), &[&at.to_le_bytes()], &memory).unwrap();
    let want = |i: u32| if i > 1 { [10, 20, 30, 40][i as usize % 4] / 3 } else { 0 };
    assert_eq!(memory.read(at), (0..32).map(want).collect::<Vec<_>>());
}
