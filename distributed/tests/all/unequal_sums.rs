//! Engines that do not promise equal sums on all ranks: what is decided by a sum is decided once.

use distributed::comm::memory;

use crate::{between::Between, prelude::*};

/// An engine whose sums of what has no name (losses, weights, norms) come out multiplied on every rank but the first.
fn unequal(comm: Comm<Cpu>, factor: f64) -> Comm<Cpu> {
    let mut own = Between::new(comm, move |inner, call| {
        let differs = inner.rank() > 0 && call.of().is_none() && matches!(call.what(), Collective::AllReduce(_));
        Ok(inner.start(call)?.map(move |sum| match sum {
            Some(sum) if differs => memory(&sum.freeze()?.mul(factor)?).map(Some),
            sum => Ok(sum),
        }))
    });
    own.guarantees.equal_on_all_ranks = false;
    Arc::new(own)
}

/// Losses, total weights and decisions of three steps, and the weights after them.
fn told(inner: Comm<Cpu>, factor: f64, stage: ZeroStage, max_norm: Option<f64>) -> Result<(Vec<[f64; 3]>, Vec<f64>)> {
    let comm = unequal(inner, factor);
    let model = Mlp::new(&Init::new(comm.runtime(), 1))?;
    let config = TrainingConfig { max_norm, loss_scaling: Some(LossScaler::default()), ..Default::default() };
    let mut trainer = Any::new(&comm, &model, stage, config)?;
    let mut steps = Vec::new();
    for k in 0..3 {
        let step = trainer.step_with(|_| model.loss(comm.runtime(), k, &[comm.rank(), 3 + comm.rank()]))?;
        steps.push([step.loss()?, step.weight()?, f64::from(step.stepped())]);
    }
    Ok((steps, trainer.weights(&model)?))
}

#[test]
fn every_rank_takes_the_step_that_rank_0_decides_on() {
    for stage in [ZeroStage::None, ZeroStage::Optimizer] {
        for (factor, max_norm) in [(1.25, Some(0.1)), (1.25, None), (f64::NAN, Some(0.1))] {
            let ranks = Ranks::new(3).run(cpu, |comm| told(comm, factor, stage, max_norm)).unwrap();
            let what = format!("{stage:?}, sums times {factor}, norms up to {max_norm:?}");
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{what}: {ranks:?}");
            assert!(
                ranks[0].0.iter().all(|[loss, _, stepped]| loss.is_finite() && *stepped == 1.0),
                "{what}: {ranks:?}"
            );
        }
    }
}
