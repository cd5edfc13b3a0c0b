//! A run on disk: one safetensors file, written whole or not at all.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use weftgrad::{AnyRuntime, nn::GptConfig, optim::Optimizer, prelude::*, safetensors};
use weftgrad_examples::{Outcome, budget::Budget, text::Corpus};

use crate::{
    command::{Options, Settings},
    training::Training,
};

const MODEL: &str = "model.";
const OPTIMIZER: &str = "optimizer.";
const CURVES: [&str; 2] = ["losses", "validation"];

fn path(out: &Path) -> PathBuf {
    out.join("checkpoint.safetensors")
}

/// Saves a run. If that fails, the last checkpoint is as it was.
pub fn save(out: &Path, training: &Training<'_>, corpus: &Corpus) -> Outcome<()> {
    let mut entries: Vec<(String, Tensor<AnyRuntime>)> = Vec::new();
    let named = |prefix: &'static str| move |(name, t): (String, Tensor<AnyRuntime>)| (format!("{prefix}{name}"), t);
    entries.extend(training.model.state_dict()?.into_iter().map(named(MODEL)));
    entries.extend(training.optimizer.state_dict()?.into_iter().map(named(OPTIMIZER)));
    for (name, curve) in CURVES.into_iter().zip([&training.losses, &training.validation]) {
        let flat: Vec<f64> = curve.iter().flat_map(|&(step, loss)| [step, loss]).collect();
        entries.push((name.into(), Tensor::from_vec(training.rt, flat)?));
    }
    let path = path(out);
    safetensors::save(&path, &entries, &notes(training, corpus))?;
    println!("checkpoint: {}", path.display());
    Ok(())
}

fn notes(training: &Training<'_>, corpus: &Corpus) -> BTreeMap<String, String> {
    let Settings { model, batch, lr, dtype, seed } = &training.settings;
    let numbers = [
        ("step", training.step.to_string()),
        ("steps", training.budget.total().unwrap_or(0).to_string()),
        ("seconds", training.budget.time().unwrap_or(0.0).to_string()),
        ("elapsed", training.elapsed.to_string()),
        ("context", model.context.to_string()),
        ("layers", model.layers.to_string()),
        ("heads", model.heads.to_string()),
        ("width", model.width.to_string()),
        ("batch", batch.to_string()),
        ("lr", lr.to_string()),
        ("dtype", dtype.to_string()),
        ("seed", seed.to_string()),
        ("vocabulary", corpus.vocabulary.iter().collect()),
    ];
    numbers.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
}

/// A run that was saved.
pub struct Checkpoint {
    path: PathBuf,
    notes: BTreeMap<String, String>,
    entries: Vec<(String, Tensor<AnyRuntime>)>,
}

impl Checkpoint {
    /// Reads the checkpoint in a folder.
    pub fn load(out: &Path, rt: &AnyRuntime) -> Outcome<Checkpoint> {
        let path = path(out);
        if !path.exists() {
            return Err(format!("{}: no checkpoint to resume; run without --resume first", path.display()).into());
        }
        Ok(Checkpoint { notes: safetensors::metadata(&path)?, entries: safetensors::load(&path, rt)?, path })
    }

    /// What the run is. Options that would make it another, or another text, are an error.
    pub fn settings(&self, options: &Options, corpus: &Corpus) -> Outcome<Settings> {
        if options.reshapes() {
            return Err(
                "--resume takes sizes, learning rate and time from the checkpoint; leave those options out".into()
            );
        }
        if self.note::<String>("vocabulary")?.chars().ne(corpus.vocabulary.iter().copied()) {
            return Err(format!("{}: was trained on another text (its characters differ)", self.path.display()).into());
        }
        let dtype = self.note::<String>("dtype")?;
        let model = GptConfig {
            vocab: corpus.vocabulary.len(),
            context: self.note("context")?,
            layers: self.note("layers")?,
            heads: self.note("heads")?,
            width: self.note("width")?,
            ..GptConfig::default()
        };
        Ok(Settings {
            model,
            batch: self.note("batch")?,
            lr: self.note("lr")?,
            dtype: DType::from_name(&dtype).ok_or_else(|| format!("{}: unknown dtype {dtype}", self.path.display()))?,
            seed: self.note("seed")?,
        })
    }

    /// How long it trains: the steps asked for, or those that were chosen, or, if none were yet, the time that was
    /// given.
    pub fn budget(&self, options: &Options) -> Outcome<Budget> {
        Ok(match (options.steps(), self.note::<u64>("steps")?) {
            (Some(budget), _) => budget,
            (None, 0) => Budget::seconds(self.note("seconds")?),
            (None, chosen) => Budget::steps(chosen),
        })
    }

    /// Puts everything back where it was.
    pub fn restore(self, training: &mut Training<'_>) -> Outcome<()> {
        let under = |prefix: &str| -> Vec<(String, Tensor<AnyRuntime>)> {
            let own = |(n, t): &(String, Tensor<AnyRuntime>)| Some((n.strip_prefix(prefix)?.to_owned(), t.clone()));
            self.entries.iter().filter_map(own).collect()
        };
        training.model.load_state_dict(under(MODEL), true)?;
        training.optimizer.load_state_dict(&under(OPTIMIZER))?;
        training.step = self.note("step")?;
        training.elapsed = self.note("elapsed")?;
        training.losses = self.curve(CURVES[0])?;
        training.validation = self.curve(CURVES[1])?;
        println!("resumed at step {} from {}", training.step, self.path.display());
        Ok(())
    }

    fn curve(&self, name: &str) -> Outcome<Vec<(f64, f64)>> {
        let missing = || format!("{}: has no `{name}`", self.path.display());
        let (_, curve) = self.entries.iter().find(|(n, _)| n == name).ok_or_else(missing)?;
        Ok(curve.to_vec::<f64>()?.chunks_exact(2).map(|p| (p[0], p[1])).collect())
    }

    fn note<T: std::str::FromStr>(&self, key: &str) -> Outcome<T> {
        let value = self.notes.get(key).and_then(|v| v.parse().ok());
        value.ok_or_else(|| format!("{}: its note `{key}` is missing or unreadable", self.path.display()).into())
    }
}
