//! Newcomers whose trainers are set up otherwise than those of the run that takes them in: they leave, and the run goes on without them.

use std::{sync::atomic::AtomicBool, thread::yield_now};

use distributed::comm::{Rendezvous, ThreadSeat};

use crate::{common::*, prelude::*};

/// Lets others know how far the first world is, and keeps it at step 2 until somebody waits to be taken in.
struct Wait<'s> {
    reached: &'s AtomicU64,
    probe: &'s Mutex<ThreadSeat<Cpu>>,
    is_first: bool,
}

impl<M, B> Callback<Cpu, M, B> for Wait<'_> {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        let step = run.progress().step;
        if self.is_first && matches!(event, Event::StepEnd(_)) {
            self.reached.fetch_max(step, Ordering::SeqCst);
            while step == 2 && self.probe.lock().unwrap().newcomers() == 0 {
                yield_now();
            }
        }
        Ok(())
    }
}

/// Trains to the end: the last world, its ranks, and the steps that were taken.
fn train(world: &mut ElasticWorld<Cpu>, every: Interval, wait: Wait<'_>) -> Result<(u64, usize, u64)> {
    autograd::manual_seed(7);
    let comm = world.comm()?;
    let model = Mlp::new(comm.runtime(), 0.3)?;
    let wait = Wait { is_first: world.generation() == 0, ..wait };
    let report = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()).workers(0))
        .until(Length::Steps(6))
        .with(wait)
        .elastic(world, every)
        .run(loss)?;
    Ok((world.generation(), comm.size(), report.progress.step))
}

#[test]
fn a_newcomer_with_another_interval_leaves() {
    for ranks in [2, 3] {
        let runtimes = (0..ranks).map(|_| Cpu::with_threads(1)).collect();
        let (rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(20)).unwrap();
        // It never meets: it only sees who waits.
        let probe = Mutex::new(rendezvous.join(Cpu::with_threads(1)));
        let (reached, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let wait = || Wait { reached: &reached, probe: &probe, is_first: false };
        let (outcomes, newcomer) = std::thread::scope(|scope| {
            let newcomer = scope.spawn(|| {
                while reached.load(Ordering::SeqCst) < 2 && !over.load(Ordering::SeqCst) {
                    yield_now();
                }
                let own = Elastic::new(rendezvous.join(Cpu::with_threads(1)));
                own.run(|world| train(world, Interval::Steps(2), wait()))
            });
            let outcomes = Elastic::on_threads(seats, |elastic| elastic, |w| train(w, Interval::Steps(1), wait()));
            over.store(true, Ordering::SeqCst);
            (outcomes, newcomer.join().unwrap())
        });
        let told = newcomer.unwrap_err().to_string();
        assert!(told.contains("the configuration of the trainer"), "{ranks} ranks: {told}");
        let done: Vec<_> = outcomes.iter().flatten().collect();
        assert_eq!(done, vec![&(2, ranks, 6); ranks], "{ranks} ranks: {outcomes:?}");
    }
}
