//! What can be asked for on the command line, and what a run is by that.

use std::path::PathBuf;

use clap::{Args, Parser};
use weftgrad::{DType, nn::GptConfig};
use weftgrad_examples::{
    budget::Budget,
    options::{OnThreads, above_0, float, from_0, positive},
    text::Corpus,
};

/// Train a character-level GPT and print a sample. Ctrl-C saves, says how to go on, and ends with status 130.
#[derive(Debug, Parser)]
#[command(name = "char-gpt", version)]
pub struct Options {
    /// Text to learn (UTF-8). Without it: the workspace's own prose, and a smaller model.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Steps to train, those of a resumed run included [default: as many as fit into --seconds].
    #[arg(long, value_parser = positive, conflicts_with = "seconds")]
    steps: Option<usize>,
    /// About how long to train; the steps are chosen by it and printed [default: 40; 300 with --text].
    #[arg(long, value_parser = above_0)]
    seconds: Option<f64>,
    /// Sequences in a step [default: 16; 8 with --text].
    #[arg(long, value_parser = positive)]
    batch: Option<usize>,
    /// Characters in a sequence [default: 64; 256 with --text].
    #[arg(long, value_parser = positive)]
    context: Option<usize>,
    /// Blocks [default: 2; 6 with --text].
    #[arg(long, value_parser = positive)]
    layers: Option<usize>,
    /// Channels; a multiple of the heads [default: 128; 384 with --text].
    #[arg(long, value_parser = positive)]
    width: Option<usize>,
    /// Heads [default: 4; 6 with --text].
    #[arg(long, value_parser = positive)]
    heads: Option<usize>,
    /// Highest learning rate; it rises for 40 steps and falls in the last three tenths [default: 0.006; 0.001 with
    /// --text].
    #[arg(long, value_parser = above_0)]
    lr: Option<f64>,
    /// Type of the parameters: f32, f64, bf16 or f16 (halves keep f32 master weights).
    #[arg(long, default_value = "f32", value_parser = float)]
    dtype: DType,
    #[command(flatten)]
    pub on: OnThreads,
    /// Seed of weights, batches and the sample.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder of the checkpoint and the loss curve.
    #[arg(long, default_value = "char-gpt-out", value_name = "DIR")]
    pub out: PathBuf,
    /// Go on from the checkpoint in --out: the same losses as if never stopped.
    #[arg(long)]
    pub resume: bool,
    #[command(flatten)]
    pub sampling: Sampling,
}

/// How text is sampled at the end.
#[derive(Args, Clone, Copy, Debug)]
pub struct Sampling {
    /// Characters to sample at the end.
    #[arg(long = "sample", default_value_t = 500)]
    pub length: usize,
    /// How freely to sample; 0 takes the likeliest character.
    #[arg(long, default_value_t = 0.5, value_parser = from_0)]
    pub temperature: f64,
    /// How many of the likeliest characters to choose from.
    #[arg(long, default_value = "20", value_parser = positive)]
    pub top_k: usize,
}

/// What a run is: all that its losses depend on, besides the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The model.
    pub model: GptConfig,
    /// Sequences in a step.
    pub batch: usize,
    /// Learning rate after warm-up.
    pub lr: f64,
    /// Type of the parameters.
    pub dtype: DType,
    /// Seed of weights and batches.
    pub seed: u64,
}

impl Options {
    /// The run asked for.
    pub fn settings(&self, corpus: &Corpus) -> Settings {
        let own = self.text.is_none();
        let pick = |given: Option<usize>, small: usize, large: usize| given.unwrap_or(if own { small } else { large });
        let model = GptConfig {
            vocab: corpus.vocabulary.len(),
            context: pick(self.context, 64, 256),
            layers: pick(self.layers, 2, 6),
            heads: pick(self.heads, 4, 6),
            width: pick(self.width, 128, 384),
            ..GptConfig::default()
        };
        let lr = self.lr.unwrap_or(if own { 6e-3 } else { 1e-3 });
        Settings { model, batch: pick(self.batch, 16, 8), lr, dtype: self.dtype, seed: self.seed }
    }

    /// How long to train, for a run that begins.
    pub fn budget(&self) -> Budget {
        let own = self.text.is_none();
        let seconds = self.seconds.unwrap_or(if own { 40.0 } else { 300.0 });
        self.steps().unwrap_or_else(|| Budget::seconds(seconds))
    }

    /// The number of steps, where it was given.
    pub fn steps(&self) -> Option<Budget> {
        self.steps.map(|steps| Budget::steps(steps as u64))
    }

    /// Whether an option was given that a resumed run takes from its checkpoint.
    pub fn reshapes(&self) -> bool {
        [self.batch, self.context, self.layers, self.width, self.heads].iter().any(Option::is_some)
            || self.lr.is_some()
            || self.seconds.is_some()
    }
}
