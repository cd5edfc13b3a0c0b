//! A rank that is lost while a checkpoint is saved: those that are left save what was to be saved, where it was to be saved.

use crate::{common::*, prelude::*, worlds::elastic};

/// Asks all callbacks to save, at step 2.
struct SaveAll;

impl<M, B> Callback<Cpu, M, B> for SaveAll {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> numcore::Result<()> {
        if matches!(event, Event::StepEnd(_)) && run.progress().step == 2 {
            run.control().save();
        }
        Ok(())
    }
}

#[test]
fn an_owed_save_goes_where_it_was_due() {
    for all in [false, true] {
        let scratch = Scratch::new("elastic-saves");
        let [often, seldom] = ["often", "seldom"].map(|name| Folder::new(scratch.0.join(name)));
        let outcomes = elastic(3, 1, |world| {
            let comm = world.comm()?;
            let is_lost = (world.generation(), comm.rank()) == (0, 1);
            let watched = often.clone().watched(move |change| match change {
                "write a rank's file" if is_lost => Err(Error::argument("the disk", "is gone")),
                _ => Ok(()),
            });
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()).workers(0))
                .until(Length::Steps(4))
                .with(Checkpoints::at(watched).every(Interval::Steps(2)).blocking().ignore_signals())
                .with(Checkpoints::at(seldom.clone()).every(Interval::Steps(3)).blocking().ignore_signals())
                .elastic(world, Interval::Steps(100));
            if all {
                trainer = trainer.with(SaveAll);
            }
            let report = trainer.run(loss)?;
            Ok((comm.size(), report.resumed))
        });
        let done: Vec<_> = outcomes.into_iter().flatten().collect();
        assert_eq!(done, [(2, Some(2)); 2]);
        assert_eq!(often.steps().unwrap(), [2, 4]);
        assert_eq!(seldom.steps().unwrap(), if all { vec![2, 3, 4] } else { vec![3, 4] });
    }
}

#[test]
fn the_last_rank_saves_the_state_before_the_step_that_failed() {
    let scratch = Scratch::new("elastic-last");
    let folder = Folder::new(scratch.0.join("checkpoints"));
    let outcomes = elastic(2, 1, |world| {
        let comm = world.comm()?;
        let (size, rank) = (comm.size(), comm.rank());
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let step = AtomicU64::new(0);
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()).workers(0))
            .until(Length::Steps(8))
            .with(Checkpoints::at(folder.clone()).every(Interval::Steps(100)).ignore_signals())
            .elastic(world, Interval::Steps(100));
        trainer.run(|model, batch| match (step.fetch_add(1, Ordering::SeqCst), size, rank) {
            (2, 2, 1) | (5, 1, _) => Err(Error::argument("the machine", "is gone")),
            _ => loss(model, batch),
        })
    });
    assert!(outcomes.iter().all(Result::is_err));
    assert_eq!(folder.steps().unwrap(), [5]);
}
