//! Models with buffers: every rank begins with those of rank 0, trains with them, and finds them in checkpoints.

use distributed::pipeline::split;

use crate::{
    pipeline_common::{TIMEOUT, checked},
    prelude::*,
};

/// Values of all buffers in `f64`: means, variances, and how many batches there were.
pub fn buffers(model: &(impl Module<Cpu> + ?Sized)) -> Result<Vec<f64>> {
    let value = |(_, buffer): (String, nn::Buffer<Cpu>)| buffer.value().to_dtype(DType::F64)?.to_vec::<f64>();
    Ok(model.named_buffers().into_iter().map(value).collect::<Result<Vec<_>>>()?.concat())
}

/// A model with statistics of its batches, which begin a little higher on each rank.
pub fn model(rt: &Cpu, rank: usize) -> Result<Sequential<Cpu>> {
    let init = Init::new(rt, rank as u64).dtype(DType::F64);
    let norm = BatchNorm::new(&init, 7)?;
    for statistics in [&norm.running_mean, &norm.running_var] {
        statistics.set(statistics.value().add(0.5 + rank as f64)?)?;
    }
    Ok(Sequential::new().push(Linear::new(&init, 5, 7)?).push(norm).push(Tanh).push(Linear::new(&init, 7, 3)?))
}

/// Those of rank 0 before it trains.
fn first() -> Vec<f64> {
    [vec![0.5; 7], vec![1.5; 7], vec![0.0]].concat()
}

pub fn batch(rt: &Cpu, step: usize) -> Result<[Tensor<Cpu>; 2]> {
    let all = |width, seed| Tensor::normal(rt, [EXAMPLES - 1, width], DType::F64, 1.0, 2.0, seed + step as u64);
    Ok([all(5, 10)?, all(3, 50)?])
}

pub fn squares(outputs: &[Var<Cpu>], targets: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
    Loss::sum(mse(&outputs[0], &targets[0], Reduction::Sum)?, targets[0].dims()[0] as f64)
}

/// The loss of `count` examples from `start`.
pub fn loss(model: &Sequential<Cpu>, rt: &Cpu, step: usize, start: usize, count: usize) -> Result<Loss<Cpu>> {
    let [x, y] = batch(rt, step)?;
    let part = |t: Tensor<Cpu>| t.narrow(0, start, count).map(Var::new);
    squares(&[model.forward(&part(x)?)?], &[part(y)?])
}

/// One rank with every batch in `parts`.
fn alone(parts: usize) -> (Trace, Vec<f64>) {
    let rt = Cpu::with_threads(1);
    let model = model(&rt, 0).unwrap();
    let mut trainer = simple(&rt, &model, TrainingConfig { accumulation: parts, ..config() }).unwrap();
    let (mut trace, count) = (Trace::default(), (EXAMPLES - 1) / parts);
    for step in 0..STEPS {
        let metrics = trainer.step(|k| loss(&model, &rt, step, k * count, count)).unwrap();
        trace.losses.push(metrics.loss().unwrap());
        trace.norms.extend(metrics.grad_norm().unwrap());
    }
    trace.weights = vec![weights(&model).unwrap(), buffers(&model).unwrap()];
    (trace, buffers(&model).unwrap())
}

#[test]
fn ranks_begin_with_those_of_rank_0_and_train_as_one() {
    let (one, _) = alone(1);
    for how in STAGES {
        // Statistics are those of a rank's own batch: here every rank has all of it.
        let many = everywhere(3, |comm| {
            let model = model(comm.runtime(), comm.rank())?;
            let mut trainer = Any::over(&comm, &model, how, config())?;
            assert_eq!(buffers(&model)?, first(), "{how:?}");
            let mut trace = Trace::default();
            for step in 0..STEPS {
                let metrics = trainer.step_with(|_| loss(&model, comm.runtime(), step, 0, EXAMPLES - 1))?;
                trace.losses.push(metrics.loss()?);
                trace.norms.extend(metrics.grad_norm()?);
            }
            let _scope = trainer.full()?;
            trace.weights = vec![weights(&model)?, buffers(&model)?];
            Ok(trace)
        });
        let off = difference(&many, &one);
        assert!(off <= 1e-11, "{how:?}: {off:e}");
    }
}

#[test]
fn a_checkpoint_has_those_of_rank_0() {
    for how in STAGES {
        let scratch = Scratch::new(&format!("buffers-{how:?}").replace(['(', ')'], "-"));
        let folder = scratch.folder();
        let trained = Ranks::new(3).run(cpu, |comm| {
            let model = model(comm.runtime(), comm.rank())?;
            let mut trainer = Any::over(&comm, &model, how, config())?;
            let start = own(&comm)[0].min(EXAMPLES - 5);
            trainer.step_with(|_| loss(&model, comm.runtime(), 0, start, 4))?;
            trainer.save(&folder)?;
            buffers(&model)
        });
        let trained = trained.unwrap();
        assert!(trained[0] != trained[1] && trained[0][14] == 1.0, "ranks saw other examples");
        let loaded = Ranks::new(2).run(cpu, |comm| {
            let model = model(comm.runtime(), 5 + comm.rank())?;
            let mut trainer = Any::over(&comm, &model, how, config())?;
            assert!(buffers(&model)? != trained[0]);
            assert!(trainer.load(&folder)?.is_some());
            buffers(&model)
        });
        assert!(loaded.unwrap().iter().all(|loaded| *loaded == trained[0]), "{how:?}");
    }
}

/// Trains a staged model whose replicas all see the whole batch, and saves it; losses, norms, and the buffers here.
fn staged(
    comm: &Comm<Cpu>,
    mut trainer: TrainStep<Cpu>,
    folder: &distributed::checkpoint::Folder,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let here = |trainer: &TrainStep<Cpu>| {
        trainer.pipeline().expect("stages").stages().values().map(|s| buffers(&**s)).collect()
    };
    let before: Vec<Vec<f64>> = Result::from_iter::<Vec<_>>(here(&trainer))?;
    assert!(before.concat().is_empty() || before.concat() == first());
    let mut told = Vec::new();
    for step in 0..STEPS {
        let [x, y] = batch(comm.runtime(), step)?;
        let metrics = trainer.step(|_| MicroBatches::split(from_ref(&x), from_ref(&y), 4))?;
        told.extend([Some(metrics.loss()?), metrics.grad_norm()?].into_iter().flatten());
    }
    trainer.save(folder, &CheckpointNotes::new())?;
    let after: Vec<Vec<f64>> = Result::from_iter::<Vec<_>>(here(&trainer))?;
    Ok((told, after.concat()))
}

#[test]
fn a_stage_of_a_pipeline_has_its_own() {
    let (one, of_one) = alone(4);
    let told: Vec<f64> = one.losses.iter().zip(&one.norms).flat_map(|(l, n)| [*l, *n]).collect();
    for (stage, kind) in [(ZeroStage::None, ScheduleKind::OneFOneB), (ZeroStage::Parameters, ScheduleKind::ZbH1)] {
        let (checked, scratch) = (checked(kind, 2, 1, 4).unwrap(), Scratch::new("buffers-staged"));
        let folder = scratch.folder();
        let ranks = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
            let layers = model(comm.runtime(), comm.rank() / 2)?.into_layers();
            let model = PipelineModel::on(comm.rank(), checked.clone(), split(layers, &[2])?).loss(squares);
            staged(&comm, sharded_pipeline(&comm, model, config(), stage.into())?, &folder)
        });
        for (rank, (got, here)) in ranks.unwrap().into_iter().enumerate() {
            let want: &[f64] = if rank % 2 == 0 { &of_one } else { &[] };
            let near =
                |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-11);
            assert!(
                near(&got, &told) && near(&here, want),
                "{stage:?}, rank {rank}: {got:?} {told:?} {here:?} {want:?}"
            );
        }
        // The whole model finds them again.
        let loaded = Ranks::new(1).run(cpu, |comm| {
            let model = model(comm.runtime(), 5)?;
            assert!(Any::over(&comm, &model, STAGES[0], config())?.load(&folder)?.is_some());
            buffers(&model)
        });
        let off = loaded.unwrap()[0].iter().zip(&of_one).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
        assert!(off <= 1e-11, "{stage:?}: {off:e}");
    }
}
