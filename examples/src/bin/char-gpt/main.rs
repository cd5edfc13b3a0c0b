//! Trains a character-level GPT and prints a sample.
//!
//! Without `--text` it learns the workspace's own prose for 40 seconds: it trains as many steps as fit, says how many
//! these are, and `--steps` with that number trains the same model. `--text FILE` trains a larger model on a file.
//! Ctrl-C saves and ends; `--resume` goes on as if never stopped.
#![forbid(unsafe_code)]

mod checkpoint;
mod command;
mod sample;
mod training;

use std::{path::Path, process::ExitCode};

use weftgrad::prelude::*;
use weftgrad_examples::{
    Outcome,
    options::{self, Interrupted},
    plot,
    stop::Stop,
    text::Corpus,
};

use crate::{checkpoint::Checkpoint, command::Options, training::Training};

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let rt = options.on.open()?;
    let corpus = Corpus::read(options.text.as_deref())?;
    std::fs::create_dir_all(&options.out).map_err(|e| format!("{}: {e}", options.out.display()))?;
    let saved = if options.resume { Some(Checkpoint::load(&options.out, &rt)?) } else { None };
    let (settings, budget) = match &saved {
        Some(saved) => (saved.settings(options, &corpus)?, saved.budget(options)?),
        None => (options.settings(&corpus), options.budget()),
    };
    let mut training = Training::new(&rt, settings, budget, &corpus)?;
    if let Some(saved) = saved {
        saved.restore(&mut training)?;
    }
    println!("{}\n{}", training.describe(), rt.capabilities().name);
    let ended = training.run(&Stop::on_ctrl_c())?;
    checkpoint::save(&options.out, &training, &corpus)?;
    picture(&options.out, &training)?;
    if !ended {
        let out = options.out.display();
        return Err(Interrupted(format!("stopped at step {}; go on with --resume --out {out}", training.step)).into());
    }
    println!("\nvalidation loss {:.4} after {} steps\n", training.validate()?, training.step);
    println!("{}", sample::text(&training, &corpus, options.sampling)?);
    Ok(())
}

fn picture(out: &Path, training: &Training<'_>) -> Outcome<()> {
    let path = out.join("loss.svg");
    let curves = [("training", training.losses.as_slice()), ("validation", training.validation.as_slice())];
    plot::losses(&path, "char-gpt", &curves)?;
    println!("loss curve: {}", path.display());
    Ok(())
}
