//! Steps of runs that are taken again, by threads of one process.

use std::{fs, path::PathBuf};

use distributed::{buckets::BucketOptions, comm::ThreadRendezvous, train::TrainStepBuilder};
use runtime_cpu::Simd;
use train::{ReduceOnPlateau, ReplayedStep, StepReplay};

use crate::{common::*, prelude::*};

/// Options of a training step, and its number of micro-batches.
type Build = fn(TrainStepBuilder<Cpu>) -> TrainStepBuilder<Cpu>;

/// A run that saves every so many steps, keeps two checkpoints, and hashes each state.
#[derive(Clone)]
struct Trained {
    folder: PathBuf,
    build: Build,
    until: u64,
    /// The first value of the example whose loss is NaN.
    poisoned: Option<f64>,
    /// The square at which the logarithm of a loss ends.
    least: Option<f64>,
    /// The number of times that a run goes back from NaN.
    go_back: u64,
    every: u64,
    keep: usize,
    /// The rank of an elastic run that is lost, and its step.
    lost: Option<(usize, u64)>,
    dropout: f64,
    losses: Memory,
}

impl Trained {
    fn new(folder: &Scratch, build: Build) -> Self {
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
            lost: None,
            dropout: 0.3,
            losses: Memory::default(),
        }
    }

    fn train(&self, comm: &Comm<Cpu>, world: Option<&mut ElasticWorld<Cpu>>) -> Result<()> {
        autograd::manual_seed(7);
        let model = Mlp::new(comm.runtime(), self.dropout)?;
        let plateau = ReduceOnPlateau::on("validation/loss").patience(0).factor(0.7);
        let builder = TrainStep::builder(comm, &model).optimizer(adamw()).max_norm(0.5);
        let step = (self.build)(builder.schedule(plateau.schedule(optim::ConstantLr))).build()?;
        let trainer = Trainer::new(&model, step, loader(comm.runtime()))
            .until(Length::Steps(self.until))
            .record_every(Interval::Steps(1))
            .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)))
            .with(plateau)
            .with(WeightAveraging::new(0.9))
            .with(
                Checkpoints::in_folder(&self.folder)
                    .every(Interval::Steps(self.every))
                    .keep(self.keep)
                    .skip_end()
                    .skip_failure(),
            )
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

    fn run(&self, ranks: usize) -> Result<()> {
        Ranks::new(ranks).run(cpu, |comm| self.train(&comm, None)).map(drop)
    }

    fn replay(&self, step: u64) -> Result<ReplayedStep> {
        let quiet = Trained { losses: Memory::default(), ..self.clone() };
        let step = StepReplay::of(&self.folder, step).run(cpu, |comm| quiet.train(&comm, None));
        assert!(quiet.losses.0.lock().unwrap().is_empty());
        step
    }

    /// The outcomes of four ranks, of which one is lost.
    fn run_elastic(&self) -> Vec<Result<()>> {
        let runtimes = (0..4).map(|rank| cpu(rank).unwrap()).collect();
        let (_rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(60)).unwrap();
        Elastic::on_threads(seats, |elastic| elastic.copies(1), |world| self.train(&world.comm()?, Some(world)))
    }

    fn replay_elastic(&self, step: u64) -> Result<ReplayedStep> {
        let quiet = Trained { lost: None, losses: Memory::default(), ..self.clone() };
        StepReplay::of(&self.folder, step).run_elastic(cpu, |world| quiet.train(&world.comm()?, Some(world)))
    }

    /// The loss of the run after a step.
    fn loss(&self, step: u64) -> f64 {
        self.losses.of("loss").into_iter().rev().find(|(of, _)| *of == step).unwrap().1
    }

    /// All files in the folder, with their times.
    fn files(&self) -> Vec<(PathBuf, std::time::SystemTime)> {
        let entries = fs::read_dir(&self.folder).unwrap().map(|entry| entry.unwrap());
        let mut all: Vec<_> =
            entries.map(|entry| (entry.path(), entry.metadata().unwrap().modified().unwrap())).collect();
        all.sort();
        all
    }
}

const BUILDS: [(&str, Build); 4] = [
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
fn the_op_in_which_nan_begins_is_named_with_its_operands_on_all_ranks() {
    // The run ends in the step that reads the example, on the rank that reads it.
    for (name, build) in BUILDS {
        for (ranks, example) in [(2, 3), (4, 20), (3, 36)] {
            let scratch = Scratch::new("replays-nan");
            let poisoned = Some(examples(37)[example][0]);
            let run = Trained { poisoned, ..Trained::new(&scratch, build) };
            let error = run.run(ranks).unwrap_err().to_string();
            assert!(error.contains("NonFinite"), "{error}");
            let step = run.losses.of("loss").last().map_or(1, |(step, _)| step + 1);
            let again = run.replay(step).unwrap();
            let (rank, call) = again.first_nan().unwrap();
            let found = &again.ranks[rank].calls[call];
            assert_eq!((found.op, found.gradient_of), ("log", None), "{name}");
            assert!(found.at.contains("replays.rs"), "{}", found.at);
            assert!(found.outputs[0].nan > 0 && found.inputs[0].nan == 0 && found.inputs[0].range.unwrap()[2] < 0.0);
            let text = again.to_string();
            assert!(text.contains(&format!("NaN begins on rank {rank} in call {call}:")), "{text}");
            for rank in 0..ranks {
                assert!(text.contains(&format!("rank {rank}: call {call}, ")), "{text}");
            }
            // The call before, with values.
            let before =
                StepReplay::of(&run.folder, step).values_of(call - 1).run(cpu, |comm| run.train(&comm, None)).unwrap();
            let values = |call: usize| before.ranks[rank].calls[call].outputs[0].values.clone();
            assert_eq!(values(call), None);
            let given = values(call - 1).unwrap();
            assert_eq!(given.iter().copied().fold(f64::INFINITY, f64::min), found.inputs[0].range.unwrap()[0]);
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

/// NaN among the examples, and a panic of a loss.
#[test]
fn a_step_is_observed_however_it_ends() {
    for panics in [false, true] {
        let scratch = Scratch::new("replays-panics");
        let bad = examples(37)[20][0];
        let train = |comm: Comm<Cpu>| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let checkpoints = Checkpoints::in_folder(&scratch.0).every(Interval::Steps(1)).skip_end().skip_failure();
            let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).with(checkpoints);
            let trainer = trainer.until(Length::Steps(5)).with(NonFinite::stop());
            trainer
                .run(|model, batch| {
                    let is_bad = batch.data.to_f64s()?.contains(&bad);
                    assert!(!(is_bad && panics), "the loss panics on purpose");
                    let data = if is_bad { batch.data.mul(f64::NAN)? } else { batch.data.clone() };
                    loss(model, &Batch { data, ..batch.clone() })
                })
                .map(drop)
        };
        let run = || std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Ranks::new(2).run(cpu, train)));
        assert!(!run().is_ok_and(|outcome| outcome.is_ok()));
        let log = fs::read_to_string(scratch.0.join("replay.jsonl")).unwrap();
        let step = log.lines().filter(|line| line.contains("\"ns\"")).count() as u64;
        let again = StepReplay::of(&scratch.0, step).run(cpu, train).unwrap();
        assert_eq!((again.ranks.len(), again.first_nan()), (2, None));
        let text = again.to_string();
        if panics {
            let errors: Vec<&String> = again.ranks.iter().filter_map(|rank| rank.error.as_ref()).collect();
            assert!(errors.len() == 2 && errors.iter().any(|e| e.contains("the loss panics on purpose")), "{errors:?}");
        } else {
            assert!(
                text.contains("no call begins a NaN; on rank") && text.contains("comes in by an input of call 0"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_trainer_of_another_run_takes_no_leg() {
    let scratch = Scratch::new("replays-phases");
    let [first, second] = ["first", "second"].map(|name| Trained {
        folder: scratch.0.join(name),
        until: 6,
        ..Trained::new(&scratch, BUILDS[0].1)
    });
    let both = |comm: Comm<Cpu>| first.train(&comm, None).and_then(|()| second.train(&comm, None));
    Ranks::new(2).run(cpu, both).unwrap();
    let said = StepReplay::of(&second.folder, 6).run(cpu, both).unwrap_err().to_string();
    assert!(said.contains("first comes before that of"), "{said}");
    assert_eq!(StepReplay::of(&first.folder, 6).run(cpu, both).unwrap().step, 6);
    // A copy has another path.
    fs::rename(&second.folder, scratch.0.join("copy")).unwrap();
    let copy = StepReplay::of(scratch.0.join("copy"), 6);
    assert_eq!(copy.ranks().unwrap(), 2);
    copy.run(cpu, |comm| second.train(&comm, None)).unwrap();
}

#[test]
fn a_run_that_went_on_with_other_ranks_is_taken_again_with_those() {
    let scratch = Scratch::new("replays-resumed");
    let first = Trained { until: 7, ..Trained::new(&scratch, BUILDS[3].1) };
    first.run(3).unwrap();
    // From step 5, of which steps 6 and 7 are taken a second time.
    let second = Trained { until: 12, losses: Memory::default(), ..first.clone() };
    second.run(2).unwrap();
    assert_ne!(first.loss(7), second.loss(7));
    for (step, ranks, run) in [(4, 3, &first), (6, 2, &second), (7, 2, &second), (12, 2, &second)] {
        let again = second.replay(step).unwrap();
        assert_eq!(again.ranks.len(), ranks);
        assert_eq!(again.ranks[0].loss.unwrap().to_bits(), run.loss(step).to_bits(), "{step}");
    }
    // Without the checkpoints, the way to the end is that of three ranks, then of two.
    Folder::new(&second.folder).clear().unwrap();
    let again = second.replay(9).unwrap();
    assert_eq!((again.from, again.ranks[0].loss.unwrap().to_bits()), (None, second.loss(9).to_bits()));
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
fn a_run_goes_on_without_a_log_that_cannot_be_written() {
    let scratch = Scratch::new("replays-unwritable");
    let run = Trained::new(&scratch, BUILDS[0].1);
    fs::create_dir_all(run.folder.join("replay.jsonl")).unwrap();
    run.run(2).unwrap();
    assert!(run.losses.text("replay/failure").unwrap().contains("replay.jsonl"));
    assert_eq!(run.losses.of("loss").len(), 13);
    run.replay(7).unwrap_err();
}

/// A loss that is NaN at some step after a rank was lost.
#[test]
fn nan_of_a_run_that_lost_a_rank_is_found() {
    let mut after = 0;
    for least in [3e-5, 1e-5, 3e-6, 1e-6, 3e-7] {
        let scratch = Scratch::new("replays-elastic-nan");
        let trained = Trained::new(&scratch, BUILDS[3].1);
        let run = Trained { lost: Some((1, 7)), least: Some(least), until: 40, ..trained };
        let outcomes = run.run_elastic();
        let is_of_nan = |outcome: &&Result<()>| outcome.as_ref().is_err_and(|e| e.to_string().contains("NonFinite"));
        if outcomes.iter().find(is_of_nan).is_none() {
            continue;
        }
        let step = run.losses.of("loss").last().map_or(1, |(step, _)| step + 1);
        let again = run.replay_elastic(step).unwrap();
        let (rank, call) = again.first_nan().unwrap();
        let found = &again.ranks[rank].calls[call];
        assert!(found.op == "log" && found.inputs[0].range.unwrap()[0] < 0.0, "{again}");
        // Ranks that fail one after another may take the step again in a smaller world.
        assert!(again.ranks.len() <= if step > 7 { 3 } else { 4 });
        after += usize::from(step > 7);
    }
    assert!(after > 0);
}

#[cfg(all(feature = "program", unix))]
#[test]
fn the_program_asks_a_command_for_a_replay() {
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_weftgrad-replay"));
        let output = command.args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (code, said) = run(&["/runs/gpt", "--step", "48", "--rank", "3", "--", "env"]);
    let (name, value) = StepReplay::of("/runs/gpt", 48).show_rank(3).variable();
    assert!(code == Some(0) && said.contains(&format!("{name}={value}")), "{said}");
    assert!(value.contains(r#""folder":"/runs/gpt","rank":3,"#), "{value}");
    assert_eq!(run(&["/runs/gpt", "--step", "48", "--", "sh", "-c", "exit 7"]).0, Some(7));
    assert!(run(&["/runs/gpt", "--step", "48", "--", "/no/such/program"]).1.contains("/no/such/program: "));
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

#[test]
fn what_cannot_be_taken_again_is_an_error() {
    let scratch = Scratch::new("replays-errors");
    let run = Trained::new(&scratch, BUILDS[0].1);
    let said = |outcome: Result<ReplayedStep>| outcome.unwrap_err().to_string();
    assert!(said(run.replay(3)).contains("replay.jsonl"));
    run.run(2).unwrap();
    for step in [0, 14] {
        let said = said(run.replay(step));
        assert!(said.contains("a step from 1 to 13"), "{said}");
    }
    // Another program: other weights, other places in the data, or no steps at all.
    let other = Trained { dropout: 0.1, ..run.clone() };
    let said_of_other = said(other.replay(8));
    assert!(said_of_other.contains("the replay of step 6 has parted from the run"), "{said_of_other}");
    let none = StepReplay::of(&run.folder, 8).run(cpu, |_| Ok(()));
    assert!(said(none).contains("the program ended before its trainer had taken the steps of the log"));
    let fails = StepReplay::of(&run.folder, 8).run(cpu, |_| Err::<(), _>(Error::argument("data", "is missing")));
    assert!(said(fails).contains("is missing"));
    for every in [Interval::Steps(0), Interval::Seconds(f64::NAN)] {
        let (comm, model) = (one(), Mlp::new(&cpu(0).unwrap(), 0.0).unwrap());
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime())).hash_state(every);
        assert!(trainer.run(loss).unwrap_err().to_string().contains("hash_state"));
    }
    // A line that was cut off counts for nothing; any other is named.
    let torn = format!("{{\"step\":14,\"at\":\"epoch {}", " ".repeat(500));
    let path = run.folder.join("replay.jsonl");
    let log = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{log}{torn}")).unwrap();
    run.replay(13).unwrap();
    assert!(said(run.replay(14)).contains("a step from 1 to 13"));
    fs::write(&path, log.replacen("\"at\"", "\"place\"", 3)).unwrap();
    assert!(said(run.replay(13)).contains("line 1 is no line of a run's log"));
    // A run that goes on drops the line that was cut off.
    fs::write(&path, format!("{log}{torn}")).unwrap();
    let longer = Trained { until: 15, losses: Memory::default(), ..run.clone() };
    longer.run(2).unwrap();
    assert_eq!(longer.replay(14).unwrap().ranks[0].loss.unwrap().to_bits(), longer.loss(14).to_bits());
    // A run from scratch in the same place has a log of its own.
    Folder::new(&run.folder).clear().unwrap();
    Trained { until: 3, ..run.clone() }.run(1).unwrap();
    assert!(said(run.replay(4)).contains("a step from 1 to 3"));
}
