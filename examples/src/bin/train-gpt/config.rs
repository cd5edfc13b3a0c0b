//! The configuration of a run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weftgrad::{distributed::zero::ZeroStage, nn::GptConfig};
use weftgrad_examples::Outcome;

/// A run, with the structure of the file of `--config`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Config {
    /// The file of text; empty for the workspace's own prose.
    pub text: PathBuf,
    /// The folder of checkpoints, metrics, curves and the report.
    pub out: PathBuf,
    /// The seed of the weights and of the order of the data.
    pub seed: u64,
    /// The number of ranks; under `mpirun`, its number of processes.
    pub ranks: usize,
    pub model: Model,
    pub data: Data,
    pub optimizer: Optimizer,
    pub run: Run,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Model {
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    /// Tokens of a sequence.
    pub context: usize,
    pub dropout: f64,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Data {
    /// Sequences of a step, of all ranks and micro-batches together.
    pub batch: usize,
    /// The fraction of the text held out for validation.
    pub validation: f64,
    pub workers: usize,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Optimizer {
    pub lr: f64,
    pub weight_decay: f64,
    /// The number of steps over which the learning rate rises.
    pub warmup: u64,
    /// The norm to which gradients are clipped.
    pub max_norm: f64,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Run {
    pub steps: u64,
    /// Micro-batches of a step.
    pub accumulation: usize,
    /// The ZeRO stage over ranks: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    pub zero: u8,
    /// The cooperation of the ranks.
    pub together: Together,
    /// Local steps between two synchronizations, for `Together::Local`.
    pub every: u64,
    pub evaluate_every: u64,
    pub save_every: u64,
    /// The number of latest checkpoints kept.
    pub keep: usize,
}

/// The cooperation of the ranks.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Together {
    /// Each rank takes its share of every batch, and gradients are summed.
    Sums,
    /// Fast ranks take more batches than slow ones.
    Balanced,
    /// Each rank takes local steps on its share; DiLoCo synchronizes the weights every `every` steps.
    Local,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            text: PathBuf::new(),
            out: "runs/train-gpt".into(),
            seed: 0,
            ranks: 1,
            model: Model { layers: 2, heads: 4, width: 128, context: 64, dropout: 0.0 },
            data: Data { batch: 16, validation: 0.1, workers: 1 },
            optimizer: Optimizer { lr: 6e-3, weight_decay: 0.1, warmup: 20, max_norm: 1.0 },
            run: Run {
                steps: 300,
                accumulation: 1,
                zero: 0,
                together: Together::Sums,
                every: 50,
                evaluate_every: 100,
                save_every: 100,
                keep: 2,
            },
        }
    }
}

impl Config {
    /// Fails for an impossible number that no later check would name by its key.
    pub(crate) fn check(&self) -> Outcome<()> {
        let counts = [
            ("ranks", self.ranks as u64),
            ("data.batch", self.data.batch as u64),
            ("run.steps", self.run.steps),
            ("run.accumulation", self.run.accumulation as u64),
            ("run.every", self.run.every),
            ("run.evaluate_every", self.run.evaluate_every),
            ("run.save_every", self.run.save_every),
            ("run.keep", self.run.keep as u64),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(format!("`{name}` must be above 0").into());
        }
        if !(self.data.validation > 0.0 && self.data.validation < 1.0) {
            return Err(format!(
                "`data.validation` is a part of the text between 0 and 1, not {}",
                self.data.validation
            )
            .into());
        }
        self.zero().map(|_| ())
    }

    /// The ZeRO stage: the tensors sharded over ranks.
    pub(crate) fn zero(&self) -> Outcome<ZeroStage> {
        match self.run.zero {
            0 => Ok(ZeroStage::None),
            1 => Ok(ZeroStage::Optimizer),
            2 => Ok(ZeroStage::Gradients),
            3 => Ok(ZeroStage::Parameters),
            other => Err(format!("`run.zero` is a stage from 0 to 3, not {other}").into()),
        }
    }

    /// The model, for a vocabulary of this size.
    pub(crate) fn gpt(&self, vocab: usize) -> GptConfig {
        let Model { layers, heads, width, context, dropout } = self.model;
        GptConfig { vocab, context, layers, heads, width, dropout, ..GptConfig::default() }
    }
}
