//! The configuration of a run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weftgrad::{
    Result,
    distributed::{
        context_parallel::ContextExchange,
        pipeline::{Checked, Limits, Lowering, PipeShape, ScheduleKind},
        plan::{Axis, ParallelPlan},
        zero::ZeroStage,
    },
    models::{ConfigFields, JsonObject},
};
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
    pub mesh: Axes,
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
    /// Experts of each layer, two for each token; 0 for dense layers.
    pub experts: usize,
}

/// The numbers of ranks along each axis. The rest of the ranks are along data.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Axes {
    /// Ranks of a pipeline, each with some of the layers.
    pub pipeline: usize,
    /// Ranks that have parts of every layer.
    pub tensor: usize,
    /// Whether ranks along tensor cut sequences between the layers, too.
    pub sequence: bool,
    /// Ranks that have parts of every sequence.
    pub context: usize,
    /// Ranks among which ZeRO shards, in groups that sum gradients; with 1 it shards over those along data.
    pub shard: usize,
    /// Ranks among which experts are shared out, of those along data and context.
    pub experts: usize,
    /// The exchange of keys and values between parts of a sequence.
    pub exchange: Exchange,
    /// The schedule of the pipeline, such as 1F1B, ZB-H1 or ZBV.
    pub schedule: String,
    /// Pipeline stages on each rank.
    pub stages_per_rank: usize,
}

/// The exchange of keys and values between ranks that have parts of a sequence.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Exchange {
    AllGather,
    Ring,
    Ulysses,
}

impl From<Exchange> for ContextExchange {
    fn from(exchange: Exchange) -> Self {
        match exchange {
            Exchange::AllGather => ContextExchange::AllGather,
            Exchange::Ring => ContextExchange::Ring,
            Exchange::Ulysses => ContextExchange::Ulysses,
        }
    }
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
    /// Micro-batches of a step; in a pipeline, those of its schedule.
    pub accumulation: usize,
    /// The stage of ZeRO over the shard axis or, without one, the data axis: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
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
            model: Model { layers: 2, heads: 4, width: 128, context: 64, experts: 0 },
            mesh: Axes {
                pipeline: 1,
                tensor: 1,
                sequence: false,
                context: 1,
                shard: 1,
                experts: 1,
                exchange: Exchange::AllGather,
                schedule: ScheduleKind::OneFOneB.to_string(),
                stages_per_rank: 1,
            },
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
            ("model.heads", self.model.heads as u64),
            ("mesh.pipeline", self.mesh.pipeline as u64),
            ("mesh.tensor", self.mesh.tensor as u64),
            ("mesh.context", self.mesh.context as u64),
            ("mesh.shard", self.mesh.shard as u64),
            ("mesh.experts", self.mesh.experts as u64),
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
        if !self.data.batch.is_multiple_of(self.run.accumulation) {
            return Err("`run.accumulation` must divide `data.batch`".into());
        }
        self.schedule()?;
        self.zero().map(|_| ())
    }

    /// The plan of a mesh of `ranks` ranks.
    pub(crate) fn plan(&self, ranks: usize) -> Result<ParallelPlan> {
        let Axes { pipeline, tensor, context, shard, experts, .. } = self.mesh;
        let data = (ranks / (pipeline * tensor * context * shard)).max(1);
        let cut = [(Axis::Pipe, pipeline), (Axis::Shard, shard), (Axis::Context, context), (Axis::Tensor, tensor)];
        ParallelPlan::new(ranks, cut.into_iter().chain([(Axis::Expert, experts), (Axis::Data, data)]))
    }

    /// The checked schedule; none without a pipeline.
    pub(crate) fn schedule(&self) -> Result<Option<Checked>> {
        let Axes { pipeline: ranks, stages_per_rank, .. } = self.mesh;
        if ranks == 1 {
            return Ok(None);
        }
        let shape = PipeShape { ranks, stages_per_rank, micro_batches: self.run.accumulation };
        let lowering = Lowering { sharded: self.run.zero == 3, ..Default::default() };
        self.mesh.schedule.parse::<ScheduleKind>()?.generate(shape)?.lower(lowering)?.check(Limits::default()).map(Some)
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

    /// The fields of the model, a Llama or a Mixtral, for a vocabulary of this size.
    pub(crate) fn decoder(&self, vocab: usize) -> ConfigFields {
        let Model { layers, heads, width, context, experts } = self.model;
        let mut fields = serde_json::Map::new();
        fields.insert("model_type".into(), if experts == 0 { "llama" } else { "mixtral" }.into());
        for (name, size) in [
            ("vocab_size", vocab),
            ("num_hidden_layers", layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", heads),
            ("hidden_size", width),
            ("intermediate_size", 3 * width),
            ("max_position_embeddings", context),
        ] {
            fields.insert(name.into(), size.into());
        }
        if experts > 0 {
            fields.insert("num_local_experts".into(), experts.into());
            fields.insert("num_experts_per_tok".into(), experts.min(2).into());
        }
        ConfigFields::of(JsonObject::of("the model", fields))
    }
}
