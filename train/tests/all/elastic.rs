//! Runs whose ranks leave and join: whatever happens to them, every world goes on, to the bit, as a fresh run of its size from the commit that it took up, and no
//! checkpoint is lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::Condvar,
};

use distributed::{
    checkpoint::CheckpointReader,
    comm::{FaultyRendezvous, ThreadSeat},
};

use crate::{
    common::*,
    elastic_plans::{LENGTH, Plan},
    prelude::*,
    worlds::rendezvous,
};

/// How many seeds are tried, where that is asked for.
const SEEDS: &str = "WEFTGRAD_TEST_ELASTIC_SEEDS";
/// The first of them.
const FIRST: &str = "WEFTGRAD_TEST_ELASTIC_FIRST";

/// Of a world: its size, and the world and the step of the commit that it took up.
type Began = (usize, Option<(u64, u64)>);

/// What was seen of a run.
#[derive(Default)]
struct Story {
    began: Mutex<BTreeMap<u64, Began>>,
    /// By world, name and step.
    values: Mutex<BTreeMap<(u64, String, u64), u64>>,
    /// The last step that was taken; none comes after `u64::MAX`.
    step: Mutex<u64>,
    stepped: Condvar,
    /// The last checkpoint, as each world found it.
    latest: Mutex<BTreeMap<u64, Option<u64>>>,
    /// The checkpoints that each world found.
    found: Mutex<BTreeMap<u64, BTreeSet<u64>>>,
}

/// Keeps losses of one world, to the bit.
struct Losses<'s>(&'s Story, u64);

impl Sink for Losses<'_> {
    fn write(&mut self, record: &Record) -> Result<()> {
        for (name, value) in &record.values {
            if let (true, Value::Scalar(value)) = (name.ends_with("loss"), value) {
                self.0.values.lock().unwrap().insert((self.1, name.clone(), record.step), value.to_bits());
            }
        }
        Ok(())
    }
}

/// Says how far the run is.
struct Tell<'s>(&'s Story);

impl<M, B> Callback<Cpu, M, B> for Tell<'_> {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) {
            self.0.reach(run.progress().step);
        }
        Ok(())
    }
}

/// Saves after these steps, and at once where the run goes on from one of them.
struct SaveAt(BTreeSet<u64>);

impl<M, B> Callback<Cpu, M, B> for SaveAt {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        let step = run.progress().step;
        if matches!(event, Event::Begin | Event::StepEnd(_)) && step > 0 && self.0.contains(&step) {
            run.control().save();
        }
        Ok(())
    }
}

/// What is done with a trainer, whatever its step.
trait With<'a, T> {
    fn with<S: Step<Cpu>>(self, trainer: Trainer<'a, Cpu, Mlp<Cpu>, S, Rows>) -> Result<T>;
}

/// Makes the trainer of a plan.
fn trainer<'a, T>(plan: &Plan, comm: &Comm<Cpu>, model: &'a Mlp<Cpu>, with: impl With<'a, T>) -> Result<T> {
    let loader = loader(comm.runtime()).workers(0);
    match plan.how {
        0 => with.with(Trainer::new(model, ddp(comm, model, 1)?, loader)),
        1 => with.with(Trainer::new(model, canonical(comm, model, 1)?, loader)),
        stage => {
            let stage = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters][stage as usize - 2];
            with.with(Trainer::new(model, zero(comm, model, stage, 1)?, loader))
        }
    }
}

/// What every run has.
fn set_up<'a, S: Step<Cpu>>(
    trainer: Trainer<'a, Cpu, Mlp<Cpu>, S, Rows>,
    plan: &Plan,
    rt: &Cpu,
    until: u64,
) -> Trainer<'a, Cpu, Mlp<Cpu>, S, Rows> {
    let trainer = trainer
        .until(Length::Steps(until))
        .record_every(Interval::Steps(1))
        .with(Evaluate::on(held_out(rt).batch(23)).every(Interval::Steps(2)));
    if plan.averages { trainer.with(WeightAveraging::new(0.9)) } else { trainer }
}

/// All weights, gathered, of the model that a step trains.
fn trained<S: Step<Cpu>>(step: &S) -> Result<Vec<u8>> {
    let parts = step.parameter_parts()?.into_iter().map(|part| part.row.to_bytes()).collect::<Result<Vec<_>>>()?;
    let all = distributed::comm::Collectives::exchange(&step.ranks().everyone, &parts.concat())?;
    Ok(all.concat())
}

/// A rank of an elastic run.
struct ElasticRun<'a, 's> {
    plan: &'a Plan,
    story: &'s Story,
    world: &'a mut ElasticWorld<Cpu>,
    folder: Folder,
}

impl<'a> With<'a, Vec<u8>> for ElasticRun<'a, '_> {
    fn with<S: Step<Cpu>>(self, trainer: Trainer<'a, Cpu, Mlp<Cpu>, S, Rows>) -> Result<Vec<u8>> {
        let ElasticRun { plan, story, world, folder } = self;
        let (generation, rank) = (world.generation(), world.comm()?.rank());
        if rank == 0 {
            story.latest.lock().unwrap().insert(generation, folder.latest()?);
            story.found.lock().unwrap().insert(generation, folder.steps()?.into_iter().collect());
        }
        let policy = Checkpoints::at(folder).every(Interval::Steps(plan.save));
        let policy = if plan.in_thread { policy } else { policy.blocking() };
        let report = set_up(trainer, plan, world.comm()?.runtime(), LENGTH)
            .with(policy.best("validation/loss").ignore_signals())
            .with(Tell(story))
            .sink(Losses(story, generation))
            .elastic(world, Interval::Steps(plan.commit))
            .run(loss)?;
        trained(&report.step)
    }
}

/// A fresh run of the size of a world, for as many steps as that one took: all values, and the weights at its end.
struct FreshRun<'a> {
    plan: &'a Plan,
    from: Option<PathBuf>,
    saves: BTreeSet<u64>,
    into: PathBuf,
    until: u64,
    memory: Memory,
    rt: Cpu,
}

impl<'a> With<'a, Vec<u8>> for FreshRun<'a> {
    fn with<S: Step<Cpu>>(self, trainer: Trainer<'a, Cpu, Mlp<Cpu>, S, Rows>) -> Result<Vec<u8>> {
        let trainer = set_up(trainer, self.plan, &self.rt, self.until)
            .with(Checkpoints::in_folder(self.into).ignore_signals().blocking().skip_end())
            .with(SaveAt(self.saves))
            .sink(self.memory)
            .resume(self.from.map_or(Resume::No, Resume::From));
        trained(&trainer.run(loss)?.step)
    }
}

impl Story {
    fn reach(&self, step: u64) {
        let mut last = self.step.lock().unwrap();
        *last = step.max(*last);
        self.stepped.notify_all();
    }

    fn rank(&self, plan: &Plan, seat: usize, folder: &Folder, world: &mut ElasticWorld<Cpu>) -> Result<Vec<u8>> {
        autograd::manual_seed(7);
        let comm = world.comm()?;
        let (changes, at) = (AtomicU64::new(0), plan.change[seat].filter(|_| world.generation() == 0));
        let watched = folder.clone().watched(move |_| match Some(changes.fetch_add(1, Ordering::SeqCst)) == at {
            true => Err(Error::argument("the disk", "is gone on purpose")),
            false => Ok(()),
        });
        let model = Mlp::new(comm.runtime(), 0.3)?;
        let generation = world.generation();
        let run =
            || trainer(plan, &comm, &model, ElasticRun { plan, story: self, world: &mut *world, folder: watched });
        let done = catch_unwind(AssertUnwindSafe(run));
        if comm.rank() == 0 {
            let from = world.restored_commit();
            self.began.lock().unwrap().insert(generation, (comm.size(), from));
        }
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Runs the plan: the outcome of each seat.
    fn run(&self, plan: &Plan, folder: &Folder) -> Vec<Result<Vec<u8>>> {
        let (rendezvous, seats) = rendezvous(plan.ranks, Quorum::default());
        let of = |k: usize, seat: ThreadSeat<Cpu>| {
            let faulty = FaultyRendezvous::new(seat, plan.faults[k].clone());
            Elastic::new(faulty).copies(2).run(|world| self.rank(plan, k, folder, world))
        };
        std::thread::scope(|scope| {
            let (of, rendezvous) = (&of, &rendezvous);
            let first: Vec<_> =
                seats.into_iter().enumerate().map(|(k, seat)| scope.spawn(move || of(k, seat))).collect();
            let join = |(k, step): (usize, &u64)| {
                let step = *step;
                scope.spawn(move || {
                    drop(self.stepped.wait_while(self.step.lock().unwrap(), |last| *last < step).unwrap());
                    of(plan.ranks + k, rendezvous.join(Cpu::with_threads(1)))
                })
            };
            let newcomers: Vec<_> = plan.joins.iter().enumerate().map(join).collect();
            let mut outcomes: Vec<_> = first.into_iter().map(|thread| thread.join().unwrap()).collect();
            self.reach(u64::MAX);
            outcomes.extend(newcomers.into_iter().map(|thread| thread.join().unwrap()));
            outcomes
        })
    }

    /// Requires of every world the values of a fresh run; gives the weights of the last one.
    fn require_replay(&self, plan: &Plan, what: &str) -> Vec<u8> {
        let (began, values) = (self.began.lock().unwrap().clone(), self.values.lock().unwrap());
        let scratch = Scratch::new("elastic-fresh");
        let folder = |generation: u64| scratch.0.join(generation.to_string());
        let mut last = Vec::new();
        for (generation, (ranks, from)) in &began {
            let sources = began.values().filter_map(|(_, from)| *from);
            let saves = sources.filter(|(of, _)| of == generation).map(|(_, step)| step).collect::<BTreeSet<u64>>();
            let from_step = from.map(|(_, step)| step);
            let from = from.filter(|(_, step)| *step > 0).map(|(of, step)| {
                let (alone, name) = (scratch.0.join(format!("from-{generation}")), format!("step-{step:010}"));
                fs::create_dir_all(alone.join(&name)).unwrap();
                for file in fs::read_dir(folder(of).join(&name)).unwrap() {
                    let file = file.unwrap().path();
                    fs::copy(&file, alone.join(&name).join(file.file_name().unwrap())).unwrap();
                }
                alone
            });
            let known = values.keys().filter(|(of, ..)| of == generation).map(|(_, _, step)| *step);
            let until = match began.last_key_value() {
                Some((last, _)) if last == generation => LENGTH,
                _ => known.chain(saves.iter().copied()).max().unwrap_or(0).max(from_step.unwrap_or(0)),
            };
            let memory = Memory::default();
            let program = |comm: Comm<Cpu>| {
                autograd::manual_seed(7);
                let model = Mlp::new(comm.runtime(), 0.3)?;
                let (saves, into) = (saves.clone(), folder(*generation));
                trainer(
                    plan,
                    &comm,
                    &model,
                    FreshRun {
                        plan,
                        from: from.clone(),
                        saves,
                        into,
                        until,
                        memory: memory.clone(),
                        rt: comm.runtime().clone(),
                    },
                )
            };
            let outcome = Ranks::new(*ranks).run(cpu, program);
            last = outcome.unwrap_or_else(|e| panic!("{what}: {began:?}: {e}")).swap_remove(0);
            for ((_, name, step), bits) in values.iter().filter(|((of, ..), _)| of == generation) {
                let fresh = memory.of(name).into_iter().find(|(at, _)| at == step).map(|(_, value)| value.to_bits());
                assert_eq!(fresh, Some(*bits), "{what}: {name} of step {step} in world {generation} of {began:?}");
            }
        }
        last
    }
}

/// How many of the worlds of some runs were smaller than the one before, were larger, and began with a save that the one before owed.
#[derive(Clone, Copy, Debug, Default)]
struct Changes {
    shrank: u64,
    grew: u64,
    owed: u64,
}

/// Runs a seed's plan: what its worlds came to.
fn try_seed(seed: u64) -> Changes {
    let (plan, story, scratch) = (Plan::seeded(seed), Story::default(), Scratch::new("elastic"));
    let folder = Folder::new(scratch.0.join("checkpoints"));
    let outcomes = story.run(&plan, &folder);
    let what = format!("seed {seed}: {plan:?}");
    for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
        let told = error.to_string();
        let expected = told.contains("on purpose") || told.contains("every rank of the last world has left");
        assert!(expected, "{what}: {told}");
    }
    let done: Vec<&Vec<u8>> = outcomes.iter().flatten().collect();
    assert!(!done.is_empty(), "{what}: nobody is left, {outcomes:?}");
    let expected = story.require_replay(&plan, &what);
    assert!(done.iter().all(|own| **own == expected), "{what}: other weights than in fresh runs");
    // Every checkpoint that was due is there, and whole.
    let due = (1..=LENGTH).filter(|step| step % plan.save == 0 || *step == LENGTH);
    let steps = folder.steps().unwrap();
    assert!(due.clone().all(|step| steps.contains(&step)), "{what}: {steps:?}");
    assert_eq!(folder.latest().unwrap(), Some(LENGTH), "{what}");
    // A run that goes back to its last commit may save an earlier step last, but what was in place stays.
    let found: Vec<BTreeSet<u64>> = story.found.lock().unwrap().values().cloned().collect();
    assert!(found.windows(2).all(|two| two[0].is_subset(&two[1])), "{what}: a checkpoint was lost, {found:?}");
    assert!(found.iter().flatten().all(|step| steps.contains(step)), "{what}: {found:?}, {steps:?}");
    for step in steps {
        let model = Mlp::new(&Cpu::with_threads(1), 0.0).unwrap();
        let read = CheckpointReader::open(folder.step(step)).unwrap().load_parameters(&model, |name| Some(name.into()));
        read.unwrap_or_else(|e| panic!("{what}: step {step}: {e}"));
    }
    let sizes: Vec<usize> = story.began.lock().unwrap().values().map(|(ranks, _)| *ranks).collect();
    // What a world takes up was committed right before a save, of which nothing was in place when it began.
    let latest = story.latest.lock().unwrap().clone();
    let owes = |(generation, (_, from)): (&u64, &Began)| {
        from.is_some_and(|(_, at)| at > 0 && at % plan.save == 0 && latest[generation] < Some(at))
    };
    let owed = story.began.lock().unwrap().iter().filter(|began| owes(*began)).count() as u64;
    let count = |is: fn(&[usize]) -> bool| sizes.windows(2).filter(|two| is(two)).count() as u64;
    Changes { shrank: count(|two| two[1] < two[0]), grew: count(|two| two[1] > two[0]), owed }
}

#[test]
fn whatever_happens_to_ranks_the_run_goes_on() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (first, seeds) = (number(FIRST).unwrap_or(0), number(SEEDS).unwrap_or(100));
    let (next, all) = (AtomicU64::new(first), Mutex::new(Changes::default()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::SeqCst);
            if seed >= first + seeds {
                return;
            }
            // One that fails is the last: the others begin no more.
            let Changes { shrank, grew, owed } = catch_unwind(|| try_seed(seed)).unwrap_or_else(|failed| {
                next.store(first + seeds, Ordering::SeqCst);
                resume_unwind(failed)
            });
            let mut all = all.lock().unwrap();
            *all = Changes { shrank: all.shrank + shrank, grew: all.grew + grew, owed: all.owed + owed };
            if seeds > 100 && (seed + 1) % 100 == 0 {
                println!("{} seeds", seed + 1);
            }
        }
    };
    // Ranks wait for each other most of the time: more seeds than cores are under way.
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap_or_else(|failed| resume_unwind(failed)));
    });
    let all = all.into_inner().unwrap();
    // Faults come, newcomers are taken in, and saves are owed: what is tried above is tried in earnest.
    println!("{seeds} seeds: {all:?}");
    let Changes { shrank, grew, owed } = all;
    let is_enough = 100 * shrank >= 50 * seeds && 100 * grew >= 30 * seeds && 100 * owed >= 10 * seeds;
    assert!(seeds < 100 || is_enough, "{all:?}");
}
