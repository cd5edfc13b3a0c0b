//! Steps of runs that are taken again, by threads of one process.

use std::{fs, path::PathBuf};

use distributed::{buckets::BucketOptions, comm::ThreadRendezvous, train::TrainStepBuilder};
use runtime_cpu::Simd;
use train::{ReduceOnPlateau, ReplayedStep, StepReplay};

use crate::{common::*, prelude::*};

/// Options of a training step, and its number of micro-batches.
pub type Build = fn(TrainStepBuilder<Cpu>) -> TrainStepBuilder<Cpu>;

/// A run that saves every so many steps, keeps two checkpoints, and hashes each state.
#[derive(Clone)]
pub struct Trained {
    pub folder: PathBuf,
    pub build: Build,
    pub until: u64,
    /// The first value of the example whose loss is NaN.
    pub poisoned: Option<f64>,
    /// The square at which the logarithm of a loss ends.
    pub least: Option<f64>,
    /// The number of times that a run goes back from NaN.
    pub go_back: u64,
    pub every: u64,
    pub keep: usize,
    /// True if the state before a failure is saved.
    pub rescues: bool,
    /// The rank of an elastic run that is lost, and its step.
    pub lost: Option<(usize, u64)>,
    pub dropout: f64,
    /// The interval of evaluations, by whose losses the learning rate is reduced.
    pub evaluates: Interval,
    pub losses: Memory,
}

impl Trained {
    pub fn new(folder: &Scratch, build: Build) -> Self {
        let folder = folder.0.join("run");
        Trained {
            folder,
            build,
            until: 13,
            poisoned: None,
            least: None,
            go_back: 0,
            every: 5,
            keep: 2,
            rescues: false,
            lost: None,
            dropout: 0.3,
            evaluates: Interval::Steps(3),
            losses: Memory::default(),
        }
    }

    pub fn train(&self, comm: &Comm<Cpu>, world: Option<&mut ElasticWorld<Cpu>>) -> Result<()> {
        autograd::manual_seed(7);
        let model = Mlp::new(comm.runtime(), self.dropout)?;
        let plateau = ReduceOnPlateau::on("validation/loss").patience(0).factor(0.7);
        let builder = TrainStep::builder(comm, &model).optimizer(adamw()).max_norm(0.5);
        let step = (self.build)(builder.schedule(plateau.schedule(optim::ConstantLr))).build()?;
        let checkpoints =
            Checkpoints::in_folder(&self.folder).every(Interval::Steps(self.every)).keep(self.keep).skip_end();
        let trainer = Trainer::new(&model, step, loader(comm.runtime()))
            .until(Length::Steps(self.until))
            .record_every(Interval::Steps(1))
            .with(Evaluate::on(held_out(comm.runtime())).every(self.evaluates))
            .with(plateau)
            .with(WeightAveraging::new(0.9))
            .with(if self.rescues { checkpoints } else { checkpoints.skip_failure() })
            .with(NonFinite::go_back(self.go_back))
            .hash_state(Interval::Steps(1))
            .sink(self.losses.clone())
            .resume(Resume::IfThere);
        let is_first = world.as_ref().is_none_or(|world| world.generation() == 0);
        let trainer = match world {
            Some(world) => trainer.elastic(world, Interval::Steps(2)),
            None => trainer,
        };
        let (lost, rank) = (self.lost.filter(|_| is_first), comm.rank());
        let mut taken = 0;
        trainer.run(|model, batch| {
            taken += 1;
            if lost == Some((rank, taken)) {
                return Err(Error::argument("the machine", "is gone"));
            }
            let [x, y] =
                [(0, 3), (3, 1)].map(|(from, len)| batch.data.narrow(1, from, len)?.contiguous().map(Var::new));
            let squares = model.forward(&x?)?.sub(&y?)?.square()?;
            let squares = match self.poisoned {
                Some(value) if batch.data.to_f64s()?.contains(&value) => squares.neg()?.sub(1.0)?.log()?,
                _ => squares,
            };
            let squares = match self.least {
                Some(least) => squares.sub(least)?.log()?,
                None => squares,
            };
            Loss::sum(squares.sum_all()?, batch.rows as f64)
        })?;
        Ok(())
    }

    pub fn run(&self, ranks: usize) -> Result<()> {
        Ranks::new(ranks).run(cpu, |comm| self.train(&comm, None)).map(drop)
    }

    pub fn replay(&self, step: u64) -> Result<ReplayedStep> {
        let quiet = Trained { losses: Memory::default(), ..self.clone() };
        let step = StepReplay::of(&self.folder, step).run(cpu, |comm| quiet.train(&comm, None));
        assert!(quiet.losses.0.lock().unwrap().is_empty());
        step
    }

    /// The outcomes of four ranks, of which one is lost.
    pub fn run_elastic(&self) -> Vec<Result<()>> {
        let runtimes = (0..4).map(|rank| cpu(rank).unwrap()).collect();
        let (_rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(60)).unwrap();
        Elastic::on_threads(seats, |elastic| elastic.copies(1), |world| self.train(&world.comm()?, Some(world)))
    }

    pub fn replay_elastic(&self, step: u64) -> Result<ReplayedStep> {
        let quiet = Trained { lost: None, losses: Memory::default(), ..self.clone() };
        StepReplay::of(&self.folder, step).run_elastic(cpu, |world| quiet.train(&world.comm()?, Some(world)))
    }

    /// The loss of the run after a step.
    pub fn loss(&self, step: u64) -> f64 {
        self.losses.of("loss").into_iter().rev().find(|(of, _)| *of == step).unwrap().1
    }

    /// All files in the folder, with their times.
    pub fn files(&self) -> Vec<(PathBuf, std::time::SystemTime)> {
        let entries = fs::read_dir(&self.folder).unwrap().map(|entry| entry.unwrap());
        let mut all: Vec<_> =
            entries.map(|entry| (entry.path(), entry.metadata().unwrap().modified().unwrap())).collect();
        all.sort();
        all
    }
}

pub const BUILDS: [(&str, Build); 4] = [
    ("ddp", |builder| builder),
    ("two micro-batches", |builder| builder.accumulation(2)),
    ("canonical", |builder| builder.buckets(BucketOptions { canonical: true, ..Default::default() })),
    ("zero 3", |builder| {
        builder.zero(ZeroOptions { stage: ZeroStage::Parameters, units: UnitOf::children(), ..Default::default() })
    }),
];

#[test]
fn every_step_is_taken_again_to_the_bit() {
    for (name, build) in BUILDS {
        for ranks in [1, 2, 3] {
            let scratch = Scratch::new("replays");
            let run = Trained::new(&scratch, build);
            run.run(ranks).unwrap();
            let files = run.files();
            // Of steps 5 and 10 there are checkpoints.
            for (step, from) in [(1, None), (5, None), (6, Some(5)), (10, Some(5)), (11, Some(10)), (13, Some(10))] {
                let again = run.replay(step).unwrap();
                assert_eq!((again.step, again.from, again.ranks.len()), (step, from, ranks));
                // On machines of another kind, with other numbers of threads.
                let other = |rank: usize| Ok(Cpu::builder().threads(1 + rank).simd(Simd::Baseline).build());
                let elsewhere = StepReplay::of(&run.folder, step).run(other, |comm| run.train(&comm, None)).unwrap();
                let losses = |step: &ReplayedStep| step.ranks.iter().map(|rank| rank.loss).collect::<Vec<_>>();
                assert_eq!(losses(&elsewhere), losses(&again));
                for rank in &again.ranks {
                    let loss = rank.loss.unwrap_or(f64::NAN);
                    assert_eq!(loss.to_bits(), run.loss(step).to_bits(), "{name}, {ranks} ranks, step {step}");
                    assert_eq!((&rank.error, &rank.not_finite), (&None, &vec![]), "{name}, {ranks} ranks, step {step}");
                    assert!(rank.calls.len() > 15, "{}", rank.calls.len());
                }
                assert_eq!(again.first_nan(), None);
            }
            assert_eq!(run.files(), files, "a replay writes nothing");
        }
    }
}

#[test]
fn a_run_that_went_back_is_taken_again() {
    let scratch = Scratch::new("replays-back");
    let poisoned = Some(examples(37)[5][0]);
    let run = Trained { poisoned, go_back: 9, every: 2, until: 17, ..Trained::new(&scratch, BUILDS[0].1) };
    run.run(2).unwrap();
    let went = run.losses.of("went_back");
    assert!(went.len() > 1, "{went:?}");
    for step in [1, 15, 16, 17] {
        let again = run.replay(step).unwrap();
        assert_eq!(again.ranks[0].loss.map(f64::to_bits), Some(run.loss(step).to_bits()), "{step}, {went:?}");
    }
    // The checkpoint to which it went back is needed.
    Folder::new(&run.folder).clear().unwrap();
    let said = run.replay(17).unwrap_err().to_string();
    assert!(said.contains("to which the run went back, is gone"), "{said}");
}

#[test]
fn a_step_that_a_run_left_by_going_back_is_taken_again() {
    let scratch = Scratch::new("replays-attempts");
    let poisoned = Some(examples(37)[5][0]);
    let run = Trained { poisoned, go_back: 9, every: 2, keep: 99, until: 17, ..Trained::new(&scratch, BUILDS[0].1) };
    run.run(2).unwrap();
    // The run went back after each step whose loss was NaN, and took it again with other examples.
    let went: Vec<u64> = run.losses.of("went_back").into_iter().map(|(step, _)| step).collect();
    let (mut with_nan, mut without) = (0, 0);
    for (step, attempt) in went.into_iter().flat_map(|step| (0..9).map(move |attempt| (step, attempt))) {
        let again = StepReplay::of(&run.folder, step).attempt(attempt).run(cpu, |comm| run.train(&comm, None));
        match again {
            Ok(again) if again.first_nan().is_some() => with_nan += 1,
            Ok(_) => without += 1,
            // It was saved again with another place.
            Err(e) if e.to_string().contains("to which the run went back, is gone") => {}
            Err(e) => assert!(attempt > 1 && e.to_string().contains("the number of times that the run took"), "{e}"),
        }
    }
    assert!(with_nan > 0 && without > 0, "{with_nan}, {without}");
}

#[test]
fn a_run_that_lost_a_rank_is_taken_again() {
    for (name, build) in BUILDS {
        let scratch = Scratch::new("replays-elastic");
        let run = Trained { lost: Some((1, 7)), ..Trained::new(&scratch, build) };
        let outcomes = run.run_elastic();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 3, "{name}: {outcomes:?}");
        let again = |step| run.replay_elastic(step);
        let sizes: Vec<usize> = (1..=13)
            .map(|step| {
                let again = again(step).unwrap();
                assert_eq!(again.ranks[0].loss.unwrap().to_bits(), run.loss(step).to_bits(), "{name}: {step}");
                again.ranks.len()
            })
            .collect();
        assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[0] == 4 && sizes[12] == 3, "{sizes:?}");
        // From scratch, through the change of ranks.
        Folder::new(&run.folder).clear().unwrap();
        let again = again(13).unwrap();
        assert_eq!((again.from, again.ranks[2].loss.unwrap().to_bits()), (None, run.loss(13).to_bits()), "{name}");
    }
}

#[test]
fn shares_by_measured_speed_are_those_of_the_log() {
    use adaptive::balance::{SpeedOptions, SpeedShares};
    use train::Shares;
    let scratch = Scratch::new("replays-shares");
    let train = |comm: Comm<Cpu>, losses: &Memory, slow: bool| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let options = SpeedOptions { calibration: 1, ..Default::default() };
        let shares = SpeedShares::of(vec![0.6, 0.4])?.with_options(options)?;
        let rank = comm.rank();
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(9))
            .record_every(Interval::Steps(1))
            .shares(Shares::BySpeed(shares))
            .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(4)).skip_end())
            .hash_state(Interval::Steps(1))
            .sink(losses.clone())
            .run(|model, batch| {
                if slow && rank == 1 {
                    sleep(Duration::from_millis(20));
                }
                loss(model, batch)
            })
            .map(drop)
    };
    let losses = Memory::default();
    Ranks::new(2).run(cpu, |comm| train(comm, &losses, true)).unwrap();
    let log = fs::read_to_string(scratch.0.join("replay.jsonl")).unwrap();
    let shares: std::collections::BTreeSet<&str> =
        log.lines().filter_map(|line| line.split("\"shares\":").nth(1)).collect();
    assert!(shares.len() > 1, "{log}");
    for step in [2, 5, 9] {
        // On ranks that are equally fast.
        let again = StepReplay::of(&scratch.0, step).run(cpu, |comm| train(comm, &losses, false)).unwrap();
        let loss = losses.of("loss")[step as usize - 1].1;
        assert_eq!(again.ranks[0].loss.map(f64::to_bits), Some(loss.to_bits()), "{step}");
    }
}

#[test]
fn numbers_of_batches_by_measured_speed_are_those_of_the_log() {
    use adaptive::balance::{BalanceOptions, BalancePolicy, Balanced, SpeedOptions};
    let scratch = Scratch::new("replays-counts");
    let train = |comm: Comm<Cpu>, losses: &Memory, slow: bool| {
        let (model, rank) = (Mlp::new(comm.runtime(), 0.3)?, comm.rank());
        let speed = SpeedOptions { calibration: 1, ..Default::default() };
        let options =
            BalanceOptions { policy: BalancePolicy::FollowSpeeds, max_anchor: 1, speed, ..Default::default() };
        // A clock by which rank 1 is slow.
        let mut time = Duration::ZERO;
        let clock = move || {
            time += Duration::from_millis(if slow && rank == 1 { 30 } else { 10 });
            time
        };
        Trainer::new(&model, Balanced::with_clock(ddp(&comm, &model, 1)?, options, clock)?, loader(comm.runtime()))
            .until(Length::Steps(9))
            .record_every(Interval::Steps(1))
            .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(4)).skip_end())
            .hash_state(Interval::Steps(1))
            .sink(losses.clone())
            .run(loss)
            .map(drop)
    };
    let losses = Memory::default();
    Ranks::new(2).run(cpu, |comm| train(comm, &losses, true)).unwrap();
    let log = fs::read_to_string(scratch.0.join("replay.jsonl")).unwrap();
    let counts: std::collections::BTreeSet<&str> = log.lines().filter_map(|line| line.split("counts").nth(1)).collect();
    assert!(counts.len() > 1, "{log}");
    for step in [2, 5, 9] {
        // On ranks that are equally fast.
        let again = StepReplay::of(&scratch.0, step).run(cpu, |comm| train(comm, &losses, false)).unwrap();
        let loss = losses.of("loss")[step as usize - 1].1;
        assert_eq!(again.ranks[0].loss.map(f64::to_bits), Some(loss.to_bits()), "{step}");
    }
}

#[test]
fn times_are_those_of_the_log() {
    let scratch = Scratch::new("replays-times");
    let train = |comm: Comm<Cpu>, losses: &Memory, wait: u64| {
        let model = Mlp::new(comm.runtime(), 0.3)?;
        // Each evaluation but the first halves the rate, at whatever step it is due.
        let worst = |_: &(), _: &data::Batch<Rows>| Ok((1.0, 1.0));
        let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Seconds(0.03)).measure("value", worst);
        let plateau = ReduceOnPlateau::on("validation/value").factor(0.5).patience(0);
        let step = TrainStep::builder(&comm, &model).optimizer(optim::AdamWConfig { lr: 0.2, ..Default::default() });
        let step = step.schedule(plateau.schedule(optim::ConstantLr)).build()?;
        Trainer::new(&model, step, loader(comm.runtime()))
            .until(Length::Seconds(0.3))
            .record_every(Interval::Steps(1))
            .with(evaluate)
            .with(plateau)
            .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(4)).skip_end())
            .hash_state(Interval::Steps(1))
            .sink(losses.clone())
            .run(|model, batch| {
                sleep(Duration::from_millis(wait));
                loss(model, batch)
            })
            .map(drop)
    };
    let losses = Memory::default();
    Ranks::new(2).run(cpu, |comm| train(comm, &losses, 8)).unwrap();
    let (rates, losses) = (losses.of("learning_rate"), losses.of("loss"));
    assert!(rates.last().unwrap().1 < 0.1, "{rates:?}");
    // Faster than the run, and for longer than it may last.
    let (step, loss) = *losses.last().unwrap();
    for wait in [0, 100] {
        let again = StepReplay::of(&scratch.0, step).run(cpu, |comm| train(comm, &Memory::default(), wait)).unwrap();
        assert_eq!(again.ranks[0].loss.map(f64::to_bits), Some(loss.to_bits()), "{step}");
    }
}
