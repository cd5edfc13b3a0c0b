//! Commits that no world goes on from: the ranks that hold their pieces save them.

use crate::{
    elastic::{Story, gone},
    prelude::*,
    worlds::rendezvous,
};

#[test]
fn what_is_held_of_the_last_commit_is_saved_where_too_few_are_left_or_nobody_takes_it_up() {
    for min_ranks in [3, 1] {
        held_is_saved(min_ranks);
    }
}

/// Loses one of three ranks. The others are too few, or their next world refuses the last commit.
fn held_is_saved(min_ranks: usize) {
    let how = ZeroStage::Gradients;
    let (scratch, quorum) = (
        Scratch::new("stranded-commit"),
        Quorum { min_ranks, join_timeout: Duration::from_millis(50), ..Quorum::default() },
    );
    let (story, (_rendezvous, seats)) = (Story::default(), rendezvous(3, quorum));
    let befalls = |world: &ElasticWorld<Cpu>, step: u64| match (world.comm()?.rank(), step) {
        (1, 3) => Err(gone()),
        _ => Ok(()),
    };
    let program = |world: &mut ElasticWorld<Cpu>| {
        world.save_orphaned_in(&scratch.folder());
        if world.generation() > 0 {
            let comm = world.comm()?;
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            world.restore_if(&mut trainer.0, |_| Err(Error::state("the notes", "do not fit")))?;
        }
        story.train(world, how, &befalls)
    };
    assert!(Elastic::on_threads(seats, |elastic| elastic, program).iter().all(Result::is_err));
    assert_eq!(scratch.folder().latest().unwrap(), Some(2), "at least {min_ranks} ranks");
    let weights = |seed: u64, load: bool| {
        let all = Ranks::new(3).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), seed).dtype(DType::F64))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            match load {
                true => assert!(trainer.load(&scratch.folder())?.is_some()),
                false => (0..2).try_for_each(|k| trainer.step(&model, &comm, k).map(drop))?,
            }
            trainer.weights(&model)
        });
        all.unwrap()
    };
    assert!(weights(5, true) == weights(0, false));
}
