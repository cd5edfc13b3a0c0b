//! A random training program, which follows from its seed alone.

use weftgrad::{
    adaptive::powersgd::PowerSgd,
    distributed::{
        buckets::GradCompression,
        comm::Fault,
        context_parallel::ContextExchange,
        pipeline::{Checked, Limits, Lowering, PipeShape, ScheduleKind},
        zero::{StatePlace, ZeroStage},
    },
    rng::Philox,
};

use crate::task::Task;

/// The training strategy of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum How {
    /// Data parallelism: every rank has the model, and gradients are reduced in buckets.
    Buckets { first: usize, others: usize, compression: GradCompression, power: Option<PowerSgd> },
    /// Sharded data parallelism (ZeRO).
    Zero { stage: ZeroStage, whole: bool, state: StatePlace },
    /// Hybrid sharding: `replicas` replicas of the shards.
    Hybrid { replicas: usize, stage: ZeroStage },
    /// Layers cut over ranks, with replicas or shards on the remaining ranks.
    Tensor { cut: TensorCut, zero: Option<ZeroStage> },
    /// Sequences cut over `context` ranks, and layers over others, with replicas or shards on the remaining ranks.
    Context { context: usize, exchange: ContextExchange, cut: TensorCut, zero: Option<ZeroStage> },
    /// A pipeline over `p` ranks whose stages may be cut, with replicas or shards on the remaining ranks.
    Pipeline { stages: Stages, cut: TensorCut, zero: Option<ZeroStage> },
    /// A pipeline whose sequences are cut over two ranks; the rest like [`How::Pipeline`].
    ContextPipeline { stages: Stages, exchange: ContextExchange, cut: TensorCut, zero: Option<ZeroStage> },
    /// Experts over `experts` of the ranks that read different tokens, in a pipeline if there are several stages.
    Experts { experts: usize, stages: Stages, zero: Option<ZeroStage> },
}

/// The shape of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stages {
    pub kind: ScheduleKind,
    /// The number of ranks along the pipeline.
    pub p: usize,
    /// The number of stages on each rank.
    pub v: usize,
    /// The number of micro-batches of a run.
    pub micros: usize,
}

impl Stages {
    /// Draws a pipeline over `p` ranks.
    fn pick(p: usize, pick: &mut impl FnMut(usize) -> usize) -> Self {
        loop {
            let kind = ScheduleKind::ALL[pick(ScheduleKind::ALL.len())];
            let stages = Stages { kind, p, v: 1 + pick(2), micros: p * (1 + pick(2)) };
            if kind.generate(stages.shape()).is_ok() {
                return stages;
            }
        }
    }

    /// The pipeline's schedule, lowered and checked.
    pub(crate) fn checked(self) -> weftgrad::Result<Checked> {
        self.kind.generate(self.shape())?.lower(Lowering::default())?.check(Limits::default())
    }

    fn shape(self) -> PipeShape {
        PipeShape { ranks: self.p, stages_per_rank: self.v, micro_batches: self.micros }
    }
}

/// The cut of layers over ranks (tensor parallelism).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TensorCut {
    /// The number of ranks, 1 or 2.
    pub ranks: usize,
    /// True if sequences are cut between the layers.
    pub sequence: bool,
    /// The number of pieces in which layers exchange parts of sequences.
    pub pieces: usize,
}

impl TensorCut {
    /// Draws a cut of a model on `ranks` ranks; an even number may be cut in two.
    fn pick(ranks: usize, pick: &mut impl FnMut(usize) -> usize) -> Self {
        let cuts = ranks.is_multiple_of(2) && pick(2) == 0;
        TensorCut { ranks: 1 + usize::from(cuts), sequence: pick(2) == 0, pieces: 1 + pick(3) }
    }
}

/// The random program of one seed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Program {
    /// The seed from which the program follows.
    pub seed: u64,
    /// The number of ranks.
    pub ranks: usize,
    /// The training strategy.
    pub how: How,
    /// The model and its data.
    pub task: Task,
    /// The number of examples of a step.
    pub examples: usize,
    /// The number of micro-batches of a step, or of runs of the pipeline.
    pub accumulation: usize,
    /// The number of steps.
    pub steps: usize,
    /// The steps after which a checkpoint is saved.
    pub saves: Vec<usize>,
    /// The largest gradient norm, to which gradients are clipped, if there is one.
    pub max_norm: Option<f64>,
    /// A fault: its rank, the index of the rank's call, and its kind.
    pub fault: Option<(usize, u64, Fault)>,
}

/// A divisor of a number of ranks, evenly drawn.
fn divisor(n: usize, pick: &mut impl FnMut(usize) -> usize) -> usize {
    let all: Vec<usize> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
    all[pick(all.len())]
}

impl How {
    fn pick(ranks: usize, pick: &mut impl FnMut(usize) -> usize) -> Self {
        match pick(13) {
            k @ 0..2 => {
                let compressed = PowerSgd { rank: 1 + pick(2), start_iter: pick(2) as u64, ..Default::default() };
                let plain = (GradCompression::Own, None);
                let kinds = [(GradCompression::Bf16, None), (GradCompression::Own, Some(compressed))];
                let (compression, power) = [plain, kinds[pick(2)]][k];
                How::Buckets { first: 1 + pick(2000), others: 1 + pick(5000), compression, power }
            }
            2..4 => {
                let state = [StatePlace::Device, StatePlace::Host][pick(2)];
                How::Zero { stage: ZeroStage::ALL[pick(3)], whole: pick(2) == 0, state }
            }
            4 => How::Hybrid { replicas: divisor(ranks, pick), stage: ZeroStage::ALL[pick(3)] },
            5 => {
                How::Tensor { cut: TensorCut::pick(ranks, pick), zero: (pick(2) == 0).then(|| ZeroStage::ALL[pick(3)]) }
            }
            6 if ranks.is_multiple_of(2) => {
                let exchange = [ContextExchange::AllGather, ContextExchange::Ring][pick(2)];
                let cut = TensorCut::pick(ranks / 2, pick);
                How::Context { context: 2, exchange, cut, zero: (pick(2) == 0).then(|| ZeroStage::ALL[pick(3)]) }
            }
            7 if ranks.is_multiple_of(4) => {
                let exchange = [ContextExchange::AllGather, ContextExchange::Ring][pick(2)];
                let p = 2 * divisor(ranks / 4, pick);
                let (stages, cut) = (Stages::pick(p, pick), TensorCut::pick(ranks / (2 * p), pick));
                How::ContextPipeline { stages, exchange, cut, zero: (pick(2) == 0).then(|| ZeroStage::ALL[pick(3)]) }
            }
            8..10 => {
                let stages = Stages::pick(divisor(ranks, pick), pick);
                let replicas = ranks / stages.p;
                let experts = [1, 2, 4].into_iter().filter(|&e| replicas.is_multiple_of(e)).collect::<Vec<_>>();
                let experts = experts[pick(experts.len())];
                How::Experts { experts, stages, zero: (pick(2) == 0).then(|| ZeroStage::ALL[pick(3)]) }
            }
            k => {
                let (p, zero) = (divisor(ranks, pick), (k > 10).then(|| ZeroStage::ALL[pick(3)]));
                let cut = TensorCut::pick(ranks / p, pick);
                How::Pipeline { stages: Stages::pick(p, pick), cut, zero }
            }
        }
    }

    /// The shape of the pipeline, if there is one.
    pub(crate) fn stages(self) -> Option<Stages> {
        match self {
            How::Pipeline { stages, .. } | How::ContextPipeline { stages, .. } => Some(stages),
            How::Experts { stages, .. } if stages.p > 1 => Some(stages),
            _ => None,
        }
    }

    /// The number of ranks over which sequences are cut.
    pub(crate) fn context(self) -> usize {
        match self {
            How::Context { context, .. } => context,
            How::ContextPipeline { .. } => 2,
            _ => 1,
        }
    }

    /// The number of ranks over which each layer is cut.
    pub(crate) fn tensor(self) -> usize {
        match self {
            How::Tensor { cut, .. }
            | How::Context { cut, .. }
            | How::Pipeline { cut, .. }
            | How::ContextPipeline { cut, .. } => cut.ranks,
            _ => 1,
        }
    }
}

impl Program {
    /// Draws the program of a seed.
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = Philox::new(seed, 1);
        let mut pick = |n: usize| random.below(n as u64) as usize;
        let ranks = [1, 2, 3, 4, 5, 8][pick(6)];
        let how = How::pick(ranks, &mut pick);
        let (accumulation, steps) = (1 + pick(3), 2 + pick(4));
        let (layers, examples) = match how.stages() {
            Some(Stages { p, v, micros, .. }) => {
                let replicas = ranks / (p * how.tensor() * how.context());
                (p * v, replicas * accumulation * micros * (1 + pick(2)))
            }
            None => (1, ranks * accumulation + pick(12)),
        };
        let task = match pick(3) {
            _ if matches!(how, How::Experts { .. }) => Task::Experts { layers: layers.max(2) },
            k if k == 0 || how.tensor() * how.context() > 1 => Task::Gpt { layers: layers.max(2) },
            _ => Task::Mlp { widths: (0..1 + layers + pick(4)).map(|_| 1 + pick(40)).collect() },
        };
        let first = 1 + pick(steps - 1);
        let mut saves = vec![first, first + pick(steps - first)];
        saves.dedup();
        let max_norm = (pick(2) == 0).then(|| 0.1 + pick(10) as f64);
        let faulty = (pick(2) == 0).then(|| pick(ranks));
        let fault = faulty.map(|rank| {
            let (call, fault) = Fault::seeded(seed ^ 0x5eed, 160);
            (rank, call, fault)
        });
        Program { seed, ranks, how, task, examples, accumulation, steps, saves, max_norm, fault }
    }

    /// The largest distance of the weights from those of one rank: rounding in `f64`, grown by a handful of steps of
    /// AdamW. Where gradients are compressed, it is the largest distance of two runs of AdamW after that number of
    /// steps.
    pub(crate) fn bound(&self) -> f64 {
        match self.how {
            How::Buckets { compression: GradCompression::Own, power: None, .. } => 1e-9,
            How::Buckets { .. } => 0.5,
            _ => 1e-9,
        }
    }

    /// The index of the copy of the model of which a rank holds all or a part.
    pub(crate) fn replica(&self, rank: usize) -> usize {
        match self.how {
            How::Pipeline { stages, cut: TensorCut { ranks: 1, .. }, .. } => rank / stages.p,
            // On a mesh, stages are outermost.
            How::Pipeline { stages, .. } | How::ContextPipeline { stages, .. } => {
                let (cut, p) = (self.how.tensor() * self.how.context(), stages.p);
                rank / cut % (self.ranks / (p * cut))
            }
            // Each has its own.
            How::Experts { .. } => 0,
            how => rank / how.tensor(),
        }
    }

    /// The program on one rank, without a fault.
    pub(crate) fn alone(&self) -> Self {
        Program {
            how: How::Buckets { first: 1000, others: 1000, compression: GradCompression::Own, power: None },
            ranks: 1,
            fault: None,
            ..self.clone()
        }
    }
}
