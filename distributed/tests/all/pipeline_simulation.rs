//! Times worked out by hand, and the pictures of them.

use distributed::pipeline::{Compute, Pass, StageCosts, Timeline};

use crate::{pipeline_common::shape, prelude::*};

fn span(start: u64, end: u64) -> Span {
    Span { start, end }
}

#[test]
fn messages_take_time_on_the_way() {
    let schedule = ScheduleKind::GPipe.generate(shape(2, 1, 2)).unwrap();
    let costs = Costs::uniform(10, 10, 10).with_comm(3);
    let simulation = schedule.simulate(&costs, SendMode::Overlapped).unwrap();
    assert_eq!(simulation.spans()[0], [span(0, 10), span(10, 20), span(56, 76), span(76, 96)]);
    assert_eq!(simulation.spans()[1], [span(13, 23), span(23, 33), span(33, 53), span(53, 73)]);
    assert_eq!(simulation.makespan(), 96);
    let ranks = simulation.ranks();
    assert_eq!((ranks[0].work, ranks[0].idle, ranks[0].gaps, ranks[0].peak_live), (60, 36, 36, 2));
    assert_eq!((ranks[1].work, ranks[1].idle, ranks[1].gaps, ranks[1].peak_live), (60, 36, 0, 2));
}

#[test]
fn synchronous_messages_hold_both_ranks() {
    let lowered = ScheduleKind::GPipe.generate(shape(2, 1, 1)).unwrap().lower(Lowering::default()).unwrap();
    let simulation = lowered.simulate(&Costs::uniform(10, 10, 10).with_comm(3), SendMode::Synchronous).unwrap();
    // 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD
    assert_eq!(simulation.spans()[0], [span(0, 10), span(10, 13), span(43, 46), span(46, 66), span(66, 66)]);
    // 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
    assert_eq!(simulation.spans()[1], [span(10, 13), span(13, 23), span(23, 43), span(43, 46), span(46, 46)]);
    let ranks = simulation.ranks();
    assert_eq!((ranks[0].sent, ranks[1].sent, ranks[0].idle), (1, 1, 36));
    assert!(simulation.rank(2).is_none());
}

/// The slowest stage sets the pace: 1F1B takes m times its passes, and the others' once on the way there and back.
#[test]
fn stages_may_differ() {
    let costs = Costs::of([(3, 4, 2), (10, 12, 8), (1, 1, 1)].map(|(f, i, w)| StageCosts::new(f, i, w)).to_vec());
    let schedule = ScheduleKind::OneFOneB.generate(shape(4, 1, 12)).unwrap();
    let simulation = schedule.simulate(&costs, SendMode::Overlapped).unwrap();
    // Stages 2 and 3 both cost what the last entry says, so the round trip behind stage 1 (1+1+2+2) fits beside its own work.
    assert_eq!(simulation.makespan(), 12 * (10 + 20) + (3 + 6));
}

/// Where stages weigh differently it matters which of a rank's stages a micro-batch is in: counted here by the clock.
#[test]
fn activations_weigh_what_their_stage_holds() {
    let bytes = [100, 7, 30, 1];
    let costs = Costs::of(bytes.map(|bytes| StageCosts::new(3, 2, 2).with_activations(bytes)).to_vec());
    let weigh = |stage: usize| bytes[stage.min(3)];
    let of = |kind: ScheduleKind, v| {
        let schedule = kind.generate(shape(3, v, 6)).unwrap();
        let simulation = schedule.simulate(&costs, SendMode::Overlapped).unwrap();
        let by_the_clock = |rank: usize| {
            let row = schedule.rows()[rank].iter().zip(&simulation.spans()[rank]);
            let passes: Vec<_> = row.flat_map(|(action, span)| action.computes().map(move |c| (c, *span))).collect();
            let held = |time: u64| -> u64 {
                let of_pass = |(c, span): &(Compute, Span)| match c.pass {
                    Pass::F if span.start <= time => weigh(c.stage) as i64,
                    Pass::B | Pass::W if span.end <= time => -(weigh(c.stage) as i64),
                    _ => 0,
                };
                passes.iter().map(of_pass).sum::<i64>() as u64
            };
            passes.iter().map(|(_, span)| held(span.start)).max().unwrap()
        };
        let bytes: Vec<_> = simulation.ranks().iter().map(|rank| rank.peak_bytes).collect();
        assert_eq!(bytes, [0, 1, 2].map(by_the_clock), "{kind}");
        bytes
    };
    assert_eq!(of(ScheduleKind::GPipe, 1), [600, 42, 180]);
    assert_eq!(of(ScheduleKind::OneFOneB, 1), [300, 14, 30]);
    for kind in [ScheduleKind::Interleaved, ScheduleKind::LoopedBfs, ScheduleKind::Zbv] {
        of(kind, 2);
    }
}

#[test]
fn absurd_costs_do_not_overflow() {
    let lowered = ScheduleKind::OneFOneB.generate(shape(2, 1, 3)).unwrap().lower(Lowering::default()).unwrap();
    let costs = Costs { overlap_saves: u64::MAX, ..Costs::uniform(u64::MAX, u64::MAX, u64::MAX) }.with_comm(u64::MAX);
    for sends in [SendMode::Overlapped, SendMode::Synchronous] {
        assert_eq!(lowered.simulate(&costs, sends).unwrap().makespan(), u64::MAX);
    }
}

#[test]
fn units_occupy_their_rank_when_told_to() {
    let lowering = Lowering { sharded: true, ..Lowering::default() };
    let lowered = ScheduleKind::GPipe.generate(shape(1, 1, 1)).unwrap().lower(lowering.clone()).unwrap();
    // UNSHARD F B REDUCE_GRAD RESHARD
    let simulation = lowered.simulate(&Costs { unit: 5, ..Costs::default() }, SendMode::Overlapped).unwrap();
    assert_eq!(simulation.spans()[0], [span(0, 5), span(5, 6), span(6, 8), span(8, 13), span(13, 18)]);
}

#[test]
fn a_picture_has_a_box_for_all_that_takes_time() {
    let lowered = ScheduleKind::DualPipeV.generate(shape(2, 2, 4)).unwrap().lower(Lowering::default()).unwrap();
    let simulation = lowered.simulate(&Costs::default(), SendMode::Overlapped).unwrap();
    let timeline = Timeline::from(&simulation);
    assert_eq!(timeline.end(), simulation.makespan());
    let svg = timeline.to_svg();
    let passes = lowered.actions().filter(|(_, _, action)| action.is_compute()).count();
    assert_eq!(svg.matches("<rect ").count(), passes);
    for tag in ["svg", "g", "text", "title"] {
        let opened = svg.matches(&format!("<{tag} ")).count() + svg.matches(&format!("<{tag}>")).count();
        assert_eq!(opened, svg.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    assert!(svg.contains("<title>(0F3;3B1)OVERLAP_F_B [") && svg.contains(">3&amp;1</text>"));
    assert!(svg.contains(">rank 1</text>"));
    assert_eq!(Timeline::default().to_svg().matches("<rect ").count(), 0);
}
