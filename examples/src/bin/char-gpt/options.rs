//! What can be asked for on the command line, and what a run is by that.

use std::path::PathBuf;

use clap::Parser;
use weftgrad::{DType, Device, nn::GptConfig};
use weftgrad_examples::text::Corpus;

/// Train a character-level GPT and print a sample.
#[derive(Debug, Parser)]
#[command(name = "char-gpt", version)]
pub struct Options {
    /// Text to learn (UTF-8). Without it: text of the workspace's own, and a smaller model.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Steps to train, those of a resumed run included.
    #[arg(long, default_value_t = 400)]
    pub steps: u64,
    /// Sequences in a step [default: 16; 8 with --text].
    #[arg(long, value_parser = positive)]
    batch: Option<usize>,
    /// Characters in a sequence [default: 128; 256 with --text].
    #[arg(long, value_parser = positive)]
    context: Option<usize>,
    /// Blocks [default: 4; 6 with --text].
    #[arg(long, value_parser = positive)]
    layers: Option<usize>,
    /// Channels; a multiple of the heads [default: 192; 384 with --text].
    #[arg(long, value_parser = positive)]
    width: Option<usize>,
    /// Heads [default: 6].
    #[arg(long, value_parser = positive)]
    heads: Option<usize>,
    /// Learning rate after 100 steps of warm-up [default: 0.002; 0.001 with --text].
    #[arg(long)]
    lr: Option<f64>,
    /// Type of the parameters: f32, f64, bf16 or f16 (halves keep f32 master weights).
    #[arg(long, default_value = "f32", value_parser = float)]
    dtype: DType,
    /// Where to run: cpu, or, if built in, wgpu:N or cuda:N.
    #[arg(long, default_value_t)]
    pub device: Device,
    /// Threads [default: all].
    #[arg(long, value_parser = positive)]
    pub threads: Option<usize>,
    /// Seed of weights, batches and the sample.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder of the checkpoint and the loss curve.
    #[arg(long, default_value = "char-gpt-out", value_name = "DIR")]
    pub out: PathBuf,
    /// Go on from the checkpoint in --out: the same losses as if never stopped.
    #[arg(long)]
    pub resume: bool,
    /// Characters to sample at the end.
    #[arg(long, default_value_t = 500)]
    pub sample: usize,
    /// How freely to sample; 0 takes the likeliest character.
    #[arg(long, default_value_t = 0.7)]
    pub temperature: f64,
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
            context: pick(self.context, 128, 256),
            layers: pick(self.layers, 4, 6),
            heads: pick(self.heads, 6, 6),
            width: pick(self.width, 192, 384),
            ..GptConfig::default()
        };
        let lr = self.lr.unwrap_or(if own { 2e-3 } else { 1e-3 });
        Settings { model, batch: pick(self.batch, 16, 8), lr, dtype: self.dtype, seed: self.seed }
    }

    /// Whether an option was given that a resumed run decides itself.
    pub fn reshapes(&self) -> bool {
        [self.batch, self.context, self.layers, self.width, self.heads].iter().any(Option::is_some) || self.lr.is_some()
    }
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "must be a whole number above 0".into())
}

fn float(text: &str) -> Result<DType, String> {
    DType::from_name(text).filter(|d| d.is_float()).ok_or_else(|| "must be f32, f64, bf16 or f16".into())
}
