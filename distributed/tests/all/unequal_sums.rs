//! Engines that do not promise equal sums on all ranks: what is decided by a sum is decided once.

use distributed::comm::memory;

use crate::{between::Between, prelude::*};

/// An engine whose sums of what has no name (losses, weights, norms) come out larger on every rank but the first.
fn unequal(comm: Comm<Cpu>) -> Comm<Cpu> {
    let mut own = Between::new(comm, |inner, call| {
        let enlarged = inner.rank() > 0 && call.of().is_none() && matches!(call.what(), Collective::AllReduce(_));
        Ok(inner.start(call)?.map(move |sum| match sum {
            Some(sum) if enlarged => memory(&sum.freeze()?.mul(1.25)?).map(Some),
            sum => Ok(sum),
        }))
    });
    own.guarantees.equal_on_all_ranks = false;
    Arc::new(own)
}

#[test]
fn every_rank_takes_the_step_that_rank_0_decides_on() {
    let trained = Ranks::new(3).run(cpu, |comm| {
        let comm = unequal(comm);
        let model = Mlp::new(&Init::new(comm.runtime(), 1))?;
        let mut step = TrainStep::builder(&comm, &model)
            .optimizer(AdamWConfig::default())
            .max_norm(0.1)
            .loss_scaling(LossScaler::default())
            .build()?;
        for k in 0..3 {
            step.step(|_| model.loss(comm.runtime(), k, &[comm.rank(), 3 + comm.rank()]))?;
        }
        model.a.weight.value()?.to_vec::<f32>()
    });
    let trained = trained.unwrap();
    assert!(trained.iter().all(|weights| *weights == trained[0]));
}
