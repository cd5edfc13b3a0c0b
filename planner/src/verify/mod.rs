//! Comparison of a training step on many ranks with the step of one rank, for a model of one's own.
//!
//! [`Verify`] trains the model twice for some steps: on one rank, and on the ranks of a plan, which are threads. It
//! compares initial weights, losses, gradients, norms, updates and buffers. If they differ, it runs the step in which
//! they begin to differ again. Then it compares the outputs of op calls, and names the first that differs.

mod call;
mod cause;
mod compare;
mod forward;
mod gradients;
mod observed;
mod passes;
mod record;
mod report;
mod rows;
mod weights;

use std::time::Duration;

use distributed::{
    combinations::Feature,
    comm::Ranks,
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    strategy::BatchShare,
    train::{StepInput, TrainStep},
};
use nn::Module;
use numcore::{Error, Result, Runtime, Tensor, Within};

pub use cause::Cause;
pub use report::{Difference, StepPart, Verification};

use compare::{AllowedDistances, Comparison};
use record::{RankRecord, Trial};

/// A comparison of a plan with one rank.
///
/// ```
/// use distributed::{plan::{Axis, ParallelPlan}, train::{Loss, TrainStep}};
/// use nn::{Forward, Init, Linear};
/// use numcore::{DType, Tensor};
/// use optim::AdamWConfig;
/// use planner::verify::Verify;
/// use runtime_cpu::Cpu;
/// # fn main() -> numcore::Result<()> {
/// let plan = ParallelPlan::of([(Axis::Data, 2)])?;
/// let report = Verify::new(plan).run(
///     |_| Ok(Cpu::new()),
///     |mesh| {
///         let model = Linear::new(&Init::new(mesh.world().runtime(), 42).dtype(DType::F64), 4, 1)?;
///         let step = TrainStep::builder(mesh, &model).optimizer(AdamWConfig::default()).build()?;
///         Ok((model, step))
///     },
///     |rt, step| Ok(vec![Tensor::uniform(rt, [8, 5], DType::F64, -1.0, 1.0, step)?]),
///     |model, examples| {
///         use numcore::ops::{PointwiseOps, ReduceOps, ViewOps};
///         let rows = autograd::Var::new(examples.tensors[0].clone());
///         let (x, y) = (rows.narrow(1, 0, 4)?, rows.narrow(1, 4, 1)?);
///         Loss::sum(model.forward(&x)?.sub(&y)?.square()?.sum_all()?, examples.rows() as f64)
///     },
/// )?;
/// report.assert_equal();
/// # Ok(())
/// # }
/// # use distributed::comm::Communicator;
/// ```
#[derive(Clone, Debug)]
pub struct Verify {
    plan: ParallelPlan,
    steps: u64,
    timeout: Duration,
}

/// The examples of a micro-batch on a rank.
pub struct Examples<'a, R: Runtime> {
    /// The ranks: of the plan, or one.
    pub mesh: &'a Mesh<R>,
    /// The number of the step, from 0.
    pub step: u64,
    /// The number of the micro-batch in the step, from 0.
    pub micro_batch: usize,
    /// The share of every batch that this rank reads.
    pub share: BatchShare,
    /// This rank's rows of the step's tensors, each `[rows, ..]`.
    pub tensors: Vec<Tensor<R>>,
}

impl<R: Runtime> Examples<'_, R> {
    /// The number of rows; 0 if there are no tensors.
    pub fn rows(&self) -> usize {
        self.tensors.first().and_then(|tensor| tensor.shape().dims().first().copied()).unwrap_or(0)
    }
}

impl Verify {
    /// Compares two steps on the ranks of a plan with those of one rank.
    pub fn new(plan: ParallelPlan) -> Self {
        Verify { plan, steps: 2, timeout: Duration::from_secs(60) }
    }

    /// Sets the number of steps, at least 1.
    pub fn steps(self, steps: u64) -> Self {
        Verify { steps: steps.max(1), ..self }
    }

    /// Sets the time that a collective call may take.
    pub fn timeout(self, timeout: Duration) -> Self {
        Verify { timeout, ..self }
    }

    /// Trains on one rank and on the ranks of the plan, and compares.
    ///
    /// `runtime(rank)` makes the runtime of a rank. `make(mesh)` builds the model and its training step, as in a
    /// program; it is called with a mesh of one rank too. `batch(runtime, step)` returns the tensors of all examples of
    /// a step, each `[rows, ..]`. `input(model, examples)` computes the loss of a micro-batch or, for a model in
    /// stages, returns its `MicroBatches`. Every function must return the same at every call with the same arguments.
    ///
    /// If the model draws random values, as for dropout, the one rank takes the others' shares in turn, with their
    /// streams of random values. Otherwise it takes all their examples at once.
    ///
    /// # Errors
    /// Fails if a run fails, on one rank or on many; the error says on which. The rows of a step must be a multiple of
    /// its micro-batches times the shares of ranks. A model in stages may draw no random values, since each stage has a
    /// stream of its own. Nor may a model whose ranks exchange values of different examples, unless nothing differs. A
    /// difference is otherwise not an error, but part of the report.
    pub fn run<R, M, I>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        make: impl Fn(&Mesh<R>) -> Result<(M, TrainStep<R>)> + Sync,
        batch: impl Fn(&R, u64) -> Result<Vec<Tensor<R>>> + Sync,
        input: impl Fn(&M, &Examples<'_, R>) -> Result<I> + Sync,
    ) -> Result<Verification>
    where
        R: Runtime,
        M: Module<R>,
        I: Into<StepInput<R>>,
    {
        let shares = self.plan.size(Axis::Data) * self.plan.size(Axis::Shard);
        let alone = ParallelPlan::new(1, [])?;
        let trial = |plan: &ParallelPlan, shares: usize, steps: u64, observed: Option<u64>| {
            let trial = Trial { plan: plan.clone(), shares, steps, observed };
            let ranks = Ranks::new(plan.world()).timeout(self.timeout);
            ranks.run(&runtime, |comm| trial.run(comm, &make, &batch, &input))
        };
        let one = |shares: usize, steps: u64, observed: Option<u64>| -> Result<RankRecord> {
            let records = trial(&alone, shares, steps, observed).within("the run on one rank")?;
            records.into_iter().next().ok_or_else(|| Error::internal("Verify", "the run on one rank has no record"))
        };
        let many = |steps: u64, observed: Option<u64>| {
            trial(&self.plan, 0, steps, observed).within(format!("the run on {} ranks", self.plan.world()))
        };
        let mut taken = 1;
        let mut reference = one(1, self.steps, None)?;
        if reference.draws && self.plan.size(Axis::Pipe) > 1 {
            let why = "each stage of a pipeline draws random values of its own, which are not those of one rank: set dropout to 0";
            return Err(Error::usage("Verify::run", why));
        }
        let records = many(self.steps, None)?;
        let mixes = records.iter().any(|record| record.mixes);
        // Chunks in canonical order are those of the shares, and have the bits of one rank if nothing else is cut.
        let is_canonical = reference.features.has(Feature::Canonical) && !mixes;
        if (reference.draws || is_canonical) && shares > 1 {
            (taken, reference) = (shares, one(shares, self.steps, None)?);
        }
        let allowed = AllowedDistances::of(&reference, is_canonical && shares == self.plan.world());
        let comparison = Comparison { plan: &self.plan, reference: &reference, records: &records, allowed };
        let mut report = Verification::new(self.plan.clone(), self.steps, taken > 1, comparison.not_compared());
        let Some(mut found) = comparison.first_difference() else { return Ok(report) };
        if reference.draws && mixes && found.stage != StepPart::InitialWeights {
            let why = "the model draws random values and exchanges values between ranks that read other examples, as `SyncBatchNorm` and \
                       losses of all ranks do, which one rank that takes shares one after the other cannot: set dropout to 0";
            return Err(Error::usage("Verify::run", why));
        }
        drop((reference, records));
        let at = found.step;
        // Forward passes with one loss have one result.
        let forward = match found.stage {
            StepPart::Loss => {
                let (mut reference, mut records) = (one(taken, at + 1, Some(at))?, many(at + 1, Some(at))?);
                forward::join_experts(&mut reference, &mut records);
                let comparison = Comparison { plan: &self.plan, reference: &reference, records: &records, allowed };
                comparison.first_call(at as usize)
            }
            _ => None,
        };
        if forward.is_some() {
            found.cause = Cause::Follows;
        }
        report.differences.extend(forward);
        report.differences.push(found);
        Ok(report)
    }
}
