//! A random program: all of it follows from its seed.

use weftgrad::{
    distributed::{
        buckets::{GradCompression, PowerSgd},
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
pub enum How {
    /// Every rank has the model.
    Buckets { first: usize, others: usize, compression: GradCompression },
    /// Sharded data parallelism (ZeRO).
    Zero { stage: ZeroStage, whole: bool, state: StatePlace },
    /// Hybrid sharding: `replicas` replicas of the shards.
    Hybrid { replicas: usize, stage: ZeroStage },
    /// Layers cut over ranks, with replicas or shards on the ranks that are left.
    Tensor { cut: TensorCut, zero: Option<ZeroStage> },
    /// Sequences cut over `context` ranks, and layers over others, with replicas or shards on the ranks that are left.
    Context { context: usize, exchange: ContextExchange, cut: TensorCut, zero: Option<ZeroStage> },
    /// In stages on `p` ranks, each cut, and with replicas or sharded on the ranks that are left.
    Pipeline { stages: Stages, cut: TensorCut, zero: Option<ZeroStage> },
    /// In stages whose sequences are cut over two ranks, and the rest like [`How::Pipeline`].
    ContextPipeline { stages: Stages, exchange: ContextExchange, cut: TensorCut, zero: Option<ZeroStage> },
    /// Experts over `experts` of the ranks that read different tokens, in stages if there are several.
    Experts { experts: usize, stages: Stages, zero: Option<ZeroStage> },
}

/// A pipeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stages {
    pub kind: ScheduleKind,
    /// The number of ranks along it.
    pub p: usize,
    /// Stages on each rank.
    pub v: usize,
    /// Micro-batches of a run.
    pub micros: usize,
}

impl Stages {
    /// A pipeline over `p` ranks.
    fn pick(p: usize, pick: &mut impl FnMut(usize) -> usize) -> Self {
        loop {
            let kind = ScheduleKind::ALL[pick(ScheduleKind::ALL.len())];
            let stages = Stages { kind, p, v: 1 + pick(2), micros: p * (1 + pick(2)) };
            if kind.generate(stages.shape()).is_ok() {
                return stages;
            }
        }
    }

    /// The schedule.
    pub fn checked(self) -> weftgrad::Result<Checked> {
        self.kind.generate(self.shape())?.lower(Lowering::default())?.check(Limits::default())
    }

    fn shape(self) -> PipeShape {
        PipeShape { ranks: self.p, stages_per_rank: self.v, micro_batches: self.micros }
    }
}

/// How layers are cut over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TensorCut {
    /// The number of ranks, 1 or 2.
    pub ranks: usize,
    /// Whether sequences are cut between the layers.
    pub sequence: bool,
    /// In how many pieces layers exchange parts of those.
    pub pieces: usize,
}

impl TensorCut {
    /// A cut of a model that some ranks have.
    fn pick(ranks: usize, pick: &mut impl FnMut(usize) -> usize) -> Self {
        let cuts = ranks.is_multiple_of(2) && pick(2) == 0;
        TensorCut { ranks: 1 + usize::from(cuts), sequence: pick(2) == 0, pieces: 1 + pick(3) }
    }
}

/// The random program of one seed.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The seed that the program follows from.
    pub seed: u64,
    /// The number of ranks.
    pub ranks: usize,
    /// The training strategy.
    pub how: How,
    /// The model and the data that are trained.
    pub task: Task,
    /// Examples of a step.
    pub examples: usize,
    /// Micro-batches of a step, or runs of the pipeline.
    pub accumulation: usize,
    /// The number of steps.
    pub steps: usize,
    /// The steps after which a checkpoint is saved.
    pub saves: Vec<usize>,
    /// The largest gradient norm, if there is one.
    pub max_norm: Option<f64>,
    /// A fault: on which rank, in which of its calls, and what.
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
                let compression =
                    [GradCompression::Own, [GradCompression::Bf16, GradCompression::PowerSgd(compressed)][pick(2)]][k];
                How::Buckets { first: 1 + pick(2000), others: 1 + pick(5000), compression }
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

    /// The pipeline, where there is one.
    pub fn stages(self) -> Option<Stages> {
        match self {
            How::Pipeline { stages, .. } | How::ContextPipeline { stages, .. } => Some(stages),
            How::Experts { stages, .. } if stages.p > 1 => Some(stages),
            _ => None,
        }
    }

    /// The number of ranks that sequences are cut over.
    pub fn context(self) -> usize {
        match self {
            How::Context { context, .. } => context,
            How::ContextPipeline { .. } => 2,
            _ => 1,
        }
    }

    /// The number of ranks that each layer is cut over.
    pub fn tensor(self) -> usize {
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
    /// The program of a seed.
    pub fn of(seed: u64) -> Self {
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
    /// AdamW; or, where gradients are compressed, the largest distance of two runs of AdamW after that number of steps.
    pub fn bound(&self) -> f64 {
        if matches!(self.how, How::Buckets { compression: GradCompression::Bf16 | GradCompression::PowerSgd(_), .. }) {
            0.5
        } else {
            1e-9
        }
    }

    /// Which copy of the model a rank has, or has a part of.
    pub fn replica(&self, rank: usize) -> usize {
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

    /// This program on one rank.
    pub fn alone(&self) -> Self {
        Program {
            how: How::Buckets { first: 1000, others: 1000, compression: GradCompression::Own },
            ranks: 1,
            fault: None,
            ..self.clone()
        }
    }
}
