//! What ranks of a pipeline tell each other: how much, how early, and that it may be synchronous.

use crate::{between::Between, pipeline_common::*, prelude::*};

fn step(comm: &Comm<Cpu>, pipeline: &mut Pipeline<Cpu>, m: usize) -> Result<Vec<(f64, f64)>> {
    let (_, mut gradients) = optimizers(pipeline, 0.0)?;
    let (x, y) = (rows(comm.runtime(), 1, m), rows(comm.runtime(), 2, m));
    let output = pipeline.run(MicroBatches::split(&[x], &[y], m)?, &mut gradients)?;
    pipeline.losses(&output)
}

#[test]
fn a_step_has_as_many_messages_as_the_formulas_say() {
    for (p, v, m) in [(2, 1, 4), (2, 2, 4), (3, 1, 6), (4, 2, 8)] {
        for (kind, checked) in kinds(p, v, m) {
            // Boundaries between stages on different ranks: the fold of a V is none.
            let crossings = match kind {
                ScheduleKind::Zbv | ScheduleKind::DualPipeV => 2 * p - 2,
                _ => v * p - 1,
            };
            let counts = world(p, |comm| {
                let counting = Arc::new(CountingCommunicator::new(comm));
                let comm: Comm<Cpu> = counting.clone();
                let mut pipeline = pipeline(&comm, &checked, mlp_stages(comm.runtime(), p * v, p * v))?;
                let mut sent = Vec::new();
                for _ in 0..2 {
                    counting.reset();
                    step(&comm, &mut pipeline, m)?;
                    sent.push((counting.of("send"), counting.of("recv").calls));
                }
                Ok(sent)
            });
            let sum = |of: &dyn Fn(&Vec<(_, u64)>) -> u64| counts.iter().map(of).sum::<u64>();
            let messages = (2 * m * crossings) as u64;
            // The first run begins with a header of two tensors for each boundary.
            let header = 2 * crossings as u64;
            assert_eq!(sum(&|of: &Vec<(distributed::comm::Traffic, u64)>| of[0].0.calls), messages + header, "{kind}");
            assert_eq!(sum(&|of| of[1].0.calls), messages, "{kind}");
            assert_eq!(sum(&|of| of[1].1), messages, "{kind}");
            assert_eq!(sum(&|of| of[1].0.payload), messages * (ROWS * WIDTH * 4) as u64, "{kind}");
        }
    }
}

/// A stage that notes how many receives had been posted when it first ran.
struct Watching {
    inner: Box<dyn Stage<Cpu>>,
    comm: Arc<CountingCommunicator<Cpu>>,
    seen: Arc<AtomicU64>,
}

impl Module<Cpu> for Watching {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.inner.visit(name, visitor);
    }
}

impl Stage<Cpu> for Watching {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let posted = self.comm.of("recv").calls;
        let _ = self.seen.compare_exchange(0, posted, Ordering::Relaxed, Ordering::Relaxed);
        self.inner.forward_values(inputs)
    }
}

#[test]
fn receives_are_posted_before_their_turn() {
    let checked = checked(ScheduleKind::GPipe, 2, 1, 4).unwrap();
    let seen = world(2, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let (comm, seen): (Comm<Cpu>, _) = (counting.clone(), Arc::new(AtomicU64::new(0)));
        let watching = |inner| Box::new(Watching { inner, comm: counting.clone(), seen: seen.clone() }) as _;
        let stages = mlp_stages(comm.runtime(), 2, 2).into_iter().map(watching).collect();
        let mut pipeline = pipeline(&comm, &checked, stages)?;
        step(&comm, &mut pipeline, 4)?;
        counting.reset();
        seen.store(0, Ordering::Relaxed);
        step(&comm, &mut pipeline, 4)?;
        Ok(seen.load(Ordering::Relaxed))
    });
    // Rank 0 waits for gradients already; rank 1 for its second micro-batch while it works on the first.
    assert!(seen[0] >= 1 && seen[1] >= 2, "{seen:?}");
}

/// Sends that end when they are received.
fn synchronous(comm: Comm<Cpu>) -> Comm<Cpu> {
    Arc::new(Between::new(comm, |inner, call| {
        let is_send = matches!(call.what(), Collective::Send { .. });
        let work = inner.start(call)?;
        if is_send { work.wait().map(Work::ready) } else { Ok(work) }
    }))
}

/// The way transfers run.
#[derive(Clone, Copy)]
enum Transfers {
    Independent,
    Synchronous,
    InOrder,
}

#[test]
fn neither_synchronous_sends_nor_transfers_in_order_deadlock() {
    let mut turns = Turns::one_of(2);
    for (p, v, m) in [(2, 1, 4), (2, 2, 4), (3, 2, 6), (4, 2, 8), (8, 1, 16)] {
        for (kind, checked) in kinds(p, v, m).filter(|_| turns.come()) {
            let run = |transfers: Transfers| {
                world(p, |comm| {
                    let comm: Comm<Cpu> = match transfers {
                        Transfers::Independent => comm,
                        Transfers::Synchronous => synchronous(comm),
                        Transfers::InOrder => Arc::new(InOrderCommunicator::new(comm)?),
                    };
                    let mut pipeline = pipeline(&comm, &checked, mlp_stages(comm.runtime(), p * v, p * v))?;
                    Ok([step(&comm, &mut pipeline, m)?, step(&comm, &mut pipeline, m)?])
                })
            };
            let expected = run(Transfers::Independent);
            assert_eq!(run(Transfers::Synchronous), expected, "synchronous: {kind} {p} {v} {m}");
            assert_eq!(run(Transfers::InOrder), expected, "in order: {kind} {p} {v} {m}");
        }
    }
}
