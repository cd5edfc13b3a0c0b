//! Engines that do not promise equal sums on all ranks: what is decided by a sum is decided once.

use std::panic::Location;

use distributed::comm::{Call, memory};

use crate::prelude::*;

/// Sums of what has no name (losses, weights, norms) come out larger on every rank but the first.
#[derive(Debug)]
struct Unequal(Comm<Cpu>);

impl Communicator<Cpu> for Unequal {
    fn group(&self) -> &Group {
        self.0.group()
    }
    fn runtime(&self) -> &Cpu {
        self.0.runtime()
    }
    fn timeout(&self) -> Duration {
        self.0.timeout()
    }
    fn guarantees(&self) -> Guarantees {
        Guarantees { equal_on_all_ranks: false, ..self.0.guarantees() }
    }
    fn next_number(&self) -> u64 {
        self.0.next_number()
    }
    fn start(&self, call: Call<Cpu>) -> Result<Work<Option<TensorMut<Cpu>>>> {
        let enlarged = self.rank() > 0 && call.of().is_none() && matches!(call.what(), Collective::AllReduce(_));
        let work = self.0.start(call)?;
        Ok(work.map(move |sum| match sum {
            Some(sum) if enlarged => memory(&sum.freeze()?.mul(1.25)?).map(Some),
            sum => Ok(sum),
        }))
    }
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<Cpu>>> {
        Ok(self.0.split_at(color, key, at)?.map(|inner| Arc::new(Unequal(inner)) as Comm<Cpu>))
    }
    fn poll(&self) -> Result<()> {
        self.0.poll()
    }
    fn abort_for(&self, world_rank: usize, cause: &str) {
        self.0.abort_for(world_rank, cause);
    }
}

#[test]
fn every_rank_takes_the_step_that_rank_0_decides_on() {
    let trained = Ranks::new(3).run(cpu, |comm| {
        let comm: Comm<Cpu> = Arc::new(Unequal(comm));
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
