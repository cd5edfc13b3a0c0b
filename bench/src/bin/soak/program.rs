//! A random program: all of it follows from its seed.

use weftgrad::{
    distributed::{comm::Fault, zero::ZeroStage},
    rng::Philox,
};

/// How it trains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    /// Every rank has the model.
    Buckets { first: usize, others: usize },
    /// Sharded.
    Zero { stage: ZeroStage, whole: bool },
}

/// What is run.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// What it follows from.
    pub seed: u64,
    /// Ranks.
    pub ranks: usize,
    /// How they train.
    pub how: How,
    /// Sizes of the model's layers.
    pub widths: Vec<usize>,
    /// Examples of a step.
    pub examples: usize,
    /// Micro-batches of a step.
    pub accumulation: usize,
    /// Steps.
    pub steps: usize,
    /// Steps after which a checkpoint is saved.
    pub save_after: usize,
    /// The largest gradient norm, if there is one.
    pub max_norm: Option<f64>,
    /// A fault: on which rank, in which of its calls, and what.
    pub fault: Option<(usize, u64, Fault)>,
}

impl Program {
    /// The program of a seed.
    pub fn of(seed: u64) -> Self {
        let mut random = Philox::new(seed, 1);
        let mut pick = |n: usize| random.below(n as u64) as usize;
        let ranks = [1, 2, 3, 4, 5, 8][pick(6)];
        let how = match pick(4) {
            0 => How::Buckets { first: 1 + pick(2000), others: 1 + pick(5000) },
            k => How::Zero { stage: ZeroStage::ALL[k - 1], whole: pick(2) == 0 },
        };
        let widths = (0..2 + pick(4)).map(|_| 1 + pick(40)).collect();
        let (examples, accumulation, steps) = (ranks + pick(12), 1 + pick(3), 2 + pick(4));
        let save_after = 1 + pick(steps - 1);
        let max_norm = (pick(2) == 0).then(|| 0.1 + pick(10) as f64);
        let faulty = (pick(2) == 0).then(|| pick(ranks));
        let fault = faulty.map(|rank| {
            let (call, fault) = Fault::seeded(seed ^ 0x5eed, 120);
            // Nobody is there to notice that a world of one leaves a call out.
            (rank, call, if ranks == 1 && fault == Fault::Skip { Fault::Error } else { fault })
        });
        Program { seed, ranks, how, widths, examples, accumulation, steps, save_after, max_norm, fault }
    }
}
