//! Running statistics of normalisations: a step that came to nothing leaves none.

use nn::BatchNorm;

use crate::{common::*, prelude::*};

#[derive(Module)]
#[module(crate = "::nn")]
struct Normed<R: Runtime> {
    a: Linear<R>,
    norm: BatchNorm<R>,
    b: Linear<R>,
}

impl Normed<Cpu> {
    fn new(rt: &Cpu) -> Result<Self> {
        let init = Init::new(rt, 5).dtype(DType::F64);
        Ok(Normed { a: Linear::new(&init, 3, 4)?, norm: BatchNorm::new(&init, 4)?, b: Linear::new(&init, 4, 1)? })
    }

    fn loss(&self, batch: &Batch<Rows>, factor: f64) -> Result<Loss<Cpu>> {
        let x = Var::new(batch.data.narrow(1, 0, 3)?.mul(factor)?);
        let y = self.b.forward(&self.norm.forward(&self.a.forward(&x)?)?)?;
        Loss::sum(y.square()?.sum_all()?, batch.rows as f64)
    }

    /// Running mean, variance and count.
    fn statistics(&self) -> Vec<f64> {
        let norm = &self.norm;
        let all = [&norm.running_mean, &norm.running_var, &norm.num_batches_tracked];
        all.iter().flat_map(|buffer| buffer.value().to_f64s().unwrap()).collect()
    }
}

/// Statistics after six steps in one folder. The step after three, if told to, fails when the forward pass is done.
fn trained(folder: &Scratch, fails: bool) -> Result<Vec<f64>> {
    let comm = one();
    let model = Normed::new(comm.runtime())?;
    let step = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
    let mut calls = 0;
    Trainer::new(&model, step, loader(comm.runtime()))
        .until(Length::Steps(6))
        .with(Checkpoints::in_folder(&folder.0).every(Interval::Steps(2)).ignore_signals())
        .resume(Resume::IfThere)
        .run(|model: &Normed<Cpu>, batch| {
            calls += 1;
            let own = model.loss(batch, 1.0)?;
            if fails && calls == 4 { Err(Error::other("no such token")) } else { Ok(own) }
        })?;
    Ok(model.statistics())
}

#[test]
fn a_step_that_failed_after_its_forward_pass_is_saved_without_its_statistics() {
    let (whole, parts) = (Scratch::new("normed"), Scratch::new("normed-failed"));
    let expected = trained(&whole, false).unwrap();
    assert!(trained(&parts, true).unwrap_err().to_string().contains("no such token"));
    assert_eq!(trained(&parts, false).unwrap(), expected);
    assert_eq!(expected.last(), Some(&6.0));
}

#[test]
fn statistics_that_differ_between_ranks_are_told_where_they_are_compared() {
    let compared = |compares: EqualWeights| {
        on_ranks(2, |comm| {
            let model = Normed::new(comm.runtime())?;
            let step = TrainStep::builder(comm, &model).optimizer(adamw()).build()?;
            let trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(2));
            trainer.with(compares.clone()).run(|model, batch| model.loss(batch, 1.0)).map(drop)
        })
    };
    let parameters = EqualWeights::every(Interval::Steps(1));
    compared(parameters.clone()).unwrap();
    let error = compared(parameters.with_buffers()).unwrap_err().to_string();
    assert!(error.contains("after step 1 `norm.running_mean` differs between rank 1 and rank 0"), "{error}");
}

#[test]
fn an_update_that_is_left_out_leaves_no_statistics() {
    let comm = one();
    let model = Normed::new(comm.runtime()).unwrap();
    let step = TrainStep::builder(&comm, &model).optimizer(adamw()).skip_non_finite().build().unwrap();
    let trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(4));
    trainer.run(|model, batch| model.loss(batch, if batch.step == 2 { f64::INFINITY } else { 1.0 })).unwrap();
    let statistics = model.statistics();
    assert!(statistics.iter().all(|x| x.is_finite()), "{statistics:?}");
    assert_eq!(statistics.last(), Some(&4.0), "five batches, of which one was left out");
}

/// Weights and statistics after two epochs of 20 examples in batches of 6, of which the last has 2; with the statistics of all ranks, or each rank's own.
fn normed(ranks: usize, last: data::Last) -> Vec<f64> {
    let program = |comm: &distributed::comm::Comm<Cpu>| {
        let init = Init::new(comm.runtime(), 5).dtype(DType::F64);
        let norm = distributed::SyncBatchNorm::new(&init, 4, comm)?;
        let model = nn::Sequential::new().push(Linear::new(&init, 3, 4)?).push(norm).push(Linear::new(&init, 4, 1)?);
        let step =
            TrainStep::builder(comm, &model).optimizer(optim::SgdConfig { lr: 0.01, ..Default::default() }).build()?;
        let data = Loader::new(dataset(examples(20))).batch(6).last(last).workers(0).stack().on(comm.runtime());
        Trainer::new(&model, step, data).until(Length::Epochs(2.0)).run(|model: &nn::Sequential<Cpu>, batch| {
            let y = model.forward(&Var::new(batch.data.narrow(1, 0, 3)?.contiguous()?))?;
            Loss::sum(y.narrow(0, 0, batch.count.max(1))?.square()?.sum_all()?, batch.count as f64)
        })?;
        let state = model.state_dict()?;
        Ok(state.into_iter().map(|(_, value)| value.to_f64s()).collect::<Result<Vec<_>>>()?.concat())
    };
    on_ranks(ranks, program).unwrap()
}

#[test]
fn rows_that_only_fill_up_a_batch_are_no_part_of_statistics() {
    let one = normed(1, data::Last::Keep);
    for (ranks, last) in [(1, data::Last::Pad), (2, data::Last::Pad), (3, data::Last::Keep), (3, data::Last::Pad)] {
        let many = normed(ranks, last);
        let off = many.iter().zip(&one).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
        assert!(many.len() == one.len() && off < 1e-12, "{ranks} ranks, {last:?}: {off:e}");
    }
}
