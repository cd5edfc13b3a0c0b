//! Newcomers that are set up otherwise than the run that takes them in: they leave, and the run goes on without them.

use crate::{
    prelude::*,
    worlds::{Newcomer, joined},
};

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
        let befalls = |world: &ElasticWorld<Cpu>, done: u64, newcomer: &Newcomer| {
            if (world.generation(), done) == (0, 2) {
                newcomer.come();
            }
            // One is lost after the newcomer has left: what there is then is what these ranks agreed on.
            match (world.generation(), world.comm()?.rank(), done) {
                (2, 0, 4) => Err(Error::argument("the machine", "is gone")),
                _ => Ok(()),
            }
        };
        let mut outcomes = joined(
            ranks,
            |_| Vec::new(),
            |world, newcomer| train(world, 6, |world, done| befalls(world, done, newcomer)),
            |own| own.copies(2).run(|world| train(world, 6, |_, _| Ok(()))),
        );
        let told = outcomes.pop().unwrap().unwrap_err().to_string();
        assert!(told.contains("`Elastic::copies`"), "{ranks} ranks: {told}");
        let done: Vec<_> = outcomes.iter().flatten().collect();
        assert_eq!(done, vec![&(3, ranks - 1); ranks - 1], "{ranks} ranks: {outcomes:?}");
    }
}

#[test]
fn an_own_error_after_the_ranks_have_agreed_to_meet_again_is_the_ranks_own() {
    let first = |world: &mut ElasticWorld<Cpu>, newcomer: &Newcomer| {
        let done = train(world, 6, |world, done| {
            if (world.generation(), done) == (0, 2) {
                newcomer.come();
            }
            Ok(())
        });
        match world.is_changing() && world.comm()?.rank() == 1 {
            true => Err(Error::argument("the disk", "is full")),
            false => done,
        }
    };
    let last = |own: Elastic<Cpu>| own.run(|world| train(world, 6, |_, _| Ok(())));
    let outcomes = joined(3, |_| Vec::new(), first, last);
    let told = outcomes[1].as_ref().unwrap_err().to_string();
    assert!(told.contains("is full"), "{told}");
    // The two that are left, and the newcomer.
    assert!([0, 2, 3].into_iter().all(|k| matches!(outcomes[k], Ok((1, 3)))), "{outcomes:?}");
}
