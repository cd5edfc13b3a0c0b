//! A small convolutional network learns handwritten digits.
//!
//! `mnist --data DIR` reads the gzipped IDX files `*images-idx3-ubyte.gz` and `*labels-idx1-ubyte.gz` in `DIR`, trains on the first
//! four fifths and tests on the rest. Without `--data` it draws digits of its own, easier ones.
#![forbid(unsafe_code)]

mod digits;
mod drawn;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use weftgrad::{
    AnyRuntime,
    data::{Dataset, Last},
    nn::{Conv2d, Init, Linear},
    optim::{AdamW, AdamWConfig, Optimizer},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, Interrupted, OnThreads, above_0, positive},
    progress::Progress,
    stop::Stop,
};

/// Train a convolutional network on handwritten digits. Ctrl-C ends it with status 130; nothing is saved.
#[derive(Debug, Parser)]
#[command(name = "mnist", version)]
struct Options {
    /// Folder with the gzipped IDX files [default: digits drawn by the program].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// How many digits to draw, without `--data`.
    #[arg(long, default_value = "4000", value_parser = positive, conflicts_with = "data")]
    images: usize,
    /// Times through the training images.
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
    let learned = learned.shuffle(options.seed).last(Last::Drop);
    let held_out = digits::batches(digits.subset(train..all)?, 250, &rt);
    let config = AdamWConfig { lr: options.lr, ..Default::default() };
    let mut optimizer = AdamW::new(&model, config)?;
    let (stop, progress) = (Stop::on_ctrl_c(), Progress::new(0, options.batch, "images"));
    let (mut step, steps) = (0, (options.epochs * per_epoch) as u64);
    for epoch in 0..options.epochs as u64 {
        for batch in learned.epoch(epoch)? {
            if stop.requested() {
                progress.finish();
                return Err(Interrupted(format!("stopped at step {step} of {steps}; nothing was saved")).into());
            }
            let (x, y) = batch?.data;
            let loss = model.forward(&Var::new(x))?.cross_entropy(&Var::new(y))?;
            optimizer.backward(&loss)?;
            optimizer.step()?;
            step += 1;
            progress.step(step, steps, loss.item()?);
        }
        progress.say(&format!("epoch {}: {:.2} % right", epoch + 1, test(&model, &held_out)?));
    }
    progress.finish();
    Ok(())
}

/// Percent of the images that are named rightly.
fn test(model: &Cnn<AnyRuntime>, images: &digits::Batches) -> Result<f64> {
    let (mut right, mut all) = (0.0, 0);
    for batch in images.epoch(0)? {
        let batch = batch?;
        let (x, y) = (Var::new(batch.data.0), Var::new(batch.data.1));
        let hits = no_grad(|| model.forward(&x)?.argmax(-1, false)?.eq(&y))?;
        right += hits.sum(&[], false)?.item()?;
        all += batch.count;
    }
    Ok(100.0 * right / all as f64)
}
