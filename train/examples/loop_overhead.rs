//! What the loop adds to a step: the time of steps in the loop and without it, on one rank. `cargo run --release -p weftgrad-train --example loop_overhead`

use std::{sync::Arc, time::Instant};

use autograd::Var;
use data::{Array, Batch, Loader, Rows};
use distributed::{
    comm::{Comm, NoOpCommunicator},
    train::{Loss, TrainStep},
};
use nn::{Forward, Init, Linear};
use numcore::{
    Result, Tensor,
    ops::{PointwiseOps, ReduceOps},
};
use optim::SgdConfig;
use runtime_cpu::Cpu;
use train::{Checkpoints, EarlyStop, Interval, Length, Throughput, Trainer};

const STEPS: u64 = 20_000;

fn loss(model: &Linear<Cpu>, batch: &Batch<Tensor<Cpu>>) -> Result<Loss<Cpu>> {
    let sum = model.forward(&Var::new(batch.data.clone()))?.square()?.sum_all()?;
    Loss::sum(sum, batch.count as f64)
}

fn main() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&cpu));
    let loader = Loader::new(Rows::new(Array::new([64, 4], vec![0.5f32; 256])?)?).batch(8).workers(0).stack().on(&cpu);
    let make = || {
        let model = Linear::new(&Init::new(&cpu, 0), 4, 1)?;
        let step = TrainStep::builder(&comm, &model).optimizer(SgdConfig { lr: 1e-3, ..Default::default() }).build()?;
        Ok::<_, numcore::Error>((model, step))
    };
    let micros = |begun: Instant| begun.elapsed().as_secs_f64() * 1e6 / STEPS as f64;
    for _ in 0..3 {
        let (model, mut step) = make()?;
        let mut batches = loader.endless(data::State::default())?;
        let begun = Instant::now();
        for _ in 0..STEPS {
            step.step(|_| loss(&model, &batches.next().transpose()?.ok_or_else(|| numcore::Error::other("no data"))?))?;
        }
        let alone = micros(begun);

        let (model, step) = make()?;
        let begun = Instant::now();
        Trainer::new(&model, step, loader.clone()).until(Length::Steps(STEPS)).run(loss)?;
        let looped = micros(begun);

        let (model, step) = make()?;
        let folder = std::env::temp_dir().join("weftgrad-loop-overhead");
        let begun = Instant::now();
        Trainer::new(&model, step, loader.clone())
            .until(Length::Steps(STEPS))
            .with(EarlyStop::on("validation/loss"))
            .with(Throughput::new())
            .with(Checkpoints::in_folder(&folder).every(Interval::Never).skip_end())
            .run(loss)?;
        let full = micros(begun);
        println!(
            "a step: {alone:.2} µs; in the loop {:+.2} µs; with callbacks {:+.2} µs",
            looped - alone,
            full - alone
        );
    }
    Ok(())
}
