//! Checked schedules run: a thread per rank, channels without tags or buffers, and gradients that must come out exactly.
//!
//! The model is a chain of scalars, y = w·x per stage, in wrapping integers: whole, so that sums do not depend on order.

use std::{
    collections::HashMap,
    sync::mpsc::{Receiver, SyncSender, channel, sync_channel},
    thread,
};

use distributed::pipeline::{Action, Compute, End, Pass};

use crate::{pipeline_common::shape, prelude::*};

fn weight(stage: usize) -> u64 {
    2 * stage as u64 + 3
}

fn batch(micro: usize) -> u64 {
    1000 + 7 * micro as u64
}

/// d(Σ y·(micro+1)) / dw of one stage.
fn expected(stages: usize, micros: usize, stage: usize) -> u64 {
    let others = (0..stages).filter(|&other| other != stage).map(weight).fold(1, u64::wrapping_mul);
    (0..micros).map(|m| batch(m).wrapping_mul(others).wrapping_mul(m as u64 + 1)).fold(0, u64::wrapping_add)
}

struct Rank {
    checked: Arc<Checked>,
    /// By the other rank.
    to: HashMap<usize, SyncSender<(Message, u64)>>,
    from: HashMap<usize, Receiver<(Message, u64)>>,
    /// What a stage reads: its input, or its output's gradient.
    inputs: HashMap<(Direction, usize, usize), u64>,
    /// What a stage has made for its neighbours.
    outputs: HashMap<(Direction, usize, usize), u64>,
    saved: HashMap<(usize, usize), u64>,
    gradients: HashMap<usize, u64>,
    reduced: Vec<(usize, u64)>,
}

impl Rank {
    fn run(mut self, rank: usize) -> Vec<(usize, u64)> {
        for &action in self.checked.clone().row(rank) {
            match action {
                Action::Message(message) => self.pass_on(message),
                Action::Unit(unit) if unit.op == UnitOp::ReduceGrad => {
                    self.reduced.push((unit.stage, self.gradients.remove(&unit.stage).unwrap()));
                }
                Action::Unit(_) => {}
                // Backward first: the pair is independent.
                Action::Overlap(forward, backward) => {
                    self.compute(backward);
                    self.compute(forward);
                }
                Action::Compute(compute) => self.compute(compute),
            }
        }
        assert!(self.saved.is_empty(), "activations are left");
        self.reduced
    }

    fn pass_on(&mut self, message: Message) {
        let peer = message.peer().unwrap();
        let other = self.checked.schedule().placement().rank_of(peer.stage).unwrap();
        if message.end == End::Send {
            let value = self.outputs.remove(&(message.direction, message.stage, message.micro)).unwrap();
            self.to[&other].send((message, value)).unwrap();
        } else {
            let (sent, value) = self.from[&other].recv().unwrap();
            assert_eq!(sent, peer, "channels have no tags: order must do");
            self.inputs.insert((message.direction, message.stage, message.micro), value);
        }
    }

    fn compute(&mut self, Compute { stage, pass, micro }: Compute) {
        let last = self.checked.schedule().stages() - 1;
        match pass {
            Pass::F => {
                let x = if stage == 0 { batch(micro) } else { self.take(Direction::Forward, stage, micro) };
                self.saved.insert((stage, micro), x);
                self.give(Direction::Forward, stage, micro, x.wrapping_mul(weight(stage)));
            }
            Pass::B | Pass::I => {
                let g = if stage == last { micro as u64 + 1 } else { self.take(Direction::Backward, stage, micro) };
                // Σ g·x, whose two factors only W brings together.
                let x = self.saved.remove(&(stage, micro)).unwrap();
                self.saved.insert((stage, micro), g.wrapping_mul(x));
                self.give(Direction::Backward, stage, micro, g.wrapping_mul(weight(stage)));
            }
            Pass::W => {}
        }
        if pass.makes_weight_gradient() {
            let gradient = self.gradients.entry(stage).or_default();
            *gradient = gradient.wrapping_add(self.saved.remove(&(stage, micro)).unwrap());
        }
    }

    fn take(&mut self, direction: Direction, stage: usize, micro: usize) -> u64 {
        self.inputs.remove(&(direction, stage, micro)).expect("the input is there")
    }

    /// Keeps a result for its send, or hands it to the neighbouring stage if that is here.
    fn give(&mut self, direction: Direction, stage: usize, micro: usize, value: u64) {
        let end = End::Send;
        let peer = Message { stage, direction, end, micro }.peer();
        let placement = self.checked.schedule().placement();
        match peer {
            Some(peer) if peer.stage >= placement.stages() => {}
            Some(peer) if placement.together(stage, peer.stage) => {
                _ = self.inputs.insert((direction, peer.stage, micro), value)
            }
            Some(_) => _ = self.outputs.insert((direction, stage, micro), value),
            None => {}
        }
    }
}

fn run(checked: Checked) -> Vec<(usize, u64)> {
    let checked = Arc::new(checked);
    let ranks = checked.schedule().placement().ranks();
    let (mut to, mut from): (Vec<_>, Vec<_>) = (0..ranks).map(|_| (HashMap::new(), HashMap::new())).unzip();
    for (a, b) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))) {
        let (sender, receiver) = sync_channel(0);
        to[a].insert(b, sender);
        from[b].insert(a, receiver);
    }
    let (done, results) = channel();
    for (rank, (to, from)) in to.into_iter().zip(from).enumerate() {
        let (checked, done) = (checked.clone(), done.clone());
        thread::spawn(move || {
            let (inputs, outputs, saved) = (HashMap::new(), HashMap::new(), HashMap::new());
            let gradients = HashMap::new();
            let state = Rank { checked, to, from, inputs, outputs, saved, gradients, reduced: Vec::new() };
            done.send(state.run(rank)).unwrap();
        });
    }
    drop(done);
    // The limit is not a measurement: a deadlock would otherwise hang instead of failing.
    let next = || results.recv_timeout(Duration::from_secs(60)).expect("every rank ends");
    let mut all: Vec<_> = (0..ranks).flat_map(|_| next()).collect();
    all.sort_unstable();
    all
}

#[test]
fn gradients_are_those_of_one_rank() {
    let mut runs = 0;
    for &kind in ScheduleKind::ALL {
        for (v, m, p) in [
            (1, 1, 1),
            (1, 1, 4),
            (1, 8, 4),
            (1, 9, 5),
            (2, 3, 1),
            (2, 4, 2),
            (2, 6, 3),
            (2, 10, 5),
            (3, 10, 4),
            (4, 10, 5),
        ] {
            let Ok(schedule) = kind.generate(shape(p, v, m)) else { continue };
            let lowering = Lowering { sharded: m % 2 == 0, ..Lowering::default() };
            let checked = schedule.lower(lowering.clone()).unwrap().check(Limits::default()).unwrap();
            let want: Vec<_> = (0..p * v).map(|stage| (stage, expected(p * v, m, stage))).collect();
            assert_eq!(run(checked), want, "{kind} {v} {m} {p}");
            runs += 1;
        }
    }
    assert!(runs > 25, "{runs}");
}
