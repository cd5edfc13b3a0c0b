//! Newcomers that are set up otherwise than the run that takes them in: they leave, and the run goes on without them.

use std::thread::yield_now;

use crate::prelude::*;

/// Commits `commits` times: the last world, and how many ranks it has.
fn train(
    world: &mut ElasticWorld<Cpu>,
    commits: u64,
    befalls: impl Fn(&ElasticWorld<Cpu>, u64) -> Result<()>,
) -> Result<(u64, usize)> {
    let comm = world.comm()?;
    let model = Linear::new(&Init::new(comm.runtime(), 0), 3, 2)?;
    let mut step = TrainStep::builder(&comm, &model).optimizer(AdamWConfig::default()).build()?;
    let from = world.restore(&mut step)?.map_or(0, |from| from.step);
    for done in from..commits {
        befalls(world, done)?;
        world.commit(done, &step, &Default::default())?;
    }
    Ok((world.generation(), comm.size()))
}

#[test]
fn a_newcomer_with_another_number_of_copies_leaves() {
    for ranks in [2, 3] {
        let runtimes = (0..ranks).map(|_| Cpu::with_threads(1)).collect();
        let (rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(20)).unwrap();
        // It never meets: it only sees who waits.
        let probe = Mutex::new(rendezvous.join(Cpu::with_threads(1)));
        let (reached, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let befalls = |world: &ElasticWorld<Cpu>, done: u64| {
            reached.fetch_max(done, Ordering::SeqCst);
            while world.generation() == 0 && done == 2 && probe.lock().unwrap().newcomers() == 0 {
                yield_now();
            }
            // One is lost after the newcomer has left: what there is then is what these ranks agreed on.
            match (world.generation(), world.comm()?.rank(), done) {
                (2, 0, 4) => Err(Error::argument("the machine", "is gone")),
                _ => Ok(()),
            }
        };
        let (outcomes, newcomer) = std::thread::scope(|scope| {
            let newcomer = scope.spawn(|| {
                while reached.load(Ordering::SeqCst) < 2 && !over.load(Ordering::SeqCst) {
                    yield_now();
                }
                let own = Elastic::new(rendezvous.join(Cpu::with_threads(1))).copies(2);
                own.run(|world| train(world, 6, |_, _| Ok(())))
            });
            let outcomes = Elastic::on_threads(seats, |elastic| elastic, |world| train(world, 6, befalls));
            over.store(true, Ordering::SeqCst);
            (outcomes, newcomer.join().unwrap())
        });
        let told = newcomer.unwrap_err().to_string();
        assert!(told.contains("`Elastic::copies`"), "{ranks} ranks: {told}");
        let done: Vec<_> = outcomes.iter().flatten().collect();
        assert_eq!(done, vec![&(3, ranks - 1); ranks - 1], "{ranks} ranks: {outcomes:?}");
    }
}

#[test]
fn an_own_error_after_the_ranks_have_agreed_to_meet_again_is_the_ranks_own() {
    let runtimes = (0..3).map(|_| Cpu::with_threads(1)).collect();
    let (rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(20)).unwrap();
    let probe = Mutex::new(rendezvous.join(Cpu::with_threads(1)));
    let (reached, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let befalls = |world: &ElasticWorld<Cpu>, done: u64| {
        reached.fetch_max(done, Ordering::SeqCst);
        while world.generation() == 0 && done == 2 && probe.lock().unwrap().newcomers() == 0 {
            yield_now();
        }
        Ok(())
    };
    let (outcomes, newcomer) = std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| {
            while reached.load(Ordering::SeqCst) < 2 && !over.load(Ordering::SeqCst) {
                yield_now();
            }
            Elastic::new(rendezvous.join(Cpu::with_threads(1))).run(|world| train(world, 6, |_, _| Ok(())))
        });
        let program = |world: &mut ElasticWorld<Cpu>| {
            let done = train(world, 6, befalls);
            match world.is_changing() && world.comm()?.rank() == 1 {
                true => Err(Error::argument("the disk", "is full")),
                false => done,
            }
        };
        let outcomes = Elastic::on_threads(seats, |elastic| elastic, program);
        over.store(true, Ordering::SeqCst);
        (outcomes, newcomer.join().unwrap())
    });
    let told = outcomes[1].as_ref().unwrap_err().to_string();
    assert!(told.contains("is full"), "{told}");
    // The two that are left, and the newcomer.
    assert!(
        [&outcomes[0], &outcomes[2], &newcomer].into_iter().all(|o| matches!(o, Ok((1, 3)))),
        "{outcomes:?}, {newcomer:?}"
    );
}
