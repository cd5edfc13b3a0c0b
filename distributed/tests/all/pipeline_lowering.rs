//! Lowering: how many messages, that nobody waits for them, gathers and reductions where they belong.

use distributed::pipeline::{Action, End, UnitAction};

use crate::{pipeline_common::shape, prelude::*};

/// (v, m, p), and some small and odd ones.
const SIZES: [(usize, usize, usize); 16] = [
    (1, 1, 4),
    (1, 4, 4),
    (1, 8, 4),
    (2, 4, 2),
    (2, 8, 4),
    (4, 10, 5),
    (2, 15, 4),
    (4, 32, 16),
    (1, 1, 1),
    (2, 1, 1),
    (2, 3, 1),
    (1, 5, 2),
    (2, 7, 3),
    (3, 9, 3),
    (1, 9, 5),
    (1, 6, 3),
];

/// Every schedule at every size it can do.
fn all() -> impl Iterator<Item = (ScheduleKind, (usize, usize, usize), Schedule)> {
    let pairs = ScheduleKind::ALL.iter().flat_map(|&kind| SIZES.map(|size| (kind, size)));
    pairs.filter_map(|(kind, size @ (v, m, p))| Some((kind, size, kind.generate(shape(p, v, m)).ok()?)))
}

fn lowered(schedule: &Schedule, sharded: bool) -> Checked {
    let lowering = Lowering { sharded, ..Lowering::default() };
    schedule.lower(lowering.clone()).unwrap().check(Limits::default()).unwrap()
}

fn sends(schedule: &Schedule) -> usize {
    let is_send = |action: &Action| matches!(action, Action::Message(message) if message.end == End::Send);
    schedule.actions().filter(|(_, _, action)| is_send(action)).count()
}

#[test]
fn every_schedule_is_made_and_checked_somewhere() {
    for &kind in ScheduleKind::ALL {
        assert!(all().filter(|(other, _, _)| *other == kind).count() >= 4, "{kind}");
    }
}

#[test]
fn messages_per_step() {
    for (kind, (v, m, p), schedule) in all() {
        let want = match kind {
            ScheduleKind::Zbv | ScheduleKind::DualPipeV => 2 * m * (2 * p - 2),
            _ if p == 1 => 0,
            _ => 2 * m * (v * p - 1),
        };
        assert_eq!(sends(lowered(&schedule, false).schedule()), want, "{kind} {v} {m} {p}");
    }
}

fn costs() -> [Costs; 5] {
    [
        Costs::default(),
        Costs::uniform(10, 12, 6),
        Costs::uniform(2, 2, 1),
        Costs::uniform(10, 10, 10).with_comm(3),
        Costs { overlap_saves: 4, ..Costs::uniform(10, 14, 3) }.with_comm(25),
    ]
}

/// Sends that travel by themselves: every pass is on time, to the tick, whatever the costs.
#[test]
fn no_pass_waits_for_sends_that_travel_by_themselves() {
    for costs in costs() {
        for (kind, size, schedule) in all() {
            let lowered = schedule.lower(Lowering { costs: costs.clone(), sharded: true }).unwrap();
            let on_time =
                passes(&lowered, &costs, SendMode::Overlapped) == passes(&schedule, &costs, SendMode::Overlapped);
            assert!(on_time, "{kind} {size:?} {costs:?}");
        }
    }
}

/// Synchronous sends with F = I = W: the same, except where a stage's forward meets its neighbour's backward half way.
#[test]
fn no_pass_waits_for_synchronous_sends() {
    let meets = [
        (ScheduleKind::Interleaved, (2, 4, 2)),
        (ScheduleKind::Interleaved, (4, 10, 5)),
        (ScheduleKind::Interleaved, (4, 32, 16)),
    ];
    let costs = Costs::default();
    for (kind, size, schedule) in all() {
        let lowered = schedule.lower(Lowering::default()).unwrap();
        let on_time =
            passes(&lowered, &costs, SendMode::Synchronous) == passes(&schedule, &costs, SendMode::Overlapped);
        assert_eq!(on_time, !meets.contains(&(kind, size)), "{kind} {size:?}");
    }
}

/// When every pass happens.
fn passes(schedule: &Schedule, costs: &Costs, sends: SendMode) -> Vec<Vec<Span>> {
    let simulation = schedule.simulate(costs, sends).unwrap();
    let rows = schedule.rows().iter().zip(simulation.spans());
    let only = |(row, spans): (&Vec<Action>, &Vec<Span>)| -> Vec<Span> {
        row.iter().zip(spans).filter(|(action, _)| action.is_compute()).map(|(_, &span)| span).collect()
    };
    rows.map(only).collect()
}

/// With unequal costs ranks must wait now and then, but it stays bounded: the worst here is Interleaved1F1B at (4, 10, 5), 1.22.
#[test]
fn synchronous_sends_stay_close_with_unequal_costs() {
    for costs in costs().into_iter().filter(|costs| costs.comm == 0) {
        for (kind, size, schedule) in all() {
            let schedule = schedule.lower(Lowering { costs: costs.clone(), sharded: false }).unwrap();
            let time = |sends| schedule.simulate(&costs, sends).unwrap().makespan();
            let (free, held) = (time(SendMode::Overlapped), time(SendMode::Synchronous));
            assert!(4 * held <= 5 * free, "{kind} {size:?} {costs:?}: {held} instead of {free}");
        }
    }
}

/// Never more gathered than the stages a rank works on and the next; breadth first gathers least.
#[test]
fn gathers() {
    for (kind, (v, m, p), schedule) in all() {
        let schedule = schedule.lower(Lowering { sharded: true, ..Lowering::default() }).unwrap();
        let unshards = schedule.rows().iter().map(|row| units(row, UnitOp::Unshard).len());
        if kind == ScheduleKind::LoopedBfs {
            // Each stage once on the way forward; on the way back all but the last two, which are still there.
            assert!(unshards.clone().all(|n| n == v + v.saturating_sub(2)), "{v} {m} {p}");
        }
        if v <= 2 {
            assert!(unshards.clone().all(|n| n == v), "{kind} {v} {m} {p}");
        }
        let checked = schedule.check(Limits { gathered: Some(2), ..Limits::default() }).unwrap();
        assert!(checked.is_sharded());
    }
    let plain = lowered(&ScheduleKind::GPipe.generate(shape(2, 1, 2)).unwrap(), false);
    assert!(!plain.is_sharded());
    assert!(plain.schedule().rows().iter().all(|row| units(row, UnitOp::Unshard).is_empty()));
}

/// Each stage's gradients are reduced once, before anything else is computed, so that the reduction overlaps with it.
#[test]
fn reductions() {
    for (kind, size, schedule) in all() {
        let checked = lowered(&schedule, false);
        for rank in 0..schedule.placement().ranks() {
            let row = checked.row(rank);
            for (at, unit) in units(row, UnitOp::ReduceGrad) {
                let last = row[..at].iter().rfind(|action| action.is_compute()).unwrap();
                let closes = last.computes().any(|c| c.stage == unit.stage && c.pass.makes_weight_gradient());
                assert!(closes, "{kind} {size:?} rank {rank}: {unit} after {last}");
            }
            assert_eq!(units(row, UnitOp::ReduceGrad).len(), schedule.placement().stages_on(rank).count());
        }
    }
}

fn units(row: &[Action], op: UnitOp) -> Vec<(usize, UnitAction)> {
    let unit = |(at, action): (usize, &Action)| match action {
        Action::Unit(unit) if unit.op == op => Some((at, *unit)),
        _ => None,
    };
    row.iter().enumerate().filter_map(unit).collect()
}

#[test]
fn what_cannot_be_lowered() {
    let schedule = ScheduleKind::GPipe.generate(shape(2, 1, 2)).unwrap();
    let again = schedule.lower(Lowering::default()).unwrap().lower(Lowering::default()).unwrap_err();
    assert!(again.to_string().contains("has messages or units already"), "{again}");
    let free = schedule.lower(Lowering { costs: Costs::uniform(1, 1, 0), sharded: false });
    assert!(free.is_ok(), "no W in it");
    let free = schedule.lower(Lowering { costs: Costs::uniform(0, 1, 1), sharded: false }).unwrap_err();
    assert!(free.to_string().contains("at least one tick"), "{free}");
    let huge = schedule.lower(Lowering { costs: Costs::uniform(u64::MAX, 1, 1), sharded: false }).unwrap_err();
    assert!(huge.to_string().contains("64 bits"), "{huge}");
    let circle = Schedule::from_csv("1F0,0F0\n").unwrap();
    let circle = circle.lower(Lowering::default()).unwrap_err().to_string();
    assert!(
        circle.contains("rank 0 at position 0, 1F0, waits for the output of stage 0 for micro-batch 0"),
        "{circle}"
    );
    let circle = Schedule::from_csv("0B0,0F0\n1F0,1B0\n").unwrap();
    let circle = circle.lower(Lowering::default()).unwrap_err().to_string();
    assert!(circle.contains("rank 0 at position 0, 0B0, waits for the output of stage 0"), "{circle}");
}
