//! Newcomers whose trainers are set up otherwise than those of the run that takes them in: they leave, and the run goes on without them.

use crate::{
    common::*,
    prelude::*,
    worlds::{Newcomer, joined},
};

/// Lets the newcomer come at step 2 of the first world.
struct Ask<'s>(Option<&'s Newcomer>);

impl<M, B> Callback<Cpu, M, B> for Ask<'_> {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        if let (Some(newcomer), Event::StepEnd(_), 2) = (self.0, event, run.progress().step) {
            newcomer.come();
        }
        Ok(())
    }
}

/// Trains to the end: the last world, its ranks, and the steps that were taken.
fn train(world: &mut ElasticWorld<Cpu>, every: Interval, newcomer: Option<&Newcomer>) -> Result<(u64, usize, u64)> {
    autograd::manual_seed(7);
    let comm = world.comm()?;
    let model = Mlp::new(comm.runtime(), 0.3)?;
    let is_first = world.generation() == 0;
    let report = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()).workers(0))
        .until(Length::Steps(6))
        .with(Ask(newcomer.filter(|_| is_first)))
        .elastic(world, every)
        .run(loss)?;
    Ok((world.generation(), comm.size(), report.progress.step))
}

#[test]
fn a_newcomer_with_another_interval_leaves() {
    for ranks in [2, 3] {
        let mut outcomes = joined(
            ranks,
            |_| Vec::new(),
            |world, newcomer| train(world, Interval::Steps(1), Some(newcomer)),
            |own| own.run(|world| train(world, Interval::Steps(2), None)),
        );
        let told = outcomes.pop().unwrap().unwrap_err().to_string();
        assert!(told.contains("the configuration of the trainer"), "{ranks} ranks: {told}");
        let done: Vec<_> = outcomes.iter().flatten().collect();
        assert_eq!(done, vec![&(2, ranks, 6); ranks], "{ranks} ranks: {outcomes:?}");
    }
}
