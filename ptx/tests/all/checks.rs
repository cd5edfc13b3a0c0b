//! Races and uninitialized memory, and the words of findings.

use ptx::{FaultKind, Space};

use crate::support::{fault, grid, kernel, run};

const NEIGHBOUR: &str = "add.u32 %r3, %t, 1; and.b32 %r3, %r3, 63; mad.lo.s32 %r4, %r3, 4, %r1;";

/// Threads write their word of shared memory, and read that of the next after `between`.
fn exchange(between: &str, after: &str) -> String {
    format!(
        ".shared .align 4 .b8 all[256]; mov.u32 %r1, all; mad.lo.s32 %r2, %t, 4, %r1; {NEIGHBOUR}
         st.shared.u32 [%r2], %t; {between} ld.shared.u32 %r5, [%r4]; {after} st.global.u32 [%at], %r5;"
    )
}

#[test]
fn a_missing_barrier_is_a_race() {
    let right = exchange("bar.sync 0;", "");
    assert_eq!(run(&kernel(&right), grid(1, 64), 64, &[0]).unwrap()[63], 0);
    // Without the barrier, the first warp reads what the second has not written yet, and its own race is found first.
    let race = fault(&exchange("", ""), grid(1, 64));
    assert!(matches!(race, FaultKind::Race { space: Space::Shared, writes: false, .. }), "{race}");
    // A second round of writes needs a second barrier.
    let race = fault(&exchange("bar.sync 0;", "st.shared.u32 [%r2], %r5;"), grid(1, 64));
    assert!(matches!(race, FaultKind::Race { space: Space::Shared, writes: true, .. }), "{race}");
    run(&kernel(&exchange("bar.sync 0;", "bar.sync 0; st.shared.u32 [%r2], %r5;")), grid(1, 64), 64, &[0]).unwrap();
}

#[test]
fn blocks_may_not_share_what_one_writes() {
    let kinds = [
        // Two blocks write a word; one reads what the other writes; the same the other way round.
        ("st.global.u32 [%to], 1;", true),
        (
            "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%to], 1; @!%p1 ld.global.u32 %r2, [%to];",
            false,
        ),
        (
            "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 st.global.u32 [%to], 1; @!%p1 ld.global.u32 %r2, [%to];",
            true,
        ),
    ];
    for (body, writes) in kinds {
        let race = fault(body, grid(2, 1));
        assert!(matches!(&race, FaultKind::Race { space: Space::Global, writes: w, .. } if *w == writes), "{race}");
    }
    let race = fault("red.global.add.u32 [%to], 1; ld.global.u32 %r1, [%to];", grid(1, 2));
    assert!(race.to_string().contains("an atomic operation of block 0"), "{race}");
    // Threads of one block, without a barrier and with one.
    let body = |between: &str| {
        format!(
            "st.global.u32 [%at], %t; {between} xor.b32 %r1, %t, 1; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d1, %to;
                 ld.global.u32 %r2, [%d1];"
        )
    };
    assert!(matches!(fault(&body(""), grid(1, 32)), FaultKind::Race { space: Space::Global, .. }));
    run(&kernel(&body("bar.sync 0;")), grid(1, 32), 32, &[0]).unwrap();
}

#[test]
fn bytes_beside_one_another_are_no_race() {
    let body = "mov.u32 %r1, %ctaid.x; cvt.u64.u32 %d1, %r1; add.s64 %d1, %d1, %to; st.global.u8 [%d1], 7;";
    assert_eq!(run(&kernel(body), grid(4, 1), 1, &[0]).unwrap(), [0x0707_0707]);
}

#[test]
fn shared_memory_of_another_block_is_uninitialized() {
    let body = ".shared .align 4 .b8 all[8]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0;
                @%p1 st.shared.u32 [all], 1; ld.shared.u32 %r2, [all];";
    assert_eq!(run(&kernel(body), grid(1, 1), 1, &[0]).unwrap(), [0]);
    assert_eq!(fault(body, grid(2, 1)), FaultKind::Uninitialized { address: 0 });
}

#[test]
fn a_finding_says_where_it_is() {
    let body = "\n.loc 1 42 9\n setp.ne.u32 %p1, %t, 35; @%p1 bra $end;\n st.global.u32 [%to+2], %t;\n $end:";
    let error = run(&kernel(body), grid(1, 64), 1, &[0]).unwrap_err().to_string();
    assert!(error.starts_with("kernel k, PTX line "), "{error}");
    assert!(error.contains(", source line 42, block (0, 0, 0), thread (35, 0, 0): an access of 4 bytes"), "{error}");
    assert!(error.contains("of global memory at 0x10002, which is not aligned"), "{error}");
}

#[test]
fn a_launch_that_does_not_end_is_found() {
    let body = "mov.u32 %r1, 0; $loop: setp.eq.u32 %p1, %r1, 0; @%p1 bra $loop;";
    assert!(matches!(fault(body, grid(1, 1)), FaultKind::Endless { .. }));
}
