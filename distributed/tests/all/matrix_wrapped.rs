//! Wrapped steps of the ways that `matrix` draws: each equals one rank, or is refused by the table of combinations.

use adaptive::balance::BalancePolicy;
use distributed::combinations::{COMBINATIONS, Refused};

use crate::{
    matrix::{features, ways},
    prelude::*,
};

/// A wrapper of a step, or an option that the matrix does not draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrapped {
    /// A replica without examples, another one in each step.
    Idle,
    /// Batches shared out by speeds, which differ.
    Balanced,
    /// Gradient descent on each replica, whose weights are averaged after every step.
    Local,
    /// A reducer of one's own.
    Reducer,
    /// Parameters in half precision.
    Halves(DType),
}

const ALL: [Wrapped; 6] = [
    Wrapped::Idle,
    Wrapped::Balanced,
    Wrapped::Local,
    Wrapped::Reducer,
    Wrapped::Halves(DType::BF16),
    Wrapped::Halves(DType::F16),
];

impl Wrapped {
    fn feature(self) -> Feature {
        match self {
            Wrapped::Idle => Feature::Idle,
            Wrapped::Balanced => Feature::Uneven,
            Wrapped::Local => Feature::Local,
            Wrapped::Reducer => Feature::Reducer,
            Wrapped::Halves(_) => Feature::HalfParameters,
        }
    }

    /// The drawn way, with what this can be compared by: batches of other sizes have other masks and balance losses.
    fn of(self, mut way: Way) -> Way {
        (way.gpt.dropout, way.router) = (0.0, [0.0; 2]);
        way.sgd = self == Wrapped::Local;
        way.max_norm = way.max_norm.filter(|_| !way.sgd);
        if way.stages.is_none() {
            // Shares of other sizes.
            way.examples = 13;
        }
        if self == Wrapped::Reducer {
            way.buckets.canonical = false;
            // Every stage of ZeRO refuses it.
            way.zero.stage = if way.accumulation > 1 { ZeroStage::None } else { way.zero.stage };
        }
        if let Wrapped::Halves(dtype) = self {
            (way.dtype, way.zero.reduce_dtype) = (dtype, None);
        }
        way
    }

    /// Tells whether the way has replicas that can differ.
    fn has_replicas(self, way: &Way) -> bool {
        match self {
            Wrapped::Idle | Wrapped::Balanced => way.size(Axis::Data) * way.size(Axis::Shard) > 1,
            Wrapped::Local => way.size(Axis::Data) > 1,
            Wrapped::Reducer | Wrapped::Halves(_) => true,
        }
    }

    /// The features of the way and of the wrapper.
    fn features(self, way: &Way) -> Features {
        let ZeroOptions { stage, unused, reduce_once, .. } = way.zero;
        let counted = matches!(way.kind, Kind::Mixture(_)) && self.readers(way) > 1;
        let each_pass = [ZeroStage::Gradients, ZeroStage::Parameters].contains(&stage) && !reduce_once;
        features(way)
            .and(self.feature())
            .and_if(counted, Feature::CountedTokens)
            .and_if(each_pass, Feature::ReduceEachPass)
            .and_if(stage.shards_parameters() && unused == Unused::Error, Feature::GatherAsRead)
    }

    fn run(self, way: &Way, mesh: &Mesh<Cpu>) -> Result<RunOutcome> {
        let (runs, steps, batch) = (way.accumulation, 0..way.steps, mesh.batch());
        let (own, all) = (batch.rank(), batch.size());
        let mut outcome = RunOutcome::default();
        let mut told = |metrics: TrainingMetrics<Cpu>| -> Result<()> {
            outcome.losses.push(metrics.loss()?);
            outcome.norms.extend(metrics.grad_norm()?);
            Ok(())
        };
        outcome.pieces = match self {
            Wrapped::Idle => {
                let mut training = Training::new(way, mesh)?;
                for k in steps {
                    let (idle, place) = (k % all, own - usize::from(own > k % all));
                    told(training.take_of(k, (runs, own == idle), |run| way.share(run, place, all - 1))?)?;
                }
                training.pieces()?
            }
            Wrapped::Balanced => {
                let micros = way.stages.map_or(1, |stages| stages.micros);
                let batches = way.examples / micros;
                let examples = |batch: usize| {
                    (batch * way.examples / batches..(batch + 1) * way.examples / batches).collect::<Vec<_>>()
                };
                let options = BalanceOptions {
                    policy: BalancePolicy::FollowSpeeds,
                    anchor: batches,
                    max_anchor: batches,
                    speed_hint: Some((0, 2.0)).filter(|_| all > 1),
                    ..Default::default()
                };
                let mut now = 0;
                let clock = move || {
                    now += 1 + own as u64;
                    Duration::from_millis(now)
                };
                let training = Training::new(way, mesh)?;
                let mut training = training.wrapped(|_, step| Balanced::with_clock(step, options, clock))?;
                for k in steps {
                    told(training.take_of(k, (batches, false), examples)?)?;
                }
                training.pieces_of(training.step.inner())?
            }
            Wrapped::Local => {
                let axes = [Axis::Pipe, Axis::Shard, Axis::Context, Axis::Tensor];
                let sizes = axes.map(|axis| (axis, way.size(axis))).into_iter();
                let sizes = sizes.chain([(Axis::Expert, self.expert_ranks(way))]);
                let sizes = ParallelPlan::of(sizes.collect::<Vec<_>>())?;
                let inner = Mesh::new(&mesh.group(&axes)?, sizes)?;
                let options = LocalUpdates { every: Some(1), ..Default::default() };
                let mut training = Training::new(way, &inner)?.wrapped(|model, step| {
                    Ok(LocalSteps::new(mesh.axis(Axis::Data), model, step, LocalSgd, options)?.among(mesh.world()))
                })?;
                for k in steps {
                    training.take_of(k, (runs, false), |run| way.share(run, own, all))?;
                }
                training.pieces_of(training.step.inner())?
            }
            Wrapped::Reducer => {
                let reducer = |comm: &Comm<Cpu>| Ok(AllReduce::new(comm, GradCompression::Own));
                return Training::with(way, mesh, |builder| builder.reducer(reducer))?.run();
            }
            Wrapped::Halves(_) => return Training::new(way, mesh)?.run(),
        };
        Ok(outcome)
    }

    /// The comparable part of an outcome. Metrics of local updates are a replica's, and AdamW amplifies rounding errors.
    fn compared(self, outcome: RunOutcome) -> RunOutcome {
        let RunOutcome { mut losses, mut norms, pieces } = outcome;
        match self {
            Wrapped::Local => RunOutcome { pieces, ..Default::default() },
            Wrapped::Halves(_) => {
                losses.truncate(1);
                norms.truncate(1);
                RunOutcome { losses, norms, ..Default::default() }
            }
            _ => RunOutcome { losses, norms, pieces },
        }
    }

    /// The distance between many ranks and one.
    fn off(self, way: &Way) -> Result<f64> {
        let many = assembled(way.ranks(|mesh| self.run(way, mesh))?);
        Ok(distance(&self.compared(many), &self.compared(way.alone())))
    }

    /// Sums in another order, rounded to the precision of the parameters.
    fn close(self) -> f64 {
        match self {
            Wrapped::Halves(DType::BF16) => 0.05,
            Wrapped::Halves(_) => 0.01,
            _ => CLOSE,
        }
    }

    /// The number of ranks of one step that read different tokens.
    fn readers(self, way: &Way) -> usize {
        let data = if self == Wrapped::Local { 1 } else { way.size(Axis::Data) };
        data * way.size(Axis::Shard) * way.size(Axis::Context)
    }

    /// The number of these ranks that have all experts together.
    fn expert_ranks(self, way: &Way) -> usize {
        let experts = way.size(Axis::Expert);
        if self.readers(way).is_multiple_of(experts) { experts } else { 1 }
    }

    /// Tells whether a row of the table refuses this way. The builder takes experts as shared out; wrappers know.
    fn refuses(self, row: &Refused, way: &Way) -> bool {
        let features = self.features(way);
        let shared = way.stages.is_some() || self == Wrapped::Reducer || self.expert_ranks(way) > 1;
        let has = |feature: Feature| row.features.contains(&feature);
        row.features.iter().all(|feature| features.has(*feature))
            && (shared || !has(Feature::Experts) || !has(self.feature()))
    }
}

#[test]
fn every_way_in_a_wrapper_is_one_rank_or_refused_by_the_table() {
    let (mut turns, mut wrong, mut met) = (Turns::one_of(5), Vec::new(), BTreeMap::new());
    // Each with every stage of ZeRO, which ways have in turn.
    let drawn = ways().into_iter().zip(0..).map(|(way, k)| (ALL[(k + k / STAGES.len()) % ALL.len()], way));
    for (wrapped, way) in drawn.filter(|(wrapped, way)| wrapped.has_replicas(way) && turns.come()) {
        let way = wrapped.of(way);
        let rows: Vec<_> = COMBINATIONS.iter().filter(|row| wrapped.refuses(row, &way)).collect();
        let count: &mut [usize; 2] = met.entry(wrapped.feature()).or_default();
        count[usize::from(rows.is_empty())] += 1;
        match wrapped.off(&way) {
            Ok(off) if rows.is_empty() && off <= wrapped.close() => {}
            Err(error) if rows.iter().any(|row| error.to_string().contains(row.why)) => {}
            outcome => wrong.push(format!("{wrapped:?} {way:?}: {outcome:?}, rows {rows:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(met.len() == 5 && met.values().all(|[_, worked]| *worked > 0), "refused and worked: {met:?}");
}

/// Each rank has all experts, and a plan names them: a rank without a pass would be waited for.
#[test]
fn mixtures_that_count_tokens_together_pass_together() {
    for wrapped in [Wrapped::Idle, Wrapped::Balanced] {
        let way = wrapped.of(Way::mixture(4).over(&[(Axis::Data, 2)]));
        let error = wrapped.off(&way).unwrap_err().to_string();
        assert!(error.contains("tokens counted over ranks exclude each other"), "{error}");
    }
}
