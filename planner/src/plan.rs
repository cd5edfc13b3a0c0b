//! A plan of training as a value: what the ranks are, and what each of them does in a step.

use std::fmt;

use autograd::checkpoint;
use distributed::{
    buckets::BucketOptions,
    pipeline::{Checked, Limits, Lowering, PipeShape, Schedule, ScheduleKind, StagePlacement},
    plan::{Axis, ParallelPlan},
    train::TrainStepBuilder,
    zero::{ZeroOptions, ZeroStage},
};
use numcore::{Error, Result, Runtime, Within};
use serde::{Deserialize, Serialize};

/// A plan of training: the sizes of the axes, the schedule, and what is sharded and recomputed. Its text is TOML.
///
/// ```
/// use planner::TrainingPlan;
/// # fn main() -> numcore::Result<()> {
/// let plan = TrainingPlan::from_toml("data = 4\npipe = 2\nschedule = \"1F1B\"\nmicro_batches = 8\nzero = 1")?;
/// assert_eq!((plan.world(), plan.parallel()?.world()), (8, 8));
/// assert_eq!(TrainingPlan::from_toml(&plan.to_toml()?)?, plan);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingPlan {
    /// The number of replicas.
    pub data: usize,
    /// The number of ranks that hold the shards of one replica.
    pub shard: usize,
    /// The number of parts of each sequence.
    pub context: usize,
    /// The number of pieces of each layer.
    pub tensor: usize,
    /// The number of pipeline ranks.
    pub pipe: usize,
    /// The number of ranks that have all experts together. It is laid over data, shard and context.
    pub expert: usize,
    /// True if values between layers are cut along the sequence, over the ranks along tensor.
    pub sequence_parallel: bool,
    /// The name of the pipeline's schedule.
    pub schedule: String,
    /// The number of stages on each pipeline rank.
    pub stages_per_rank: usize,
    /// The number of micro-batches of a rank in a step.
    pub micro_batches: usize,
    /// The number of sequences in a micro-batch of one rank along data and shard.
    pub micro_batch: usize,
    /// The stage of ZeRO; 0 shards nothing.
    pub zero: u8,
    /// The values that backward computes again.
    pub recompute: Recompute,
    /// True if gradients of half-precision parameters are added up, and travel, in `f32`.
    pub main_gradients: bool,
}

/// The values that a backward pass computes again, in each block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing but what the model itself says.
    #[default]
    Nothing,
    /// Everything but the outputs of products, attention and exchanges.
    Pointwise,
    /// Everything but exchanges.
    Block,
}

impl Recompute {
    /// All choices, from the one that keeps most.
    pub const ALL: [Recompute; 3] = [Recompute::Nothing, Recompute::Pointwise, Recompute::Block];

    /// Runs `f`, a block of a model, in a scope of this recomputation.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> T {
        match self {
            Recompute::Nothing => f(),
            Recompute::Pointwise => autograd::Checkpoint::keep(autograd::products).run(f),
            Recompute::Block => checkpoint(f),
        }
    }
}

impl Default for TrainingPlan {
    /// One rank, with one sequence in a step.
    fn default() -> Self {
        TrainingPlan {
            data: 1,
            shard: 1,
            context: 1,
            tensor: 1,
            pipe: 1,
            expert: 1,
            sequence_parallel: false,
            schedule: ScheduleKind::OneFOneB.to_string(),
            stages_per_rank: 1,
            micro_batches: 1,
            micro_batch: 1,
            zero: 0,
            recompute: Recompute::Nothing,
            main_gradients: false,
        }
    }
}

impl TrainingPlan {
    /// Reads a plan. Fields that are not named have the values of the default.
    ///
    /// # Errors
    /// Fails for text that is no TOML, an unknown field, and a plan that [`check`](TrainingPlan::check) refuses.
    pub fn from_toml(text: &str) -> Result<Self> {
        let plan: TrainingPlan =
            toml::from_str(text).map_err(|why| Error::config("TrainingPlan", "plan", why.to_string()))?;
        plan.check()?;
        Ok(plan)
    }

    /// The text of the plan.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|why| Error::internal("TrainingPlan::to_toml", why.to_string()))
    }

    /// Checks that ranks can be arranged so, and that the schedule has this shape.
    ///
    /// # Errors
    /// Fails as [`ParallelPlan::new`] and [`ScheduleKind::generate`] do, and names the field.
    pub fn check(&self) -> Result<()> {
        let whole = [
            ("micro_batches", self.micro_batches),
            ("micro_batch", self.micro_batch),
            ("stages_per_rank", self.stages_per_rank),
        ];
        for (field, value) in whole {
            if value == 0 || value > 1 << 26 {
                let why = format!("`{field}` is {value}, and must be at least 1 and at most 2^26");
                return Err(Error::config("TrainingPlan", field, why));
            }
        }
        let axes = [
            ("data", self.data),
            ("shard", self.shard),
            ("context", self.context),
            ("tensor", self.tensor),
            ("pipe", self.pipe),
        ];
        // Batches and ranks are multiplied with each other.
        let ranks = axes.iter().try_fold(1_usize, |all, (_, size)| all.checked_mul(*size));
        if ranks.is_none_or(|ranks| ranks > 1 << 30) {
            let why = format!("{} ranks or more; a plan has at most 2^30", 1_u64 << 30);
            return Err(Error::config("TrainingPlan", "axes", why));
        }
        let batch = [self.data, self.shard, self.micro_batches, self.micro_batch];
        let sequences = batch.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
        if sequences.is_none_or(|sequences| sequences > 1 << 40) {
            let why = format!("{} sequences or more in a step; a plan has at most 2^40", 1_u64 << 40);
            return Err(Error::config("TrainingPlan", "micro_batches", why));
        }
        self.parallel()?;
        self.zero_stage()?;
        self.kind()?.check(self.shape()).within("TrainingPlan")
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.data * self.shard * self.context * self.tensor * self.pipe
    }

    /// The ranks among which the examples of a step are shared out.
    pub fn readers(&self) -> usize {
        self.data * self.shard
    }

    /// The number of sequences in a step of all ranks.
    pub fn global_batch(&self) -> usize {
        self.readers() * self.micro_batches * self.micro_batch
    }

    /// The arrangement of ranks, for a [`Mesh`](distributed::mesh::Mesh) and for
    /// [`Verify`](crate::verify::Verify).
    pub fn parallel(&self) -> Result<ParallelPlan> {
        ParallelPlan::of(self.axes())
    }

    /// The arrangement with other sizes along data and pipe.
    pub(crate) fn axes(&self) -> [(Axis, usize); 6] {
        [
            (Axis::Data, self.data),
            (Axis::Shard, self.shard),
            (Axis::Context, self.context),
            (Axis::Tensor, self.tensor),
            (Axis::Pipe, self.pipe),
            (Axis::Expert, self.expert),
        ]
    }

    /// The kind of the schedule; 1F1B, which runs one micro-batch after another, for a model in one stage.
    pub fn kind(&self) -> Result<ScheduleKind> {
        let kind = self.schedule.parse().within("TrainingPlan")?;
        Ok(if self.stages() == 1 { ScheduleKind::OneFOneB } else { kind })
    }

    /// The shape of the schedule.
    pub fn shape(&self) -> PipeShape {
        PipeShape { ranks: self.pipe, stages_per_rank: self.stages_per_rank, micro_batches: self.micro_batches }
    }

    /// The placement of stages on pipeline ranks.
    pub fn placement(&self) -> Result<StagePlacement> {
        self.kind()?.placement(self.shape())
    }

    /// The schedule of passes, without messages.
    pub fn passes(&self) -> Result<Schedule> {
        self.kind()?.generate(self.shape())
    }

    /// The schedule that a [`PipelineModel`](distributed::pipeline::PipelineModel) runs.
    pub fn checked(&self) -> Result<Checked> {
        let sharded = self.zero_stage()?.shards_parameters();
        self.passes()?.lower(Lowering { sharded, ..Lowering::default() })?.check(Limits::default())
    }

    /// The stage of ZeRO, for [`TrainStepBuilder::zero`](distributed::train::TrainStepBuilder::zero).
    pub fn zero_stage(&self) -> Result<ZeroStage> {
        let all = [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
        all.get(usize::from(self.zero)).copied().ok_or_else(|| {
            let why = format!("`zero` is {}, and there are the stages 0 to 3", self.zero);
            Error::config("TrainingPlan", "zero", why)
        })
    }

    /// Sets the options of a training step that the plan decides. They are ZeRO or buckets, main gradients, experts
    /// over ranks, and the number of micro-batches of a model in one stage. That of a pipeline is part of its input.
    pub fn configure<'m, R: Runtime>(&self, builder: TrainStepBuilder<'m, R>) -> Result<TrainStepBuilder<'m, R>> {
        let (stage, main_gradients) = (self.zero_stage()?, self.main_gradients);
        let builder = match stage {
            ZeroStage::None => builder.buckets(BucketOptions { main_gradients, ..BucketOptions::default() }),
            _ => builder.zero(ZeroOptions { stage, main_gradients, ..ZeroOptions::default() }),
        };
        let builder = if self.expert > 1 { builder.experts() } else { builder };
        Ok(if self.stages() == 1 { builder.accumulation(self.micro_batches) } else { builder })
    }

    /// The number of stages of the model.
    pub fn stages(&self) -> usize {
        self.pipe.saturating_mul(self.stages_per_rank)
    }
}

/// A line: axes of several ranks, then what differs from the default.
impl fmt::Display for TrainingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["data", "shard", "context", "tensor", "pipe", "expert"];
        let sizes = self.axes().map(|(_, size)| size);
        let axes: Vec<String> = names
            .iter()
            .zip(sizes)
            .filter(|(_, size)| *size > 1)
            .map(|(name, size)| format!("{name} {size}"))
            .collect();
        let axes = if axes.is_empty() { "one rank".into() } else { axes.join(" × ") };
        write!(f, "{axes}, {} × {} sequences", self.micro_batches, self.micro_batch)?;
        if self.sequence_parallel && self.tensor > 1 {
            write!(f, ", sequence parallel")?;
        }
        if self.pipe > 1 {
            write!(f, ", {}", self.schedule)?;
        }
        if self.stages_per_rank > 1 {
            write!(f, " of {} stages a rank", self.stages_per_rank)?;
        }
        if self.zero > 0 {
            write!(f, ", ZeRO {}", self.zero)?;
        }
        match self.recompute {
            Recompute::Nothing => Ok(()),
            Recompute::Pointwise => write!(f, ", recomputes all but products"),
            Recompute::Block => write!(f, ", recomputes blocks"),
        }
    }
}
