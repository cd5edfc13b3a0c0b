//! Small schedules as files: what the generators and the lowering make, written out. A change of either shows here, readably.

use crate::{pipeline_common::shape, prelude::*};

const GOLDEN: [(ScheduleKind, (usize, usize, usize), &str); 9] = [
    (ScheduleKind::GPipe, (1, 4, 4), include_str!("schedules/gpipe_p4_m4.csv")),
    (ScheduleKind::OneFOneB, (1, 6, 4), include_str!("schedules/1f1b_p4_m6.csv")),
    (ScheduleKind::Interleaved, (2, 4, 2), include_str!("schedules/interleaved_p2_v2_m4.csv")),
    (ScheduleKind::LoopedBfs, (2, 4, 2), include_str!("schedules/looped_bfs_p2_v2_m4.csv")),
    (ScheduleKind::ZbH1, (1, 8, 4), include_str!("schedules/zb_h1_p4_m8.csv")),
    (ScheduleKind::ZbH2, (1, 8, 4), include_str!("schedules/zb_h2_p4_m8.csv")),
    (ScheduleKind::InterleavedZeroBubble, (2, 4, 2), include_str!("schedules/interleaved_zero_bubble_p2_v2_m4.csv")),
    (ScheduleKind::Zbv, (2, 7, 4), include_str!("schedules/zbv_p4_m7.csv")),
    (ScheduleKind::DualPipeV, (2, 10, 4), include_str!("schedules/dualpipe_v_p4_m10.csv")),
];

/// Lowered, parameters sharded.
const LOWERED: [(ScheduleKind, (usize, usize, usize), &str); 3] = [
    (ScheduleKind::OneFOneB, (1, 3, 2), include_str!("schedules/1f1b_p2_m3_lowered.csv")),
    (ScheduleKind::LoopedBfs, (3, 2, 2), include_str!("schedules/looped_bfs_p2_v3_m2_lowered.csv")),
    (ScheduleKind::DualPipeV, (2, 4, 2), include_str!("schedules/dualpipe_v_p2_m4_lowered.csv")),
];

fn made(kind: ScheduleKind, (v, m, p): (usize, usize, usize), lowered: bool) -> Schedule {
    let schedule = kind.generate(shape(p, v, m)).unwrap();
    let lowering = Lowering { sharded: true, ..Lowering::default() };
    if lowered { schedule.lower(lowering.clone()).unwrap() } else { schedule }
}

fn all() -> impl Iterator<Item = (ScheduleKind, Schedule, &'static str)> {
    let plain = GOLDEN.map(|(kind, size, golden)| (kind, made(kind, size, false), golden));
    plain.into_iter().chain(LOWERED.map(|(kind, size, golden)| (kind, made(kind, size, true), golden)))
}

#[test]
fn written_schedules_are_the_golden_ones() {
    for (kind, schedule, golden) in all() {
        let text = schedule.to_csv();
        assert_eq!(text, golden, "{kind} is now\n{text}");
    }
}
