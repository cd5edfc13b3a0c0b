//! What is refused, and that the refusal says why.

use distributed::pipeline::{Action, StagePlacement};

use crate::{pipeline_common::shape, prelude::*};

fn expect_refused(kind: ScheduleKind, (v, m, p): (usize, usize, usize), need: &str) {
    let error = kind.generate(shape(p, v, m)).unwrap_err().to_string();
    let numbers = format!("got p = {p} ranks, v = {v} stages per rank, m = {m} micro-batches");
    assert!(error.contains(&format!("{kind} needs {need}; {numbers}")), "{error}");
}

#[test]
fn sizes_a_schedule_cannot_do() {
    expect_refused(ScheduleKind::Interleaved, (2, 11, 4), "m % max(1, ⌊m/p⌋) = 0");
    expect_refused(ScheduleKind::Interleaved, (2, 3, 4), "m ≥ p");
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::ZbH2] {
        expect_refused(kind, (2, 8, 4), "v = 1");
    }
    for kind in [ScheduleKind::Zbv, ScheduleKind::DualPipeV] {
        expect_refused(kind, (1, 8, 4), "v = 2");
        expect_refused(kind, (3, 8, 4), "v = 2");
    }
    expect_refused(ScheduleKind::ZbH2, (1, 6, 4), "m ≥ 2p − 1");
    expect_refused(ScheduleKind::Zbv, (2, 6, 4), "m ≥ 2p − 1");
    expect_refused(ScheduleKind::DualPipeV, (2, 7, 4), "m ≥ 2p");
    for &kind in ScheduleKind::ALL {
        for size in [(0, 4, 2), (1, 0, 2), (1, 4, 0)] {
            expect_refused(kind, size, "p ≥ 1, v ≥ 1 and m ≥ 1");
        }
        expect_refused(kind, (2, usize::MAX, usize::MAX), "p·v·m ≤ 2^26");
    }
}

#[test]
fn actions_that_cannot_stand_where_they_do() {
    let refused = |rows: &[&[&str]], why: &str| {
        let rows = rows.iter().map(|row| row.iter().map(|text| text.parse().unwrap()).collect()).collect();
        let error = Schedule::new(StagePlacement::new(vec![0, 1]).unwrap(), 2, rows).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&[&["0F0"], &["1F0", "0F1"]], "rank 1: pipeline schedule: position 1, 0F1: stage 0 lives on rank 0");
    refused(&[&["0F0"], &["2F0"]], "rank 1: pipeline schedule: position 0, 2F0: there are only 2 stages");
    refused(&[&["0F2"], &[]], "rank 0: pipeline schedule: position 0, 0F2: there are only 2 micro-batches");
    refused(&[&["0F0"]], "1 rows for 2 ranks");
    refused(&[&["0F0"], &[]], "2 micro-batches, but only 1 actions");
}

fn expect_rejected(csv: &str, why: &str) {
    let error = Schedule::from_csv(csv).unwrap().check(Limits::default()).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

/// 1F1B with each send right after its pass and each receive right before: fine with buffers, stuck without.
#[test]
fn sends_that_only_a_buffer_saves() {
    let csv = "\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD
";
    let schedule = Schedule::from_csv(csv).unwrap();
    assert!(schedule.simulate(&Costs::default(), SendMode::Overlapped).is_ok());
    let stuck = "deadlock: rank 0 at position 3, 0SEND_F1, waits for 1RECV_F1 of rank 1, which stands at 1SEND_B0; \
                 rank 1 at position 3, 1SEND_B0, waits for 0RECV_B0 of rank 0, which stands at 0SEND_F1";
    expect_rejected(csv, stuck);
    let error = schedule.simulate(&Costs::default(), SendMode::Synchronous).unwrap_err().to_string();
    assert!(error.contains(stuck), "{error}");
}

#[test]
fn sends_and_receives_in_different_orders() {
    expect_rejected(
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD
",
        "deadlock: rank 0 at position 2, 0SEND_F0, waits for 1RECV_F0 of rank 1, which stands at 1RECV_F1; rank 1",
    );
}

#[test]
fn faults_of_one_rank() {
    expect_rejected("0F0,0B0\n", "rank 0: pipeline check: position 2, the end: 0REDUCE_GRAD is missing");
    expect_rejected(
        "0F0,0REDUCE_GRAD,0B0\n",
        "position 1, 0REDUCE_GRAD: waits for 0B0 (or 0W0), which is not before it",
    );
    expect_rejected("0F0,0B0,0W0,0REDUCE_GRAD\n", "position 2, 0W0: repeats 0B0 (or 0W0), done at position 1");
    expect_rejected("0F0,0I0,0REDUCE_GRAD\n", "position 2, 0REDUCE_GRAD: waits for 0B0 (or 0W0)");
    expect_rejected("0F0,0W0\n", "position 1, 0W0: waits for 0B0 (or 0I0)");
    expect_rejected(
        "0F0,0SEND_F0,1F0,1B0,0B0\n",
        "position 1, 0SEND_F0: no other rank is at the other end of this message",
    );
    expect_rejected("0F0,0B0,0SEND_B0\n", "position 2, 0SEND_B0: no other rank");
    expect_rejected("0UNSHARD,0F0,0RESHARD,0B0\n", "position 3, 0B0: waits for 0UNSHARD");
    // An overlapped pair must be independent.
    expect_rejected("(0F0;0B0)OVERLAP_F_B,0REDUCE_GRAD\n", "position 0, (0F0;0B0)OVERLAP_F_B: waits for 0F0");
    expect_rejected("0F0,1F0,1B0,0F1,(1F1;0B0)OVERLAP_F_B\n", "position 5, the end: 0B1 (or 0I1) is missing");
}

#[test]
fn memory_limits() {
    let lowered = |kind: ScheduleKind| kind.generate(shape(4, 1, 8)).unwrap().lower(Lowering::default()).unwrap();
    let limits = Limits { live: Some(4), gathered: None };
    assert!(lowered(ScheduleKind::OneFOneB).check(limits).is_ok());
    assert!(lowered(ScheduleKind::ZbH1).check(limits).is_ok());
    let error = lowered(ScheduleKind::ZbH2).check(limits).unwrap_err().to_string();
    assert!(
        error.starts_with("rank 0: pipeline check: position ")
            && error.contains("0F4: 5 live micro-batches, the limit is 4"),
        "{error}"
    );
    let bfs = ScheduleKind::LoopedBfs
        .generate(shape(2, 3, 2))
        .unwrap()
        .lower(Lowering { sharded: true, ..Lowering::default() })
        .unwrap();
    let error = bfs.check(Limits { live: None, gathered: Some(1) }).unwrap_err().to_string();
    assert!(error.contains("position 1, 2UNSHARD: 2 gathered stages, the limit is 1"), "{error}");
}

#[test]
fn a_checked_schedule_gives_its_rows() {
    let lowered = ScheduleKind::GPipe.generate(shape(2, 1, 1)).unwrap().lower(Lowering::default()).unwrap();
    let checked = lowered.check(Limits::default()).unwrap();
    let texts: Vec<String> = checked.row(1).iter().map(Action::to_string).collect();
    assert_eq!(texts, ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD"]);
    assert!(checked.row(2).is_empty());
}
