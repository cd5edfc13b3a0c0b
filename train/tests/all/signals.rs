//! A process that is asked to end while it evaluates, or asked twice.
#![cfg(unix)]

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
};

use train::StopOnSignal;

use crate::{common::*, prelude::*, worlds::elastic};

const FOLDER: &str = "WEFTGRAD_TEST_SIGNAL_FOLDER";
const RANKS: &str = "WEFTGRAD_TEST_SIGNAL_RANKS";
/// Milliseconds that each batch of the evaluation takes.
const PAUSE: &str = "WEFTGRAD_TEST_SIGNAL_PAUSE";
/// Batches of the evaluation.
const BATCHES: usize = 23;

fn append(path: &Path, text: &str) {
    let mut file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    writeln!(file, "{text}").unwrap();
}

/// What the tests below start: two steps, after the first of which it evaluates slowly. What was seen is in files.
#[test]
fn child() {
    let Ok(path) = std::env::var(FOLDER) else { return };
    let (folder, ranks) = (Path::new(&path), std::env::var(RANKS).unwrap().parse().unwrap());
    let pause = Duration::from_millis(std::env::var(PAUSE).unwrap().parse().unwrap());
    let (reason, value) = on_ranks(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let (rank, seen) = (comm.rank(), AtomicUsize::new(0));
        let evaluate = Evaluate::on(held_out(comm.runtime()).batch(1)).every(Interval::Steps(1)).skip_end();
        let slowly = evaluate.measure("slow", |_, _| {
            if rank == 0 {
                append(&folder.join("measured"), &seen.fetch_add(1, Ordering::SeqCst).to_string());
            }
            sleep(pause);
            Ok((0.0, 1.0))
        });
        let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(1))
            .with(slowly)
            .with(Checkpoints::in_folder(folder.join("checkpoints")))
            .resume(Resume::IfThere)
            .run(loss)?;
        Ok((report.reason, report.evaluated.get("validation/loss").copied()))
    })
    .unwrap();
    append(&folder.join("ended"), &format!("{reason:?} {value:?}"));
}

fn start(folder: &Path, ranks: usize, pause: u64) -> Child {
    start_by(Command::new("env"), folder, ranks, pause)
}

/// Starts it by a program that becomes another.
fn start_by(mut command: Command, folder: &Path, ranks: usize, pause: u64) -> Child {
    fs::create_dir_all(folder).unwrap();
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "signals::child", "--test-threads", "1"]).env(FOLDER, folder);
    command.env(RANKS, ranks.to_string()).env(PAUSE, pause.to_string()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn signal(child: &Child) {
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
}

fn lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(String::from).collect()
}

/// Waits until the evaluation has begun.
fn begun(child: &mut Child, folder: &Path) {
    while lines(&folder.join("measured")).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_evaluation_that_is_interrupted_runs_when_the_run_goes_on() {
    for ranks in [1, 2] {
        let (whole, parts) = (Scratch::new("signal-whole"), Scratch::new("signal-parts"));
        assert!(start(&whole.0, ranks, 0).wait().unwrap().success());
        let mut child = start(&parts.0, ranks, 200);
        begun(&mut child, &parts.0);
        signal(&child);
        assert!(child.wait().unwrap().success());
        let measured = lines(&parts.0.join("measured")).len();
        assert!(measured < BATCHES, "{measured} of {BATCHES} batches were evaluated after a signal in the first");
        assert_eq!(lines(&parts.0.join("ended")), ["Interrupted None"], "{ranks} ranks");
        assert_eq!(Folder::new(parts.0.join("checkpoints")).latest().unwrap(), Some(1));
        assert!(start(&parts.0, ranks, 0).wait().unwrap().success());
        assert_eq!(lines(&parts.0.join("measured")).len(), measured + BATCHES);
        assert_eq!(lines(&parts.0.join("ended"))[1..], lines(&whole.0.join("ended")), "{ranks} ranks");
    }
}

#[test]
fn a_second_signal_ends_the_process_at_once() {
    let scratch = Scratch::new("signal-twice");
    // A batch of the evaluation takes an hour.
    let mut child = start(&scratch.0, 1, 3_600_000);
    begun(&mut child, &scratch.0);
    let status = loop {
        signal(&child);
        sleep(Duration::from_millis(50));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
    };
    assert_eq!(status.code(), Some(143));
    assert!(lines(&scratch.0.join("ended")).is_empty());
}

#[test]
fn a_signal_that_is_delivered_twice_is_one() {
    let scratch = Scratch::new("signal-delivered-twice");
    let mut child = start(&scratch.0, 1, 200);
    begun(&mut child, &scratch.0);
    signal(&child);
    signal(&child);
    assert!(child.wait().unwrap().success());
    assert_eq!(lines(&scratch.0.join("ended")), ["Interrupted None"]);
}

#[test]
fn under_nohup_a_hangup_changes_nothing() {
    let scratch = Scratch::new("signal-nohup");
    let mut child = start_by(Command::new("nohup"), &scratch.0, 1, 20);
    begun(&mut child, &scratch.0);
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    assert!(lines(&scratch.0.join("ended"))[0].starts_with("Finished"));
}

/// Asks for all evaluations and, as a signal would, for the end, after one step.
struct Asks(u64);

impl<R: Runtime, M, B> Callback<R, M, B> for Asks {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) && run.progress().step == self.0 {
            run.control().evaluate();
            run.control().interrupt();
        }
        Ok(())
    }
}

#[test]
fn evaluations_asked_for_in_the_step_of_an_interrupt_run_when_the_run_goes_on() {
    for ranks in [1, 3] {
        let scratch = Scratch::new("owed");
        let run = |until: u64, asks: u64| {
            let memory = Memory::default();
            let reason = on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                    .until(Length::Steps(until))
                    .with(Asks(asks))
                    .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Never).skip_end())
                    .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
                    .sink(memory.clone())
                    .resume(Resume::IfThere)
                    .run(loss)?;
                Ok(report.reason)
            });
            let steps: Vec<u64> = memory.of("validation/loss").into_iter().map(|(step, _)| step).collect();
            (reason.unwrap(), steps)
        };
        assert_eq!(run(6, 3), (StopReason::Interrupted, vec![]));
        assert_eq!(run(6, 0), (StopReason::Finished, vec![3]), "{ranks} ranks");
        assert_eq!(run(8, 0), (StopReason::Finished, vec![]), "it ran");
    }
}

#[test]
fn what_a_run_owes_at_its_end_runs_when_it_goes_on() {
    for ranks in [1, 3] {
        let scratch = Scratch::new("owed-at-end");
        let run = |evaluates_at_end: bool| {
            let memory = Memory::default();
            let reason = on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let interrupts = Interrupts(6);
                let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Never);
                let evaluate = if evaluates_at_end { evaluate } else { evaluate.skip_end() };
                let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                    .until(Length::Steps(6))
                    .with(interrupts)
                    .with(evaluate)
                    .with(Checkpoints::in_folder(scratch.0.join(evaluates_at_end.to_string())).ignore_signals())
                    .sink(memory.clone())
                    .resume(Resume::IfThere)
                    .run(loss)?;
                Ok(report.reason)
            });
            (reason.unwrap(), memory.of("validation/loss").into_iter().map(|(step, _)| step).collect::<Vec<_>>())
        };
        for (evaluates_at_end, evaluated) in [(true, vec![6]), (false, vec![])] {
            assert_eq!(run(evaluates_at_end), (StopReason::Interrupted, vec![]), "{ranks} ranks");
            assert_eq!(run(evaluates_at_end), (StopReason::Finished, evaluated), "{ranks} ranks");
        }
    }
}

/// Asks for the end, as a signal would, after one step.
struct Interrupts(u64);

impl<R: Runtime, M, B> Callback<R, M, B> for Interrupts {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) && run.progress().step == self.0 {
            run.control().interrupt();
        }
        Ok(())
    }
}

#[test]
fn an_interrupted_run_is_saved_by_a_policy_that_listens() {
    for (ignores, skips_end, saved) in [(false, true, Some(3)), (true, true, None), (true, false, Some(3))] {
        let (comm, scratch) = (one(), Scratch::new("interrupted-saves"));
        let model = Mlp::new(comm.runtime(), 0.0).unwrap();
        let checkpoints = Checkpoints::in_folder(&scratch.0);
        let checkpoints = if ignores { checkpoints.ignore_signals() } else { checkpoints };
        let checkpoints = if skips_end { checkpoints.skip_end() } else { checkpoints };
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
        let report = trainer.until(Length::Steps(6)).with(Interrupts(3)).with(checkpoints).run(loss).unwrap();
        assert_eq!(report.reason, StopReason::Interrupted);
        assert_eq!(Folder::new(&scratch.0).latest().unwrap(), saved, "ignores signals: {ignores}");
    }
}

const ALONE: &str = "WEFTGRAD_TEST_SIGNAL_ALONE";

/// A run that the test below starts. It is sent a signal in its second step, and listens or does not.
#[test]
fn alone_child() {
    let Ok(listens) = std::env::var(ALONE) else { return };
    let (comm, scratch, mut steps) = (one(), Scratch::new("signal-alone"), 0);
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    trainer = trainer.until(Length::Steps(50)).with(Checkpoints::in_folder(&scratch.0).ignore_signals());
    if listens == "yes" {
        trainer = trainer.with(StopOnSignal::new());
    }
    let report = trainer.run(|model, batch| {
        steps += 1;
        if steps == 2 {
            let own = std::process::id().to_string();
            assert!(Command::new("kill").args(["-TERM", &own]).status().unwrap().success());
            sleep(Duration::from_millis(100));
        }
        loss(model, batch)
    });
    let report = report.unwrap();
    assert_eq!(report.reason, StopReason::Interrupted);
    assert!(report.progress.step < 50);
}

#[test]
fn a_signal_ends_a_run_that_listens_and_a_process_that_does_not() {
    for (listens, code) in [("yes", Some(0)), ("no", None)] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "signals::alone_child", "--test-threads", "1"]).env(ALONE, listens);
        let status = child.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), code, "listens: {listens}");
    }
}

#[test]
fn a_run_that_only_listens_ends_as_any_other() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let report = trainer.until(Length::Steps(2)).with(StopOnSignal::new()).run(loss).unwrap();
    assert_eq!(report.reason, StopReason::Finished);
}

const ELASTIC: &str = "WEFTGRAD_TEST_SIGNAL_ELASTIC";

/// What the test below starts: of two ranks one is lost after its second step, and a signal comes before the other has made anything of its next world.
#[test]
fn elastic_child() {
    let Ok(path) = std::env::var(ELASTIC) else { return };
    let outcomes = elastic(2, 1, |world| {
        let (comm, is_first) = (world.comm()?, world.generation() == 0);
        if !is_first {
            let own = std::process::id().to_string();
            assert!(Command::new("kill").args(["-TERM", &own]).status().unwrap().success());
            sleep(Duration::from_millis(200));
        }
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let steps = AtomicUsize::new(0);
        let report = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()).workers(0))
            .until(Length::Steps(50))
            .with(Checkpoints::in_folder(&path))
            .elastic(world, Interval::Steps(1))
            .run(|model, batch| match (is_first, comm.rank(), steps.fetch_add(1, Ordering::SeqCst)) {
                (true, 1, 2) => Err(Error::argument("the machine", "is gone")),
                _ => loss(model, batch),
            })?;
        Ok(report.reason)
    });
    let left: Vec<StopReason> = outcomes.into_iter().flatten().collect();
    assert_eq!(left, [StopReason::Interrupted]);
}

#[test]
fn a_signal_between_two_worlds_of_an_elastic_run_ends_it_in_order() {
    let scratch = Scratch::new("signal-elastic");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "signals::elastic_child", "--test-threads", "1"]).env(ELASTIC, &scratch.0);
    assert!(child.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
    assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(3));
}
