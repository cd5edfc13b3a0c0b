//! The three doors: a loop of one's own, functions, and a head. One text for one rank and for many.

use train::compat::{DistributedTrainConfig, TrainConfig};

use crate::{common::*, prelude::*};

const CONFIG: TrainingConfig = TrainingConfig {
    accumulation: 1,
    max_norm: Some(0.5),
    loss_scaling: None,
    skip_non_finite: false,
    buffers: distributed::train::BufferSync::Own,
    hyper_parameters: distributed::train::HyperParameters::Configured,
};

/// Weights after two epochs in the loop.
fn looped(ranks: usize) -> Vec<f64> {
    on_ranks(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Epochs(2.0)).run(loss)?;
        weights(&model)
    })
    .unwrap()
}

/// A model around another.
#[derive(Module)]
#[module(crate = "::nn")]
struct Head<R: Runtime> {
    body: Mlp<R>,
}

#[test]
fn a_loop_of_ones_own_is_the_loop() {
    for ranks in WORLDS {
        let own = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            model.eval();
            let distributed = Some(DistributedTrainConfig { world_size: ranks, ..Default::default() });
            let config = TrainConfig { step: CONFIG, max_steps: Some(10), distributed, ..Default::default() };
            let mut trainer = Trainer::setup_with(comm, &model, adamw(), config)?;
            assert_eq!(trainer.is_rank_zero(), comm.rank() == 0);
            assert_eq!((trainer.devices().names().len(), trainer.devices().is_heterogeneous()), (ranks, false));
            assert_eq!(trainer.dist_config().map(|config| config.world_size), Some(ranks));
            for epoch in 0..2 {
                for batch in trainer.epoch(&loader(comm.runtime()), epoch)? {
                    assert!(!trainer.reached_max_steps());
                    trainer.step(&batch?, loss)?;
                }
            }
            assert!(trainer.reached_max_steps());
            assert_eq!(trainer.train_step().global_step(), 10);
            weights(&model)
        });
        assert_eq!(own.unwrap(), looped(ranks), "{ranks} ranks");
    }
}

#[test]
fn a_head_trains_what_it_owns() {
    let comm = one();
    let head = Head { body: Mlp::new(comm.runtime(), 0.0).unwrap() };
    let before = weights(&head.body).unwrap();
    let mut trainer = Trainer::head(&comm, &head, adamw()).unwrap();
    let batch = trainer.epoch(&loader(comm.runtime()), 0).unwrap().next().unwrap().unwrap();
    trainer.step(&batch, |head, batch| loss(&head.body, batch)).unwrap();
    assert_ne!(weights(&head.body).unwrap(), before);
    let x = autograd::Var::new(numcore::Tensor::zeros(comm.runtime(), [1, 3], numcore::DType::F64).unwrap());
    assert!(head.body.forward(&x).is_ok());
}

#[test]
fn functions_give_a_trained_model_on_any_number_of_ranks() {
    for ranks in [1, 2, 3] {
        let handle = Trainer::builder(|cpu: &Cpu| Mlp::new(cpu, 0.0), adamw, loss)
            .loader(|cpu: &Cpu| Ok(loader(cpu)))
            .config(TrainConfig { step: CONFIG, ..Default::default() })
            .trainer(|trainer| trainer.until(Length::Epochs(2.0)))
            .run(ranks, cpu)
            .unwrap();
        let trained = handle.join().unwrap();
        assert_eq!((trained.progress.step, &trained.reason), (10, &StopReason::Finished));
        let model = Mlp::new(&Cpu::with_threads(1), 0.0).unwrap();
        trained.load_into(&model).unwrap();
        assert_eq!(weights(&model).unwrap(), looped(ranks), "{ranks} ranks");
    }
}

#[test]
fn a_handle_can_stop_its_run() {
    for ranks in [1, 3] {
        let handle = Trainer::builder(|cpu: &Cpu| Mlp::new(cpu, 0.0), adamw, loss)
            .loader(|cpu: &Cpu| Ok(loader(cpu)))
            .trainer(|trainer| trainer.until(Length::Steps(u64::MAX)).record_every(Interval::Never))
            .run(ranks, cpu)
            .unwrap();
        assert!(!handle.is_finished());
        handle.stop();
        let trained = handle.join().unwrap();
        assert!(matches!(&trained.reason, StopReason::Requested(why) if why.contains("the handle of the run")));
    }
}

#[test]
fn a_function_that_fails_on_one_rank_is_told_by_the_handle() {
    let broken = |model: &Mlp<Cpu>, batch: &data::Batch<Rows>| -> Result<distributed::train::Loss<Cpu>> {
        if batch.step == 3 { Err(Error::other("no such token")) } else { loss(model, batch) }
    };
    for ranks in [1, 2] {
        let handle = Trainer::builder(|cpu: &Cpu| Mlp::new(cpu, 0.0), adamw, broken)
            .loader(|cpu: &Cpu| Ok(loader(cpu)))
            .run(ranks, cpu)
            .unwrap();
        let error = handle.join().unwrap_err().to_string();
        assert!(error.contains("no such token"), "{error}");
    }
}

#[test]
fn a_run_without_a_loader_is_an_error() {
    let handle = Trainer::builder(|cpu: &Cpu| Mlp::new(cpu, 0.0), adamw, loss).run(2, cpu).unwrap();
    let error = handle.join().unwrap_err().to_string();
    assert!(error.contains("a run needs batches"), "{error}");
}

#[test]
fn a_loop_of_ones_own_does_not_leave_out_accumulation_silently() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let config = TrainConfig { step: TrainingConfig { accumulation: 2, ..CONFIG }, ..Default::default() };
    let mut trainer = Trainer::setup_with(&comm, &model, adamw(), config).unwrap();
    let batch = trainer.epoch(&loader(comm.runtime()), 0).unwrap().next().unwrap().unwrap();
    let error = trainer.step(&batch, loss).unwrap_err().to_string();
    assert!(error.contains("`accumulation` is 2"), "{error}");
}

#[test]
fn the_devices_of_several_ranks_are_recorded_once() {
    for ranks in [1, 3] {
        let memory = Memory::default();
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(4));
            trainer.record_every(Interval::Steps(1)).sink(memory.clone()).run(loss).map(drop)
        })
        .unwrap();
        let records = memory.0.lock().unwrap();
        let with = records.iter().filter(|record| record.values.iter().any(|(name, _)| name == "devices"));
        assert_eq!(with.count(), usize::from(ranks > 1), "{ranks} ranks");
    }
}

#[test]
fn doors_are_send_and_sync() {
    fn is<T: Send + Sync>() {}
    is::<train::compat::TrainSetup<'_, Cpu, Mlp<Cpu>>>();
    is::<train::compat::TrainHandle>();
}
