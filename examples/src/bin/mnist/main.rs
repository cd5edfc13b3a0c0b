//! Trains a small convolutional network on handwritten digits.
//!
//! `mnist --data DIR` reads the gzipped IDX files `*images-idx3-ubyte.gz` and `*labels-idx1-ubyte.gz` in `DIR`. It
//! trains on the first four fifths and tests on the rest. Without `--data` it draws its own digits, which are easier.
#![forbid(unsafe_code)]

mod digits;
mod drawn;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use clap::Parser;
use weftgrad::{
    AnyRuntime,
    data::{Batch, Dataset, Last},
    distributed::{
        comm::{Comm, NoOpCommunicator},
        train::{Loss, TrainStep},
    },
    nn::{
        Conv2d, Init, Linear,
        loss::{CrossEntropyOptions, Reduction, cross_entropy_with},
    },
    optim::AdamWConfig,
    prelude::*,
    train::{Evaluate, Length, StopOnSignal, StopReason, Throughput, Trainer, metrics::Accuracy, sink::Terminal},
};
use weftgrad_examples::{
    Outcome,
    options::{self, Interrupted, OnThreads, above_0, positive},
};

use crate::digits::Images;

/// Train a convolutional network on handwritten digits. Ctrl-C ends it with status 130; nothing is saved.
#[derive(Debug, Parser)]
#[command(name = "mnist", version)]
struct Options {
    /// Folder with the gzipped IDX files [default: digits drawn by the program].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Number of digits to draw, without `--data`.
    #[arg(long, default_value = "4000", value_parser = positive, conflicts_with = "data")]
    images: usize,
    /// Passes over the training images.
    #[arg(long, default_value = "8", value_parser = positive)]
    epochs: usize,
    /// Images in a step.
    #[arg(long, default_value = "64", value_parser = positive)]
    batch: usize,
    /// Learning rate.
    #[arg(long, default_value_t = 1e-3, value_parser = above_0)]
    lr: f64,
    #[command(flatten)]
    on: OnThreads,
    /// Seed of weights and order.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// conv 3×3 (32) – conv 3×3 (64) – max-pool 2 – 128 – 10.
#[derive(Module)]
struct Cnn<R: Runtime> {
    c1: Conv2d<R>,
    c2: Conv2d<R>,
    f1: Linear<R>,
    f2: Linear<R>,
}

impl<R: Runtime> Cnn<R> {
    fn new(init: &Init<R>) -> Result<Self> {
        Ok(Cnn {
            c1: Conv2d::new(init, 1, 32, [3, 3], Default::default())?,
            c2: Conv2d::new(init, 32, 64, [3, 3], Default::default())?,
            f1: Linear::new(init, 64 * 12 * 12, 128)?,
            f2: Linear::new(init, 128, 10)?,
        })
    }
}

impl<R: Runtime> Forward<R> for Cnn<R> {
    /// `x: [N, 1, 28, 28]` to logits `[N, 10]`.
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.c1.forward(x)?.relu()?;
        let x = self.c2.forward(&x)?.relu()?.max_pool2d([2, 2], [2, 2], [0, 0])?;
        self.f2.forward(&self.f1.forward(&x.flatten(1, -1)?)?.relu()?)
    }
}

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let rt = options.on.open()?;
    let digits = match &options.data {
        Some(dir) => digits::read(dir)?,
        None => drawn::digits(options.images, options.seed)?,
    };
    let (all, train) = (digits.len(), digits.len() * 4 / 5);
    let per_epoch = train / options.batch;
    if per_epoch == 0 {
        let batch = options.batch;
        return Err(
            format!("--batch {batch} is more than the {train} images to train on (four fifths of {all})").into()
        );
    }
    let model = Cnn::new(&Init::new(&rt, options.seed))?;
    println!("{}\n{train} images to train on, {} to test", model.summary(), all - train);
    let learned = digits::batches(digits.clone().subset(0..train)?, options.batch, &rt);
    let held_out = digits::batches(digits.subset(train..all)?, 250, &rt);
    let comm: Comm<AnyRuntime> = Arc::new(NoOpCommunicator::new(&rt));
    let adamw = AdamWConfig { lr: options.lr, ..Default::default() };
    let step = TrainStep::builder(&comm, &model).optimizer(adamw).build()?;
    let test = Evaluate::on(held_out).name("test").without_loss().predict(scores);
    let test = test.metric("accuracy", Accuracy::new(), |all, scores, batch| all.update_tensors(scores, &batch.data.1));
    let report = Trainer::new(&model, step, learned.shuffle(options.seed).last(Last::Drop))
        .until(Length::Epochs(options.epochs as f64))
        .with(test)
        .with(Throughput::new())
        .with(StopOnSignal::new())
        .sink(Terminal::new().show(["loss", "throughput/tokens_per_second", ACCURACY]).announce([ACCURACY]))
        .run(loss)?;
    let step = report.progress.step;
    if report.reason == StopReason::Interrupted {
        let steps = options.epochs * per_epoch;
        return Err(Interrupted(format!("stopped at step {step} of {steps}; nothing was saved")).into());
    }
    println!("{:.2} % of the test images are named rightly", 100.0 * report.evaluated[ACCURACY]);
    Ok(())
}

/// The name of the accuracy in records: the fraction of test images classified correctly.
const ACCURACY: &str = "test/accuracy";

fn loss(model: &Cnn<AnyRuntime>, batch: &Batch<Images>) -> Result<Loss<AnyRuntime>> {
    let (x, y) = (Var::new(batch.data.0.clone()), Var::new(batch.data.1.clone()));
    let sum = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    Loss::sum(cross_entropy_with(&model.forward(&x)?, &y, sum)?, batch.count as f64)
}

fn scores(model: &Cnn<AnyRuntime>, batch: &Batch<Images>) -> Result<Tensor<AnyRuntime>> {
    model.forward(&Var::new(batch.data.0.clone()))?.value()
}
