//! Buffers that are made equal after each step: whose they are, and that evaluation is the same on all ranks.

use distributed::{pipeline::split, train::BufferSync};

use crate::{
    buffers::{batch, buffers, loss, model, squares},
    pipeline_common::{TIMEOUT, checked},
    prelude::*,
};

const ROWS: usize = EXAMPLES - 1;

/// Buffers after each step, and what a model in evaluation says in the end.
type Seen = (Vec<Vec<f64>>, Vec<f64>);

/// Trains `n` ranks, each on its own rows of a batch. The second step is left out for its loss, which is not finite.
fn trained(n: usize, how: ZeroStage, sync: BufferSync) -> Vec<Seen> {
    let config = TrainingConfig { buffers: sync, skip_non_finite: true, ..config() };
    let program = |comm: Comm<Cpu>| {
        let model = model(comm.runtime(), comm.rank())?;
        let mut trainer = Any::over(&comm, &model, how, config.clone())?;
        let (mut after, rows) = (Vec::new(), ROWS / comm.size());
        for step in 0..STEPS {
            let metrics = trainer.step_with(|_| {
                let loss = loss(&model, comm.runtime(), step, comm.rank() * rows, rows)?;
                if step == 1 { Loss::sum(loss.total().mul(f64::NAN)?, loss.weight()) } else { Ok(loss) }
            })?;
            assert_eq!(metrics.stepped(), step != 1);
            after.push(buffers(&model)?);
        }
        let _scope = trainer.full()?;
        model.eval();
        let x = Var::new(batch(comm.runtime(), 99)?[0].clone());
        let said = no_grad(|| model.forward(&x))?.value()?.to_vec::<f64>()?;
        Ok((after, said))
    };
    Ranks::new(n).timeout(TIMEOUT).run(cpu, program).unwrap()
}

#[test]
fn what_ranks_have_after_a_step_is_what_was_asked_for() {
    for n in [2, 3, 4] {
        for how in STAGES {
            let own = trained(n, how, BufferSync::Own);
            assert!(own[0].0[0] != own[1].0[0] && own[0].1 != own[1].1, "ranks saw other examples");
            for sync in [BufferSync::Broadcast, BufferSync::Average] {
                let seen = trained(n, how, sync);
                assert!(seen.iter().all(|of| *of == seen[0]), "{how:?}, {sync:?} on {n} ranks: ranks differ");
                // The first step is the same in each; gradients do not depend on running statistics.
                let first: Vec<&Vec<f64>> = own.iter().map(|of| &of.0[0]).collect();
                let due: Vec<f64> = match sync {
                    BufferSync::Broadcast => first[0].clone(),
                    _ => (0..first[0].len()).map(|k| first.iter().map(|of| of[k]).sum::<f64>() / n as f64).collect(),
                };
                let off = seen[0].0[0].iter().zip(&due).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
                assert!(off <= 1e-12, "{how:?}, {sync:?} on {n} ranks: {off:e}");
            }
            // Rank 0's are moved by rank 0's examples alone, in every step: as if it kept its own.
            let broadcast = trained(n, how, BufferSync::Broadcast);
            assert!(broadcast[0].0 == own[0].0, "{how:?} on {n} ranks");
        }
    }
}

#[test]
fn an_average_of_means_is_the_mean_of_all_examples() {
    // Of the first layer's inputs, which do not depend on weights: equal parts on each rank.
    let run = |n: usize| {
        let config = TrainingConfig { buffers: BufferSync::Average, ..config() };
        let program = |comm: Comm<Cpu>| {
            let model = BatchNorm::new(&Init::new(comm.runtime(), 0).dtype(DType::F64), 5)?;
            let mut trainer = Any::over(&comm, &model, STAGES[0], config.clone())?;
            let rows = ROWS / comm.size();
            for step in 0..STEPS {
                let x = batch(comm.runtime(), step)?[0].narrow(0, comm.rank() * rows, rows)?;
                trainer.step_with(|_| {
                    let x = Var::new(x.clone());
                    squares(from_ref(&model.forward(&x)?), from_ref(&x))
                })?;
            }
            model.running_mean.value().to_vec::<f64>()
        };
        Ranks::new(n).timeout(TIMEOUT).run(cpu, program).unwrap().swap_remove(0)
    };
    let one = run(1);
    for n in [2, 3, 4] {
        let off = run(n).iter().zip(&one).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
        assert!(off <= 1e-12, "{n} ranks: {off:e}");
    }
}

#[test]
fn buffers_of_a_dtype_travel_together_and_only_on_request() {
    for (sync, sums, broadcasts) in
        [(BufferSync::Own, 0, 0), (BufferSync::Broadcast, 0, 2), (BufferSync::Average, 1, 1)]
    {
        let program = |comm: Comm<Cpu>| {
            let counting = std::sync::Arc::new(CountingCommunicator::new(comm));
            let comm: Comm<Cpu> = counting.clone();
            let model = model(comm.runtime(), 0)?;
            let mut of = [(0, 0), (0, 0)];
            for (seen, sync) in of.iter_mut().zip([BufferSync::Own, sync]) {
                let mut trainer = Any::over(&comm, &model, STAGES[0], TrainingConfig { buffers: sync, ..config() })?;
                counting.reset();
                trainer.step_with(|_| loss(&model, comm.runtime(), 0, 0, 4))?;
                *seen = (counting.of("all_reduce").calls, counting.of("broadcast").calls);
            }
            Ok((of[1].0 - of[0].0, of[1].1 - of[0].1))
        };
        // Floating statistics, and a count.
        assert_eq!(Ranks::new(2).run(cpu, program).unwrap(), [(sums, broadcasts); 2], "{sync:?}");
    }
}

#[test]
fn replicas_of_a_stage_have_equal_buffers_on_request() {
    // The statistics are of the second of two stages, where a rank has two.
    for (kind, stages, cuts) in [(ScheduleKind::OneFOneB, 1, vec![3]), (ScheduleKind::Interleaved, 2, vec![1, 2, 3])] {
        let checked = checked(kind, 2, stages, 2).unwrap();
        for sync in [BufferSync::Own, BufferSync::Broadcast, BufferSync::Average] {
            let program = |comm: Comm<Cpu>| {
                let first = Linear::new(&Init::new(comm.runtime(), 1).dtype(DType::F64), 5, 5)?;
                let first = Sequential::new().push(first).into_layers();
                let layers = first.into_iter().chain(model(comm.runtime(), 0)?.into_layers());
                let stages = split(layers.collect::<Vec<_>>(), &cuts)?;
                let model = PipelineModel::on(comm.rank() % 2, checked.clone(), stages).loss(squares);
                let config = TrainingConfig { buffers: sync, ..config() };
                let mut trainer = pipelined(&comm, model, config)?;
                for step in 0..STEPS {
                    let [x, y] = batch(comm.runtime(), 2 * step + comm.rank() / 2)?;
                    trainer.step(|_| MicroBatches::split(from_ref(&x), from_ref(&y), 2))?;
                }
                let stages = trainer.pipeline().expect("stages").stages();
                stages.values().map(|stage| buffers(&**stage)).collect::<Result<Vec<_>>>()
            };
            let seen = Ranks::new(4).timeout(TIMEOUT).run(cpu, program).unwrap();
            assert!(!seen[0].concat().is_empty());
            assert_eq!(seen[0] == seen[2], sync != BufferSync::Own, "{kind}, {sync:?}");
        }
    }
}
