//! The findings of replays: NaN, panics and errors, and the runs and programs that cannot be taken again.

use std::fs;

use train::{ReplayedStep, StepReplay};

use crate::{
    common::*,
    prelude::*,
    replays::{BUILDS, Trained},
};

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
            // Losses of other ranks have no logarithm.
            for other in 0..ranks {
                let shown = if other == rank { format!("call {call}, log") } else { "this call was not made".into() };
                assert!(text.contains(&format!("rank {other}: {shown}")), "{text}");
            }
            // The call before, with values.
            let before = StepReplay::of(&run.folder, step)
                .show_rank(rank)
                .values_of(call - 1)
                .run(cpu, |comm| run.train(&comm, None))
                .unwrap();
            let values = |call: usize| before.ranks[rank].calls[call].outputs[0].values.clone();
            assert_eq!(values(call), None);
            let given = values(call - 1).unwrap();
            assert_eq!(given.iter().copied().fold(f64::INFINITY, f64::min), found.inputs[0].range.unwrap()[0]);
        }
    }
}

/// Ranks that make other calls number the same ones differently.
#[test]
fn a_call_is_shown_beside_the_same_call_of_other_ranks() {
    let scratch = Scratch::new("replays-calls");
    let train = |comm: Comm<Cpu>| {
        let (model, rank) = (Mlp::new(comm.runtime(), 0.0)?, comm.rank());
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(3))
            .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)))
            .run(|model, batch| {
                let x = Var::new(batch.data.narrow(1, 0, 3)?.contiguous()?);
                let x = (0..2 * rank).try_fold(x, |x, _| x.neg())?;
                Loss::sum(model.forward(&x)?.square()?.sum_all()?, batch.rows as f64)
            })
            .map(drop)
    };
    Ranks::new(3).run(cpu, train).unwrap();
    let replay = StepReplay::of(&scratch.0, 3);
    let calls = replay.run(cpu, train).unwrap();
    for shown in [0, 2] {
        let number = calls.ranks[shown].calls.iter().position(|call| call.op == "square").unwrap();
        let replay = replay.clone().show_rank(shown).values_of(number);
        let again = replay.run(cpu, train).unwrap();
        let text = again.show_call(shown, number).to_string();
        for (rank, of) in again.ranks.iter().enumerate() {
            let own = number + 2 * rank - 2 * shown;
            assert!(text.contains(&format!("rank {rank}: call {own}, square")), "{text}");
            let kept: Vec<usize> = (0..of.calls.len()).filter(|&k| of.calls[k].outputs[0].values.is_some()).collect();
            assert_eq!(kept, [own]);
        }
    }
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
fn a_trainer_on_a_thread_of_its_own_leaves_the_run_as_it_is() {
    let scratch = Scratch::new("replays-thread");
    let run = Trained::new(&scratch, BUILDS[0].1);
    run.run(2).unwrap();
    let before = run.files();
    let again = StepReplay::of(&run.folder, 8)
        .run(cpu, |comm| std::thread::scope(|scope| scope.spawn(|| run.train(&comm, None)).join().unwrap()));
    let said = again.unwrap_err().to_string();
    assert!(said.contains("runs on a thread that the program has started"), "{said}");
    assert_eq!(run.files(), before);
    // Afterwards it trains on.
    Trained { until: 15, ..run.clone() }.run(2).unwrap();
}

#[test]
fn a_replay_leaves_recordings_as_they_are() {
    let scratch = Scratch::new("replays-profile");
    let train = |comm: Comm<Cpu>| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let profile = train::recorder::Profile::in_folder(scratch.0.join("profile")).wait(1).active(2);
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(8))
            .with(Checkpoints::in_folder(scratch.0.join("run")).every(Interval::Steps(5)).skip_end())
            .with(profile)
            .run(loss)
            .map(drop)
    };
    train(one()).unwrap();
    let read = || fs::read(scratch.0.join("profile/trace.rank0.1.json")).unwrap();
    let before = read();
    StepReplay::of(scratch.0.join("run"), 4).run(cpu, train).unwrap();
    assert_eq!(read(), before);
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
    let said_of_rank = StepReplay::of(&run.folder, 13).show_rank(2).run(cpu, |comm| run.train(&comm, None));
    assert!(said_of_rank.unwrap_err().to_string().contains("below 2, the number of ranks that took step 13"));
    // A line that was cut off counts for nothing; any other is named.
    let torn = format!("{{\"step\":14,\"at\":\"epoch {}", " ".repeat(500));
    let path = run.folder.join("replay.jsonl");
    let log = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{log}{torn}")).unwrap();
    run.replay(13).unwrap();
    assert!(said(run.replay(14)).contains("a step from 1 to 13"));
    fs::write(&path, log.replacen("\"at\"", "\"place\"", 3)).unwrap();
    assert!(said(run.replay(13)).contains("line 2 is no line of a run's log"));
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
