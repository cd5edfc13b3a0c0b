//! Trains a character-level GPT and prints a sample.
//!
//! Without `--text` it reads text of its own (this workspace's documents and sources) and takes about a minute on two cores.
//! `--text FILE` trains a larger model on a file. Ctrl-C saves and ends; `--resume` goes on as if never stopped.
#![forbid(unsafe_code)]

mod checkpoint;
mod options;
mod sample;
mod training;

use std::{path::Path, process::ExitCode};

use clap::Parser;
use weftgrad::prelude::*;
use weftgrad_examples::{Outcome, plot, stop::Stop, text::Corpus};

use crate::{checkpoint::Checkpoint, options::Options, training::Training};

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("char-gpt: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Outcome<()> {
    let rt = options.device.open_with(options.threads)?;
    let corpus = Corpus::read(options.text.as_deref())?;
    std::fs::create_dir_all(&options.out).map_err(|e| format!("{}: {e}", options.out.display()))?;
    let saved = if options.resume { Some(Checkpoint::load(&options.out, &rt)?) } else { None };
    let settings = match &saved {
        Some(saved) => saved.settings(&options, &corpus)?,
        None => options.settings(&corpus),
    };
    let mut training = Training::new(&rt, settings, &corpus)?;
    if let Some(saved) = saved {
        saved.restore(&mut training)?;
    }
    println!("{}\n{}", training.describe(), rt.capabilities().name);
    let ended = training.run(options.steps, &Stop::on_ctrl_c())?;
    checkpoint::save(&options.out, &training, &corpus)?;
    picture(&options.out, &training)?;
    if !ended {
        println!("stopped at step {}; go on with --resume --out {}", training.step, options.out.display());
        return Ok(());
    }
    println!("\nvalidation loss {:.4} after {} steps\n", training.validate()?, training.step);
    println!("{}", sample::text(&training, &corpus, options.sample, options.temperature)?);
    Ok(())
}

fn picture(out: &Path, training: &Training<'_>) -> Outcome<()> {
    let path = out.join("loss.svg");
    let curves = [("training", training.losses.as_slice()), ("validation", training.validation.as_slice())];
    plot::losses(&path, "char-gpt", &curves)?;
    println!("loss curve: {}", path.display());
    Ok(())
}
