//! The worker thread of a rank: runs its shares of rounds on a queue of its own.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use numcore::{Result, Runtime, TensorMut, ops::Input};

use super::super::{combine::Combiner, failure::panic_message};
use super::{
    round::{Finished, RoundKey, RoundStep, WorkerShare},
    world::World,
};
use crate::sync::mpsc::Receiver;

/// A share of a round, and the round that its results go to.
pub(super) struct WorkerTask<R: Runtime> {
    pub(super) world: Arc<World<R>>,
    pub(super) group: usize,
    pub(super) key: RoundKey,
    pub(super) rank: usize,
    pub(super) share: WorkerShare<R>,
}

/// Runs tasks until all senders are gone.
pub(super) fn work<R: Runtime>(rt: R, tasks: &Receiver<WorkerTask<R>>) {
    let mut combiner = Combiner::new(rt);
    for WorkerTask { world, group, key, rank, share } in tasks {
        let done = catch_unwind(AssertUnwindSafe(|| run(&mut combiner, share)));
        let done = match done {
            Ok(done) => done.map_err(|e| e.to_string()),
            Err(panic) => Err(panic_message(&*panic)),
        };
        world.finish(group, key, rank, done);
    }
}

fn run<R: Runtime>(combiner: &mut Combiner<R>, mut share: WorkerShare<R>) -> Result<Finished<R>> {
    share.after.iter().try_for_each(|event| combiner.runtime().wait(event))?;
    let mut outs: Vec<&mut TensorMut<R>> = share.outs.iter_mut().map(|piece| &mut piece.memory).collect();
    let ins: Vec<Input<'_, R>> = share.ins.iter().map(Input::Value).collect();
    match share.step {
        RoundStep::ReduceAll(op) => {
            let own: Vec<Input<'_, R>> = (0..outs.len()).map(Input::Own).collect();
            combiner.reduce(op, &own, &mut outs)?;
        }
        RoundStep::ReduceInto(op, k) => {
            let (mut into, others) = split_out(outs, k);
            let mut ins: Vec<Input<'_, R>> = others.iter().map(|t| Input::Memory(t)).collect();
            ins.insert(k, Input::Own(0));
            combiner.reduce(op, &ins, &mut into)?;
        }
        RoundStep::ReduceInputs(op) => combiner.reduce(op, &ins, &mut outs)?,
        RoundStep::Spread(k) => {
            let (from, mut others) = split_out(outs, k);
            from.iter().try_for_each(|from| combiner.copy(Input::Memory(from), &mut others))?;
        }
        RoundStep::Copy if ins.len() == 1 => combiner.copy(ins[0], &mut outs)?,
        RoundStep::Copy => ins.iter().zip(&mut outs).try_for_each(|(from, to)| combiner.copy(*from, &mut [to]))?,
    }
    Ok(Finished { event: combiner.runtime().record()?, outs: share.outs })
}

/// Separates output `k` from the others.
fn split_out<R: Runtime>(
    mut outs: Vec<&mut TensorMut<R>>,
    k: usize,
) -> (Vec<&mut TensorMut<R>>, Vec<&mut TensorMut<R>>) {
    let own = outs.remove(k);
    (vec![own], outs)
}
