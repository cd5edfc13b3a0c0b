//! The checker against every single fault: each action of a lowered schedule removed, doubled, or swapped with its neighbour.

use distributed::pipeline::{Action, Compute, End, Pass};

use crate::{pipeline_common::shape, prelude::*};

/// (v, m, p).
const SIZES: [(usize, usize, usize); 8] =
    [(1, 2, 2), (1, 5, 3), (1, 3, 1), (2, 4, 2), (2, 3, 2), (2, 6, 3), (3, 4, 2), (1, 3, 4)];

/// Every schedule at every size it can do, and evaluations on a loop and on a fold, lowered with and without sharded parameters.
fn all() -> impl Iterator<Item = (String, Schedule)> {
    let pairs = ScheduleKind::ALL.iter().flat_map(|&kind| SIZES.map(|size| (kind, size)));
    let made =
        pairs.filter_map(|(kind, (v, m, p))| Some((kind.to_string(), (v, m, p), kind.generate(shape(p, v, m)).ok()?)));
    let forwards = [(ScheduleKind::Interleaved, (2, 4, 2)), (ScheduleKind::Zbv, (2, 6, 3))].map(|(kind, (v, m, p))| {
        let placement = kind.generate(shape(p, v, m)).unwrap().placement().clone();
        (format!("forwards of {kind}"), (v, m, p), Schedule::forward_only(&placement, m).unwrap())
    });
    made.chain(forwards).flat_map(|(kind, size, schedule)| {
        [false, true].map(|sharded| {
            let lowered = schedule.lower(Lowering { sharded, ..Lowering::default() }).unwrap();
            (format!("{kind} {size:?} sharded {sharded}"), lowered)
        })
    })
}

/// The schedule with one row changed.
fn changed(schedule: &Schedule, rank: usize, change: impl FnOnce(&mut Vec<Action>)) -> Schedule {
    let mut rows = schedule.rows().to_vec();
    change(&mut rows[rank]);
    Schedule::new(schedule.placement().clone(), schedule.micro_batches(), rows).unwrap()
}

/// Rejected, with the rank and (a part of) one of the actions named.
fn expect_rejected(what: &str, mutant: Schedule, rank: usize, actions: &[Action]) {
    let Err(error) = mutant.check(Limits::default()) else { panic!("{what} was accepted") };
    let error = error.to_string();
    let parts = actions.iter().flat_map(|action| {
        let parts = action.computes().map(|compute| compute.to_string());
        parts.chain([action.to_string()]).collect::<Vec<_>>()
    });
    assert!(error.contains(&format!("rank {rank}")), "{what}: does not name rank {rank}: {error}");
    assert!(error.contains("position "), "{what}: no position: {error}");
    assert!(
        parts.clone().any(|part| error.contains(&part)),
        "{what}: names none of {:?}: {error}",
        parts.collect::<Vec<_>>()
    );
}

#[test]
fn every_schedule_passes_as_it_is() {
    for (name, schedule) in all() {
        assert!(schedule.check(Limits::default()).is_ok(), "{name}");
    }
    for &kind in ScheduleKind::ALL {
        assert!(all().filter(|(name, _)| name.starts_with(&format!("{kind} "))).count() >= 4, "{kind}");
    }
}

#[test]
fn removed() {
    for (name, schedule) in all() {
        for (rank, position, action) in schedule.actions() {
            let mutant = changed(&schedule, rank, |row| _ = row.remove(position));
            expect_rejected(&format!("{name}, rank {rank} without {action} at {position}"), mutant, rank, &[action]);
        }
    }
}

#[test]
fn doubled() {
    let mut turns = Turns::one_of(3);
    for (name, schedule) in all() {
        for (rank, position, action) in schedule.actions().filter(|_| turns.come()) {
            for again in [position + 1, schedule.rows()[rank].len()] {
                let mutant = changed(&schedule, rank, |row| row.insert(again, action));
                expect_rejected(
                    &format!("{name}, rank {rank} with {action} again at {again}"),
                    mutant,
                    rank,
                    &[action],
                );
            }
        }
    }
}

/// A swap is harmless if neither action needs the other and everything can still be put in one order. Both are decided here
/// without the checker: by a table of who needs whom, and by a topological sort.
#[test]
fn swapped_with_its_neighbour() {
    let (mut harmless, mut harmful, mut turns) = (0, 0, Turns::one_of(3));
    for (name, schedule) in all() {
        for (rank, position, action) in schedule.actions().filter(|_| turns.come()) {
            let Some(&next) = schedule.rows()[rank].get(position + 1) else { continue };
            let what = format!("{name}, rank {rank} with {action} and {next} swapped at {position}");
            let mutant = changed(&schedule, rank, |row| row.swap(position, position + 1));
            if !is_needed_by(&schedule, action, next) && has_an_order(&mutant) {
                let verdict = mutant.check(Limits::default());
                assert!(verdict.is_ok(), "{what} is harmless: {}", verdict.unwrap_err());
                harmless += 1;
            } else {
                expect_rejected(&what, mutant, rank, &[action, next]);
                harmful += 1;
            }
        }
    }
    assert!(harmless > 100 && harmful > 1000, "{harmless} harmless, {harmful} harmful: the test has lost its teeth");
}

/// Whether `b`, right after `a` on the same rank, needs it to have been there.
fn is_needed_by(schedule: &Schedule, a: Action, b: Action) -> bool {
    let pairs = || a.computes().flat_map(move |a| b.computes().map(move |b| (a, b)));
    match (a, b) {
        (Action::Message(a), _) if b.is_compute() => b.computes().any(|b| a.end == End::Recv && concerns(a, b)),
        (_, Action::Message(b)) if a.is_compute() => a.computes().any(|a| b.end == End::Send && concerns(b, a)),
        (Action::Unit(a), Action::Unit(b)) => {
            a.stage == b.stage && a.op != UnitOp::ReduceGrad && b.op != UnitOp::ReduceGrad
        }
        (Action::Unit(a), _) => a.op == UnitOp::Unshard && b.computes().any(|b| b.stage == a.stage),
        (_, Action::Unit(b)) => a.computes().any(|a| {
            let closes = matches!(a.pass, Pass::B | Pass::W);
            a.stage == b.stage && (b.op == UnitOp::Reshard || b.op == UnitOp::ReduceGrad && closes)
        }),
        _ => pairs().any(|(a, b)| feeds(schedule, a, b)),
    }
}

fn concerns(message: Message, compute: Compute) -> bool {
    let forward = message.direction == Direction::Forward;
    let pass = if forward { compute.pass == Pass::F } else { matches!(compute.pass, Pass::B | Pass::I) };
    pass && message.stage == compute.stage && message.micro == compute.micro
}

fn feeds(schedule: &Schedule, a: Compute, b: Compute) -> bool {
    let backward = |pass| matches!(pass, Pass::B | Pass::I);
    let within = a.pass == Pass::F && backward(b.pass) || a.pass == Pass::I && b.pass == Pass::W;
    let up = a.pass == Pass::F && b.pass == Pass::F && a.stage + 1 == b.stage;
    let down = backward(a.pass) && backward(b.pass) && a.stage == b.stage + 1;
    let near = (up || down) && schedule.placement().rank_of(a.stage) == schedule.placement().rank_of(b.stage);
    a.micro == b.micro && (a.stage == b.stage && within || near)
}

/// Whether all rows fit into one order, the two ends of a message being one event (Kahn's algorithm).
fn has_an_order(schedule: &Schedule) -> bool {
    // An event is named by rank and position; a message by its sending end.
    let ends: BTreeMap<Action, (usize, usize)> =
        schedule.actions().map(|(rank, at, action)| (action, (rank, at))).collect();
    let event = |rank: usize, at: usize| match schedule.rows()[rank][at] {
        Action::Message(message) if message.end == End::Recv => ends[&Action::Message(message.peer().unwrap())],
        _ => (rank, at),
    };
    let mut before: BTreeMap<_, usize> = schedule.actions().map(|(rank, at, _)| (event(rank, at), 0)).collect();
    let edges: Vec<_> = schedule
        .actions()
        .filter(|&(_, at, _)| at > 0)
        .map(|(rank, at, _)| (event(rank, at - 1), event(rank, at)))
        .collect();
    for (_, to) in &edges {
        *before.get_mut(to).unwrap() += 1;
    }
    let mut ready: Vec<_> = before.iter().filter(|(_, n)| **n == 0).map(|(&event, _)| event).collect();
    let mut done = 0;
    while let Some(event) = ready.pop() {
        done += 1;
        for (_, to) in edges.iter().filter(|(from, _)| *from == event) {
            let left = before.get_mut(to).unwrap();
            *left -= 1;
            if *left == 0 {
                ready.push(*to);
            }
        }
    }
    done == before.len()
}
