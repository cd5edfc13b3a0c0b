//! The command line, and the settings of a run that follow from it.

use std::path::{Path, PathBuf};

use clap::{Args, Parser};
use serde::{Deserialize, Serialize};
use weftgrad::{
    DType, Error, Result, Runtime,
    distributed::comm::Communicator,
    nn::GptConfig,
    train::{Callback, Event, Run},
};
use weftgrad_examples::{
    Outcome,
    budget::Budget,
    config as files,
    options::{above_0, float, from_0, positive},
    ranks::Joined,
    text::Corpus,
};

/// Train a character-level GPT and print a sample. Ctrl-C saves, prints the command to resume, and ends with status
/// 130.
#[derive(Debug, Parser)]
#[command(name = "char-gpt", version)]
pub(crate) struct Options {
    /// Text to learn (UTF-8) [default: the workspace's own prose, with a smaller model].
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Total steps, those before a resumption included [default: as many as fit into --seconds].
    #[arg(long, value_parser = positive, conflicts_with = "seconds")]
    steps: Option<usize>,
    /// Approximate training time in seconds; the number of steps is chosen by it and printed [default: 40; 300 with
    /// --text].
    #[arg(long, value_parser = above_0)]
    seconds: Option<f64>,
    /// Sequences in a step, of all ranks together [default: 16; 8 with --text].
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
    /// Compute the linear layers of blocks with 8-bit operands (f8e4m3), a scale for each block; CPU only.
    #[arg(long)]
    fp8: bool,
    /// Ranks, each with its part of every batch.
    #[arg(long, default_value = "1", value_parser = positive)]
    pub ranks: usize,
    #[command(flatten)]
    pub joined: Joined,
    /// Seed of weights, batches and the sample.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder of the checkpoint, the metrics and the loss curve; an earlier run's checkpoint there is replaced.
    #[arg(long, default_value = "char-gpt-out", value_name = "DIR")]
    pub out: PathBuf,
    /// Resume from the checkpoint in --out: the losses are those of an uninterrupted run.
    #[arg(long)]
    pub resume: bool,
    #[command(flatten)]
    pub sampling: Sampling,
}

/// Options of the sample at the end.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Sampling {
    /// Characters to sample at the end.
    #[arg(long = "sample", default_value_t = 500)]
    pub length: usize,
    /// Sampling temperature; 0 takes the likeliest character.
    #[arg(long, default_value_t = 0.5, value_parser = from_0)]
    pub temperature: f64,
    /// Number of likeliest characters to sample from (top-k).
    #[arg(long, default_value = "20", value_parser = positive)]
    pub top_k: usize,
}

/// The settings of a run: all that its losses depend on, besides the text. They are saved in the folder of the run.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Settings {
    /// The characters of the text.
    pub vocabulary: String,
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub context: usize,
    /// Sequences in a step.
    pub batch: usize,
    /// Learning rate after warm-up.
    pub lr: f64,
    /// Type of the parameters.
    pub dtype: String,
    /// True if linear layers of blocks compute with 8-bit operands.
    #[serde(default)]
    pub fp8: bool,
    /// Seed of weights and batches.
    pub seed: u64,
    /// The training time in seconds, if `steps` is 0.
    pub seconds: f64,
    /// The number of steps; 0 for as many as fit into `seconds`.
    pub steps: u64,
}

impl Default for Settings {
    /// The settings for the workspace's own prose.
    fn default() -> Self {
        let (layers, heads, width, context, batch) = (2, 4, 128, 64, 16);
        let (vocabulary, dtype) = (String::new(), DType::F32.to_string());
        Settings {
            vocabulary,
            layers,
            heads,
            width,
            context,
            batch,
            lr: 6e-3,
            dtype,
            fp8: false,
            seed: 1,
            seconds: 40.0,
            steps: 0,
        }
    }
}

impl Settings {
    /// The configuration of the model.
    pub(crate) fn gpt(&self) -> GptConfig {
        let &Settings { context, layers, heads, width, .. } = self;
        GptConfig { vocab: self.vocabulary.chars().count(), context, layers, heads, width, ..GptConfig::default() }
    }

    /// The length of the run: a number of steps or a time.
    fn budget(&self) -> Budget {
        if self.steps > 0 { Budget::steps(self.steps) } else { Budget::seconds(self.seconds) }
    }

    /// The type of the parameters.
    pub(crate) fn dtype(&self) -> Outcome<DType> {
        Ok(DType::from_name(&self.dtype).ok_or_else(|| format!("unknown dtype {}", self.dtype))?)
    }

    /// Writes the settings for resumed runs. The file is replaced by a rename, so it is always complete.
    fn save(&self, out: &Path) -> Result<()> {
        let text = files::show(self).map_err(|e| Error::other(e.to_string()))?;
        std::fs::create_dir_all(out).map_err(|e| Error::io(out, e))?;
        let (new, path) = (out.join("settings.toml.new"), path(out));
        std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path)).map_err(|e| Error::io(&path, e))
    }
}

/// A callback that writes the settings of a new run beside its checkpoints at its beginning. A run that cannot begin
/// leaves the settings of an earlier run as they are.
pub(crate) struct SaveSettings<'s> {
    pub settings: &'s Settings,
    pub out: &'s Path,
}

impl<R: Runtime, M, B> Callback<R, M, B> for SaveSettings<'_> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let writes = matches!(event, Event::Begin) && run.comm().rank() == 0 && run.resumed().is_none();
        if writes { self.settings.save(self.out) } else { Ok(()) }
    }
}

fn path(out: &Path) -> PathBuf {
    out.join("settings.toml")
}

impl Options {
    /// The settings of a new run from the options, or with `--resume` of the run in the folder.
    pub(crate) fn settings(&self, corpus: &Corpus) -> Outcome<Settings> {
        if self.resume { self.resumed(corpus) } else { Ok(self.begun(corpus)) }
    }

    fn begun(&self, corpus: &Corpus) -> Settings {
        let small = Settings::default();
        let large = Settings {
            layers: 6,
            heads: 6,
            width: 384,
            context: 256,
            batch: 8,
            lr: 1e-3,
            seconds: 300.0,
            ..small.clone()
        };
        let base = if self.text.is_none() { small } else { large };
        Settings {
            vocabulary: corpus.characters.characters().iter().collect(),
            layers: self.layers.unwrap_or(base.layers),
            heads: self.heads.unwrap_or(base.heads),
            width: self.width.unwrap_or(base.width),
            context: self.context.unwrap_or(base.context),
            batch: self.batch.unwrap_or(base.batch),
            lr: self.lr.unwrap_or(base.lr),
            dtype: self.dtype.to_string(),
            fp8: self.fp8,
            seed: self.seed,
            seconds: self.seconds.unwrap_or(base.seconds),
            steps: self.steps.unwrap_or(0) as u64,
        }
    }

    /// The settings of the run in the folder. It is an error to change them by options, or to give another text.
    fn resumed(&self, corpus: &Corpus) -> Outcome<Settings> {
        let path = path(&self.out);
        if !path.is_file() {
            return Err(format!("{}: no checkpoint to resume; run without --resume first", self.out.display()).into());
        }
        if self.reshapes() {
            return Err(
                "--resume takes sizes, learning rate and time from the checkpoint; leave those options out".into()
            );
        }
        let saved: Settings = files::read(&path)?;
        if saved.vocabulary.chars().ne(corpus.characters.characters().iter().copied()) {
            return Err(format!("{}: was trained on another text (its characters differ)", path.display()).into());
        }
        Ok(Settings { steps: self.steps.map_or(saved.steps, |steps| steps as u64), ..saved })
    }

    /// The length of the run: from the options, or else the one saved in the checkpoint.
    pub(crate) fn budget(&self, settings: &Settings) -> Budget {
        let budget = settings.budget();
        if self.resume && self.steps.is_none() { budget.resumed() } else { budget }
    }

    /// Tells whether the command line sets an option that a resumed run takes from its checkpoint.
    fn reshapes(&self) -> bool {
        [self.batch, self.context, self.layers, self.width, self.heads].iter().any(Option::is_some)
            || self.lr.is_some()
            || self.seconds.is_some()
    }
}
