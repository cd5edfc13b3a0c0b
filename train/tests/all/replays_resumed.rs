//! Replays of runs that went on from a checkpoint.

use std::fs;

use train::StepReplay;

use crate::{
    common::*,
    prelude::*,
    replays::{BUILDS, Trained},
};

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
fn a_run_that_failed_and_went_on_is_taken_again() {
    let scratch = Scratch::new("replays-rescued");
    // Losses of evaluations count too.
    let failed = Trained { lost: Some((1, 8)), rescues: true, every: 50, ..Trained::new(&scratch, BUILDS[0].1) };
    failed.run(2).unwrap_err();
    let run = Trained { lost: None, losses: Memory::default(), ..failed.clone() };
    assert_eq!(Folder::new(&run.folder).latest().unwrap(), Some(3));
    run.run(3).unwrap();
    // A rank that others have lost may still write.
    let path = run.folder.join("replay.jsonl");
    let log = fs::read_to_string(&path).unwrap();
    let stray = log.lines().nth(3).unwrap();
    fs::write(&path, format!("{log}{stray}\n")).unwrap();
    assert!(stray.contains("\"step\":2"), "{stray}");
    assert_eq!(run.replay(2).unwrap().ranks.len(), 2);
    // From the rescued state, then from scratch, past the step that failed.
    for from in [Some(3), None] {
        let again = run.replay(9).unwrap();
        assert_eq!((again.from, again.ranks[0].loss.map(f64::to_bits)), (from, Some(run.loss(9).to_bits())));
        Folder::new(&run.folder).clear().unwrap();
    }
}

/// A checkpoint of the same step and place in the data is not always of the same state.
#[test]
fn steps_of_a_run_that_was_killed_lead_from_its_own_checkpoints() {
    let scratch = Scratch::new("replays-killed");
    let begun = Trained { until: 5, evaluates: Interval::Fraction(0.2), ..Trained::new(&scratch, BUILDS[0].1) };
    begun.run(2).unwrap();
    // It ends before it saves again, and three ranks go on from step 5, for longer.
    let killed = Trained { until: 12, every: 50, losses: Memory::default(), ..begun.clone() };
    killed.run(2).unwrap();
    let last = Trained { until: 20, losses: Memory::default(), ..begun.clone() };
    last.run(3).unwrap();
    assert_eq!(Folder::new(&last.folder).steps().unwrap(), [15, 20]);
    for (step, attempt, ranks, run) in [(12, 0, 2, &killed), (12, 1, 3, &last), (16, 0, 3, &last)] {
        let again = StepReplay::of(&last.folder, step).attempt(attempt).run(cpu, |comm| last.train(&comm, None));
        let again = again.unwrap();
        assert_eq!((again.from, again.ranks.len()), ((step == 16).then_some(15), ranks), "{step}, {attempt}");
        assert_eq!(again.ranks[0].loss.unwrap().to_bits(), run.loss(step).to_bits(), "{step}, {attempt}");
    }
    // Three ranks have saved step 10, which two ranks had passed without a checkpoint.
    let begun = Trained { folder: scratch.0.join("kept"), ..begun };
    begun.run(2).unwrap();
    let killed = Trained { until: 12, every: 50, losses: Memory::default(), ..begun.clone() };
    killed.run(2).unwrap();
    let last = Trained { until: 19, every: 10, losses: Memory::default(), ..begun };
    last.run(3).unwrap();
    assert_eq!(Folder::new(&last.folder).steps().unwrap(), [5, 10]);
    let again = StepReplay::of(&last.folder, 12).attempt(0).run(cpu, |comm| last.train(&comm, None)).unwrap();
    assert_eq!((again.from, again.ranks.len()), (Some(5), 2));
    assert_eq!(again.ranks[0].loss.unwrap().to_bits(), killed.loss(12).to_bits());
}

/// A checkpoint that was copied without its log, whose place is in another one.
#[test]
fn a_run_that_went_on_from_a_copy_is_taken_again() {
    let scratch = Scratch::new("replays-copied");
    let first = Trained { until: 9, ..Trained::new(&scratch, BUILDS[0].1) };
    first.run(2).unwrap();
    let copy = Trained { folder: scratch.0.join("copy"), until: 19, losses: Memory::default(), ..first.clone() };
    let [from, to] = [&first, &copy].map(|run| Folder::new(&run.folder).step(5));
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    copy.run(2).unwrap();
    for (step, from) in [(8, 5), (14, 10), (19, 15)] {
        // The last two checkpoints are kept.
        let again = copy.replay(step);
        if from == 5 {
            assert!(again.unwrap_err().to_string().contains("of step 5, from which ranks went on, is gone"));
            continue;
        }
        let again = again.unwrap();
        assert_eq!((again.from, again.ranks[0].loss.map(f64::to_bits)), (Some(from), Some(copy.loss(step).to_bits())));
    }
}

/// The log is in the folder of the first callback that saves, and the run goes on from that of the second.
#[test]
fn a_run_with_two_folders_is_taken_again() {
    let scratch = Scratch::new("replays-folders");
    let train = |comm: Comm<Cpu>, until: u64, losses: &Memory| {
        let model = Mlp::new(comm.runtime(), 0.3)?;
        let saves = |name: &str, every: u64| Checkpoints::in_folder(scratch.0.join(name)).every(Interval::Steps(every));
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(until))
            .record_every(Interval::Steps(1))
            .with(saves("archive", 50).skip_end())
            .with(saves("latest", 3).keep(1).skip_end())
            .sink(losses.clone())
            .resume(Resume::IfThere)
            .run(loss)
            .map(drop)
    };
    let losses = Memory::default();
    for until in [7, 14] {
        Ranks::new(2).run(cpu, |comm| train(comm, until, &losses)).unwrap();
    }
    let quiet = Memory::default();
    let again = StepReplay::of(scratch.0.join("archive"), 8).run(cpu, |comm| train(comm, 14, &quiet)).unwrap();
    let loss = losses.of("loss").into_iter().rev().find(|(step, _)| *step == 8).unwrap().1;
    assert_eq!((again.from, again.ranks[0].loss.map(f64::to_bits)), (None, Some(loss.to_bits())));
}
