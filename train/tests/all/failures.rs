//! A step that fails, by an error or a panic, on one rank: what there was before it is saved, on all.

use std::cell::Cell;

use numcore::pointwise::Program;
use optim::{Elementwise, ParamGroups, Scalars, StateSpec, StepContext, UpdateForm, scalars};

use crate::{common::*, prelude::*};

const LENGTH: u64 = 9;

fn run<S: Step<runtime_cpu::Cpu>>(
    comm: &distributed::comm::Comm<runtime_cpu::Cpu>,
    model: &Mlp<runtime_cpu::Cpu>,
    step: S,
    folder: &Scratch,
    memory: &Memory,
    fails: impl Fn(usize, u64) -> Result<()>,
) -> Result<u64> {
    let rank = comm.rank();
    let mut calls = step.global_step();
    Trainer::new(model, step, loader(comm.runtime()))
        .until(Length::Steps(LENGTH))
        .record_every(Interval::Steps(1))
        .with(Checkpoints::in_folder(&folder.0).every(Interval::Steps(3)).ignore_signals())
        .sink(memory.clone())
        .resume(Resume::IfThere)
        .run(|model, batch| {
            calls += 1;
            let own = loss(model, batch)?;
            fails(rank, calls).map(|()| own)
        })
        .map(|report| report.resumed.unwrap_or(0))
}

/// Losses of a run of which the step after some fails on the last rank, and that is started again.
fn failed(ranks: usize, stage: Option<ZeroStage>, at: u64, panics: bool) -> Vec<(u64, f64)> {
    let (scratch, memory) = (Scratch::new("failed"), Memory::default());
    let once = |fails: bool| {
        Ranks::new(ranks).run(cpu, |comm| {
            autograd::manual_seed(3);
            let model = Mlp::new(comm.runtime(), 0.3)?;
            let fails = |rank: usize, call: u64| match fails && rank + 1 == ranks && call == at {
                true if panics => panic!("the tokenizer met what it did not expect"),
                true => Err(Error::other("no such token")),
                false => Ok(()),
            };
            match stage {
                None => run(&comm, &model, ddp(&comm, &model, 1)?, &scratch, &memory, fails),
                Some(stage) => run(&comm, &model, zero(&comm, &model, stage, 1)?, &scratch, &memory, fails),
            }
        })
    };
    let error = once(true).unwrap_err().to_string();
    let said = if panics { "the tokenizer met" } else { "no such token" };
    assert!(error.contains(said), "{error}");
    assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(at - 1), "{ranks} ranks, {stage:?}");
    assert_eq!(once(false).unwrap(), vec![at - 1; ranks]);
    let leftover = std::fs::read_dir(&scratch.0).unwrap().filter_map(|e| e.ok()?.file_name().into_string().ok());
    assert!(leftover.into_iter().all(|name| !name.contains("stranded")));
    memory.of("loss")
}

#[test]
fn a_step_that_fails_on_one_rank_loses_nothing() {
    for ranks in [1, 2, 3] {
        let whole = {
            let (scratch, memory) = (Scratch::new("whole"), Memory::default());
            on_ranks(ranks, |comm| {
                autograd::manual_seed(3);
                let model = Mlp::new(comm.runtime(), 0.3)?;
                run(comm, &model, ddp(comm, &model, 1)?, &scratch, &memory, |_, _| Ok(()))
            })
            .unwrap();
            memory.of("loss")
        };
        for panics in [false, true] {
            assert_same(&failed(ranks, None, 6, panics), &whole, &format!("{ranks} ranks, panics: {panics}"));
        }
    }
}

#[test]
fn a_policy_can_leave_a_failed_run_as_it_was_last_saved() {
    for (ranks, fails) in [(1, 5), (2, 5), (1, 2)] {
        let scratch = Scratch::new("skip-failure");
        let run = |fails: Option<u64>| {
            on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                // The save of step 3 goes on when the fifth step fails.
                let slow = Folder::new(&scratch.0).watched(|_| {
                    sleep(Duration::from_millis(20));
                    Ok(())
                });
                let checkpoints = Checkpoints::at(slow).every(Interval::Steps(3)).ignore_signals();
                let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()));
                let trainer = trainer.until(Length::Steps(7)).with(checkpoints.skip_failure()).resume(Resume::IfThere);
                let mut left = fails.unwrap_or(u64::MAX);
                let report = trainer.run(|model, batch| {
                    left -= 1;
                    if left == 0 { Err(Error::other("no such token")) } else { loss(model, batch) }
                })?;
                Ok((report.resumed, report.progress.step))
            })
        };
        let error = run(Some(fails)).unwrap_err().to_string();
        assert!(error.contains("no such token"), "{error}");
        let saved = (fails > 3).then_some(3);
        assert_eq!(Folder::new(&scratch.0).latest().unwrap(), saved, "{ranks} ranks, step {fails} fails");
        assert_eq!(run(None).unwrap(), (saved, 7));
    }
}

#[test]
fn with_sharded_parameters_too() {
    for ranks in [1, 2] {
        let losses = failed(ranks, Some(ZeroStage::Parameters), 5, true);
        assert_eq!(losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=LENGTH).collect::<Vec<_>>());
    }
}

thread_local! {
    /// Which of the next updates of a part of the parameters fails; none if no one does.
    static FAILS: Cell<Option<usize>> = const { Cell::new(None) };
}

optim::config! {
    /// Gradient descent, which sometimes has no number for its program.
    FickleConfig = "Fickle" {
        /// Learning rate.
        lr: f64 = 1e-2, NonNegative;
    }
}

impl Elementwise for FickleConfig {
    fn states(&self) -> Vec<StateSpec> {
        Vec::new()
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.program("fickle", |p, g, [], [lr]| (p - g * lr, []))
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let fails = FAILS.get();
        FAILS.set(fails.and_then(|left| left.checked_sub(1)));
        if fails == Some(0) { scalars([]) } else { scalars([now.lr]) }
    }
}

#[test]
fn an_update_that_fails_half_way_is_no_step_to_save() {
    let scratch = Scratch::new("torn");
    let options = ZeroOptions { stage: ZeroStage::Optimizer, units: UnitOf::children(), ..Default::default() };
    let fails = |at: u64| {
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let rule = ParamGroups::new(FickleConfig::default());
        let step = TrainStep::builder(&comm, &model).optimizer(rule).zero(options.clone()).build()?;
        run(&comm, &model, step, &scratch, &Memory::default(), |_, call| {
            // The second of the parts.
            FAILS.set((call == at).then_some(1));
            Ok(())
        })
    };
    let error = fails(6).unwrap_err().to_string();
    assert!(error.contains("fickle"), "{error}");
    assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(3));
    assert_eq!(fails(0).unwrap(), 3);
}
