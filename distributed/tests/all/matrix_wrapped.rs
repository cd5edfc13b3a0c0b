//! Ways to train that `matrix` draws, with further options, in a wrapper and in a loop. Each equals one rank, or is
//! refused by the table of combinations.

use adaptive::balance::BalancePolicy;
use distributed::{
    combinations::{COMBINATIONS, Refused},
    train::Step,
};

use crate::{
    matrix::{features, one, shown, ways},
    own_reducer::OwnReducer,
    prelude::*,
    training::{Loop, is_lost},
    worlds::elastic,
};

/// The exchange of gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Exchange {
    Plain,
    /// A reducer of one's own, with a state or without, which may sum in each pass.
    Reducer {
        state: bool,
        each_pass: bool,
    },
    /// Gradients that travel in half precision.
    Narrowed,
    /// Gradients that travel as products of matrices of full rank.
    PowerSgd,
}

/// The wrapper of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrapper {
    None,
    /// Batches shared out by speeds, which differ.
    Balanced,
    /// Gradient descent on each replica, whose weights are averaged after every step.
    Local,
    /// The same, where each replica keeps a share of its own weights.
    Differing,
}

/// Options of a step, a wrapper and a loop.
#[derive(Clone, Copy, Debug)]
struct Wrapped {
    exchange: Exchange,
    /// The dtype of parameters, if it is a half.
    half: Option<DType>,
    /// True if some parameters are trained from the second step on.
    unfreezes: bool,
    /// True if a function makes the optimizers.
    built: bool,
    wrapper: Wrapper,
    taken: Loop,
    /// True if the last rank is lost before the last step, and the others go on.
    elastic: bool,
}

impl Wrapped {
    const PLAIN: Self = Wrapped {
        exchange: Exchange::Plain,
        half: None,
        unfreezes: false,
        built: false,
        wrapper: Wrapper::None,
        taken: Loop::Steps,
        elastic: false,
    };

    fn draw(k: u64) -> Self {
        use Loop::{Idle, NoBatches, RestoreBest, Steps, UseAtEnd};
        let random = &mut Philox::new(k, 1);
        let reducers = [(false, false), (true, false), (false, true), (true, true)];
        let reducers = reducers.map(|(state, each_pass)| Exchange::Reducer { state, each_pass });
        let exchanges = [&[Exchange::Plain; 4][..], &reducers, &[Exchange::Narrowed, Exchange::PowerSgd]].concat();
        let halves = [&[None; 4][..], &[Some(DType::BF16), Some(DType::F16)]].concat();
        let wrappers = [Wrapper::None, Wrapper::None, Wrapper::Balanced, Wrapper::Local, Wrapper::Differing];
        let wrapper = one(random, &wrappers);
        // Balanced steps say which ranks idle, and `TrainStep::run` is a loop of the plain step.
        let loops = match wrapper {
            Wrapper::None => &[Steps, Idle, RestoreBest, UseAtEnd, NoBatches][..],
            Wrapper::Local | Wrapper::Differing => &[Steps, Idle, RestoreBest, UseAtEnd],
            Wrapper::Balanced => &[Steps, RestoreBest, UseAtEnd],
        };
        let taken = one(random, loops);
        Wrapped {
            exchange: one(random, &exchanges),
            half: one(random, &halves),
            unfreezes: one(random, &[false, false, true]),
            built: one(random, &[false, false, false, false, true]),
            wrapper,
            taken,
            elastic: taken != NoBatches && one(random, &[false, false, false, true]),
        }
    }
}

/// The place of the checkpoints of a run, and its world if ranks leave it.
struct Place<'a> {
    folder: &'a Scratch,
    world: Option<&'a mut ElasticWorld<Cpu>>,
}

impl Wrapped {
    fn is_local(self) -> bool {
        [Wrapper::Local, Wrapper::Differing].contains(&self.wrapper)
    }

    /// Tells whether values are rounded on the way.
    fn is_rounded(self) -> bool {
        self.half.is_some() || [Exchange::Narrowed, Exchange::PowerSgd].contains(&self.exchange)
    }

    /// The features beside those of the way.
    fn own_features(self) -> Features {
        let Wrapped { exchange, wrapper, taken, .. } = self;
        let exchange = match exchange {
            Exchange::Plain => Features::default(),
            Exchange::Reducer { state, each_pass } => Features::of([Feature::Reducer])
                .and_if(state, Feature::StatefulReducer)
                .and_if(each_pass, Feature::ReduceEachPass),
            Exchange::Narrowed => Features::of([Feature::Narrowed, Feature::Buckets]),
            Exchange::PowerSgd => Features::of([Feature::Reducer, Feature::StatefulReducer]),
        };
        exchange
            .and_if(self.half.is_some(), Feature::HalfParameters)
            .and_if(self.unfreezes, Feature::Unfreezing)
            .and_if(self.built, Feature::BuiltBefore)
            .and_if(wrapper == Wrapper::Balanced, Feature::Uneven)
            .and_if(self.is_local(), Feature::Local)
            .and_if(wrapper == Wrapper::Differing, Feature::WeightsDiffer)
            .and_if(taken == Loop::Idle, Feature::Idle)
            .and_if(taken == Loop::NoBatches, Feature::NoBatches)
            .and_if(taken == Loop::RestoreBest, Feature::RestoreBest)
            .and_if(taken == Loop::UseAtEnd, Feature::UseAtEnd)
            .and_if(self.elastic, Feature::Elastic)
    }

    /// The drawn way, with what this can be compared by: batches of other sizes have other masks and balance losses.
    fn of(self, mut way: Way) -> Way {
        let Wrapped { exchange, half, wrapper, taken, .. } = self;
        (way.gpt.dropout, way.router) = (0.0, [0.0; 2]);
        // Averages of weights are those of gradients; a rounded gradient moves the weights by its own error.
        let has_no_loss = taken.is_trainer() || self.elastic || wrapper == Wrapper::Differing;
        let is_rounded = self.is_rounded() && (has_no_loss || !way.rule.is_whole());
        let is_sgd = wrapper == Wrapper::Local || is_rounded;
        way.rule = match way.rule {
            _ if is_sgd => Rule::Sgd,
            Rule::Adafactor | Rule::Muon | Rule::Prodigy | Rule::Lbfgs if self.built => Rule::Lamb,
            rule => rule,
        };
        way.max_norm = way.max_norm.filter(|_| !is_sgd);
        if way.stages.is_none() {
            let replicas = way.size(Axis::Data) * way.size(Axis::Shard);
            let is_even = taken.is_trainer() || wrapper == Wrapper::Differing;
            // Shares of other sizes; loops have batches of one size, and replicas whose weights differ have the same.
            way.examples = if is_even { 2 * replicas * way.accumulation } else { 13 };
        }
        match exchange {
            Exchange::Plain | Exchange::Reducer { .. } => {}
            Exchange::Narrowed => way.buckets.compression = GradCompression::F16,
            Exchange::PowerSgd => way.power = Some(PowerSgd { rank: 1000, min_rate: 0.0, ..Default::default() }),
        }
        if let Some(dtype) = half {
            (way.dtype, way.zero.reduce_dtype) = (dtype, None);
        }
        if self.unfreezes {
            way.frozen =
                if way.is_mixture() { &["blocks.0.mlp.experts", "wte"] } else { &["blocks.0.ln1", "blocks.1"] };
        }
        // Every stage of ZeRO refuses options of buckets.
        let is_plain = exchange == Exchange::Plain || way.accumulation == 1;
        way.zero.stage = if is_plain { way.zero.stage } else { ZeroStage::None };
        way
    }

    /// Tells whether the way has replicas that can differ, where this needs some.
    fn has_replicas(self, way: &Way) -> bool {
        let replicas = way.size(Axis::Data) * way.size(Axis::Shard);
        let idles = [Loop::Idle, Loop::NoBatches].contains(&self.taken);
        // A replica that idles is a rank.
        let is_told = self.wrapper != Wrapper::Differing || !idles || way.size(Axis::Shard) == 1;
        is_told
            && (!self.is_local() || way.size(Axis::Data) > 1)
            && (!idles && self.wrapper != Wrapper::Balanced || replicas > 1)
            && (!self.elastic || way.axes.iter().map(|(_, size)| size).product::<usize>() > 2)
    }

    /// The features of the way with this.
    fn features(self, way: &Way) -> Features {
        features(way, self.readers(way)).union(self.own_features())
    }

    /// The micro-batches of a step: of a replica, or of all together where they are shared out.
    fn batches(self, way: &Way) -> usize {
        match self.wrapper {
            Wrapper::Balanced => way.examples / way.stages.map_or(1, |stages| stages.micros),
            _ => way.accumulation,
        }
    }

    fn step<'w>(self, way: &'w Way, mesh: &Mesh<Cpu>) -> Result<Training<'w>> {
        let rule = way.rule;
        let make = move |leaves| -> Result<Box<dyn Optimizer<Cpu>>> {
            Ok(match rule {
                Rule::Sgd => Box::new(FlatOptimizer::over(sgd(), leaves)?),
                Rule::Lamb => Box::new(FlatOptimizer::over(lamb(), leaves)?),
                _ => return adamw().into_source().optimizer(leaves),
            })
        };
        Training::with(way, mesh, |builder| {
            let builder = if self.built { builder.optimizer_with(make) } else { builder };
            match self.exchange {
                Exchange::Plain | Exchange::PowerSgd => builder,
                Exchange::Reducer { state: true, each_pass } => {
                    builder.reducer(move |comm| Ok(OwnReducer::<true>::new(comm, each_pass)))
                }
                Exchange::Reducer { state: false, each_pass } => {
                    builder.reducer(move |comm| Ok(OwnReducer::<false>::new(comm, each_pass)))
                }
                Exchange::Narrowed => builder.buckets(way.buckets.clone()),
            }
        })
    }

    fn run(self, way: &Way, mesh: &Mesh<Cpu>, place: Place<'_>) -> Result<RunOutcome> {
        let own = mesh.batch().rank();
        match self.wrapper {
            Wrapper::None if self.taken == Loop::NoBatches => self.step(way, mesh)?.batches(self.unfreezes),
            Wrapper::None => self.take(self.step(way, mesh)?, mesh, place, |step| step),
            Wrapper::Balanced => {
                let batches = self.batches(way);
                let options = BalanceOptions {
                    policy: BalancePolicy::FollowSpeeds,
                    anchor: batches,
                    max_anchor: batches,
                    speed_hint: Some((0, 2.0)).filter(|_| mesh.batch().size() > 1),
                    ..Default::default()
                };
                let mut now = 0;
                let clock = move || {
                    now += 1 + own as u64;
                    Duration::from_millis(now)
                };
                let wrap = |step| Balanced::with_clock(step, options, clock);
                self.take(self.step(way, mesh)?.wrapped(|_, step| wrap(step))?, mesh, place, Balanced::inner)
            }
            Wrapper::Local | Wrapper::Differing => {
                let axes = [Axis::Pipe, Axis::Shard, Axis::Context, Axis::Tensor];
                let sizes = axes.map(|axis| (axis, way.size(axis))).into_iter();
                let sizes = sizes.chain([(Axis::Expert, self.expert_ranks(way))]);
                let sizes = ParallelPlan::of(sizes.collect::<Vec<_>>())?;
                let inner = Mesh::new(&mesh.group(&axes)?, sizes)?;
                let options = LocalUpdates { every: Some(1), ..Default::default() };
                let alpha = if self.wrapper == Wrapper::Local { 1.0 } else { 0.3 };
                let (data, rule) = (mesh.axis(Axis::Data), ElasticAveraging { alpha });
                let training = self.step(way, &inner)?.wrapped(|model, step| {
                    Ok(LocalSteps::new(data, model, step, rule, options)?.among(mesh.world()))
                })?;
                let outcome = self.take(training, mesh, place, LocalSteps::inner)?;
                // Metrics are a replica's; so are weights that differ, of which the first replica's are compared.
                let is_told = self.wrapper == Wrapper::Local || data.rank() == 0;
                Ok(RunOutcome { pieces: if is_told { outcome.pieces } else { Vec::new() }, ..Default::default() })
            }
        }
    }

    fn take<S: Step<Cpu>>(
        self,
        mut training: Training<'_, S>,
        mesh: &Mesh<Cpu>,
        place: Place<'_>,
        inner: impl Fn(&S) -> &TrainStep<Cpu>,
    ) -> Result<RunOutcome> {
        let (way, batch, mut outcome) = (training.way, mesh.batch(), RunOutcome::default());
        let (runs, notes) = (self.batches(way), CheckpointNotes::new());
        let Place { folder, mut world } = place;
        if self.elastic {
            training.step.properties().features.and(Feature::Elastic).check("Elastic")?;
        }
        if self.taken.is_trainer() {
            let batch = way.examples / runs;
            let training = training.looped(self.taken, batch, self.unfreezes, folder, world)?;
            outcome.pieces = training.pieces_of(inner(&training.step))?;
            return Ok(outcome);
        }
        let mut begun = 0;
        if let Some(world) = &mut world {
            begun = world.restore(&mut training.step)?.map_or(0, |restored| restored.step as usize);
            if self.unfreezes && begun > 0 {
                training.unfreeze();
            }
            world.commit(begun as u64, &training.step, &notes)?;
        }
        for k in begun..way.steps {
            let (own, all) = (batch.rank(), batch.size());
            let idle = Some(k % all).filter(|_| self.taken == Loop::Idle && all > 1);
            // Replicas without the idle one.
            let (place, places) = idle.map_or((own, all), |idle| (own - usize::from(own > idle), all - 1));
            let examples = |run| match self.wrapper {
                Wrapper::Balanced => (run * way.examples / runs..(run + 1) * way.examples / runs).collect::<Vec<_>>(),
                // The examples of a replica, shared out among its ranks.
                Wrapper::Differing if idle.is_none() => {
                    let (all, own) = (mesh.axis(Axis::Data), mesh.axis(Axis::Shard));
                    let of_replica = way.share(run, all.rank(), all.size());
                    of_replica.into_iter().skip(own.rank()).step_by(own.size()).collect()
                }
                _ => way.share(run, place, places),
            };
            if k + 1 == way.steps {
                world.as_deref().map_or(Ok(()), is_lost)?;
            }
            let metrics = training.take_of(k, (runs, idle == Some(own)), examples)?;
            outcome.losses.push(metrics.loss()?);
            outcome.norms.extend(metrics.grad_norm()?);
            if self.unfreezes {
                training.unfreeze();
            }
            if let Some(world) = &mut world {
                world.commit(k as u64 + 1, &training.step, &notes)?;
            }
        }
        outcome.pieces = training.pieces_of(inner(&training.step))?;
        Ok(outcome)
    }

    /// The reference of a comparison: one rank, or replicas of whole models whose weights differ.
    fn reference(self, way: &Way) -> (Self, Way) {
        let is_kept = self.taken.is_trainer() || self.wrapper == Wrapper::Differing;
        let taken = if is_kept { self.taken } else { Loop::Steps };
        let (one, whole) = (way.reference(), Wrapped { unfreezes: self.unfreezes, taken, ..Wrapped::PLAIN });
        if self.wrapper != Wrapper::Differing {
            return (whole, one);
        }
        // A replica has the same examples: of each batch of a trainer, or of each micro-batch.
        let accumulation = if self.taken.is_trainer() { way.accumulation } else { one.accumulation };
        let replicas = Way { accumulation, ..one }.over(&[(Axis::Data, way.size(Axis::Data))]);
        (Wrapped { wrapper: self.wrapper, ..whole }, replicas)
    }

    fn outcome(self, way: &Way) -> Result<RunOutcome> {
        let folder = &Scratch::new("wrapped");
        if !self.elastic {
            return Ok(assembled(way.ranks(|mesh| self.run(way, mesh, Place { folder, world: None }))?));
        }
        let plan = ParallelPlan::of(way.axes.clone())?;
        let outcomes = elastic(plan.world(), 2, |world| {
            let comm = world.comm()?;
            // Ranks that are left go on with whole models.
            let left = way.reference().over(&[(Axis::Data, comm.size())]);
            let way = if comm.size() == plan.world() { way } else { &left };
            let mesh = Mesh::new(&comm, ParallelPlan::of(way.axes.clone())?)?;
            let outcome = self.run(way, &mesh, Place { folder, world: Some(world) })?;
            Ok((comm.size(), outcome))
        });
        let (done, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|outcome| outcome.is_ok());
        if done.len() + 1 != plan.world() {
            let errors: Vec<_> = failed.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
            return Err(Error::argument("elastic", errors.join("; ")));
        }
        Ok(assembled(done.into_iter().map(|outcome| outcome.expect("an outcome").1).collect()))
    }

    /// The comparable part of an outcome.
    fn compared(self, way: &Way, mut outcome: RunOutcome) -> RunOutcome {
        // Metrics of local updates are a replica's; an elastic world has those of its last steps.
        if self.is_local() || self.elastic {
            (outcome.losses, outcome.norms) = (Vec::new(), Vec::new());
        }
        // Rules that divide by the size of a gradient, or make it orthogonal, magnify what is rounded.
        if self.is_rounded() && way.rule != Rule::Sgd {
            outcome.losses.truncate(1);
            outcome.norms.truncate(1);
            outcome.pieces.clear();
        }
        outcome
    }

    /// The distance between many ranks and one. Parameters in half precision may instead be as near to exact values as
    /// those of one rank: each run rounds its own sums, and many ranks round parts and sums.
    fn off(self, way: &Way) -> Result<f64> {
        let many = self.compared(way, self.outcome(way)?);
        let (reference, one) = self.reference(way);
        let of = |one: &Way| self.compared(way, reference.outcome(one).unwrap());
        let alone = of(&one);
        let off = distance(&many, &alone);
        if self.half.is_none() || off <= self.close() {
            return Ok(off);
        }
        let exact = of(&Way { dtype: DType::F64, ..one });
        let is_near = distance(&many, &exact) <= 2.0 * distance(&alone, &exact);
        Ok(if is_near { self.close() } else { off })
    }

    /// Sums in another order, rounded to the precision of the parameters or of gradients.
    fn close(self) -> f64 {
        match (self.half, self.exchange) {
            (Some(_), _) | (_, Exchange::Narrowed) => 0.05,
            (_, Exchange::PowerSgd) => 1e-4,
            _ => CLOSE,
        }
    }

    /// The number of ranks of one step that read different tokens.
    fn readers(self, way: &Way) -> usize {
        let data = if self.is_local() { 1 } else { way.size(Axis::Data) };
        data * way.size(Axis::Shard) * way.size(Axis::Context)
    }

    /// The number of these ranks that have all experts together.
    fn expert_ranks(self, way: &Way) -> usize {
        let experts = way.size(Axis::Expert);
        if self.readers(way).is_multiple_of(experts) { experts } else { 1 }
    }

    /// Tells whether a row of the table refuses this way. The builder takes experts as shared out, but for these.
    fn refuses(self, row: &Refused, way: &Way) -> bool {
        use Feature::{Idle, Local, NoBatches, StatefulReducer, Uneven};
        const LATER: [Feature; 5] = [StatefulReducer, Idle, NoBatches, Uneven, Local];
        let (features, is_shared) = (self.features(way), self.expert_ranks(way) > 1);
        let has = |feature: Feature| row.features.contains(&feature);
        row.features.iter().all(|feature| features.has(*feature))
            && (is_shared || !has(Feature::Experts) || !LATER.into_iter().any(has))
    }

    /// The rows of the table that refuse this way.
    fn rows(self, way: &Way) -> Vec<&'static Refused> {
        COMBINATIONS.iter().filter(|row| self.refuses(row, way)).collect()
    }
}

/// The number of times that each way is drawn.
const EACH: usize = 40;

/// All ways, each with options, wrappers and loops; of those that the table refuses, some.
fn drawn() -> impl Iterator<Item = (Wrapped, Way)> {
    let each = ways().into_iter().flat_map(|way| std::iter::repeat_n(way, EACH)).zip(0..);
    let each = each.map(|(way, k)| (Wrapped::draw(k), way)).filter(|(wrapped, way)| wrapped.has_replicas(way));
    let each = each.map(|(wrapped, way)| (wrapped, wrapped.of(way))).zip(0..);
    // An idle rank that is refused leaves an elastic world, and the others go on.
    let is_told = |wrapped: &Wrapped| !wrapped.elastic || wrapped.taken != Loop::Idle;
    let drawn = each.filter(move |((wrapped, way), k)| k % 8 == 0 && is_told(wrapped) || wrapped.rows(way).is_empty());
    drawn.map(|(each, _)| each)
}

/// The features of each drawn way that works.
pub fn worked() -> Vec<Features> {
    let worked = drawn().filter(|(wrapped, way)| wrapped.rows(way).is_empty());
    worked.filter_map(|(wrapped, way)| shown(wrapped.features(&way), &way, wrapped.expert_ranks(&way))).collect()
}

#[test]
fn every_way_in_a_wrapper_is_one_rank_or_refused_by_the_table() {
    let (mut turns, mut wrong, mut met) = (Turns::one_of(EACH - 1), Vec::new(), BTreeMap::new());
    for (wrapped, way) in drawn().filter(|_| turns.come()) {
        let rows = wrapped.rows(&way);
        for feature in wrapped.own_features().iter() {
            let count: &mut [usize; 2] = met.entry(feature).or_default();
            count[usize::from(rows.is_empty())] += 1;
        }
        match wrapped.off(&way) {
            Ok(off) if rows.is_empty() && off <= wrapped.close() => {}
            Err(error) if rows.iter().any(|row| error.to_string().contains(row.why)) => {}
            outcome => wrong.push(format!("{wrapped:?} {way:?}: {outcome:?}, rows {rows:?}")),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    // A part of the draws may miss one.
    let worked = met.values().filter(|[_, worked]| *worked > 0).count();
    assert!(met.len() == 16 && worked >= 14, "refused and worked: {met:?}");
}

/// Each rank has all experts, and a plan names them: a rank without a pass would be waited for.
#[test]
fn mixtures_that_count_tokens_together_pass_together() {
    for (wrapper, taken) in [(Wrapper::None, Loop::Idle), (Wrapper::Balanced, Loop::Steps)] {
        let wrapped = Wrapped { wrapper, taken, ..Wrapped::PLAIN };
        let way = wrapped.of(Way::mixture(4).over(&[(Axis::Data, 2)]));
        let error = wrapped.off(&way).unwrap_err().to_string();
        assert!(error.contains("tokens counted over ranks exclude each other"), "{error}");
    }
}

/// Ways in which draws have found faults.
#[test]
fn ways_that_once_failed() {
    let plain = Wrapped::PLAIN;
    let staged = |way: Way| way.staged(ScheduleKind::OneFOneB, 1).over(&[(Axis::Pipe, 2), (Axis::Data, 2)]);
    let local = Wrapped { wrapper: Wrapper::Local, ..plain };
    let first_frozen = Way { frozen: &["wte", "wpe", "blocks.0"], ..Way::gpt(2) };
    let mut untied = first_frozen.clone();
    untied.gpt.tied_head = false;
    let powersgd = Wrapped { exchange: Exchange::PowerSgd, ..local };
    let ways = [
        // The first stage sends values without gradient, and then with one.
        (Wrapped { unfreezes: true, ..plain }, staged(first_frozen)),
        // A replica without examples divides by their number.
        (Wrapped { taken: Loop::Idle, ..powersgd }, Way::gpt(2).over(&[(Axis::Data, 3)])),
        // A rank has nothing to synchronize.
        (local, staged(untied)),
        // Each rank has all experts.
        (local, staged(Way::mixture(4))),
    ];
    for (wrapped, way) in ways {
        let mut way = Way { frozen: way.frozen, ..wrapped.of(way.clone()) };
        way.zero.stage = ZeroStage::None;
        let off = wrapped.off(&way).unwrap_or_else(|error| panic!("{wrapped:?} {way:?}: {error}"));
        assert!(off <= wrapped.close(), "{wrapped:?} {way:?}: {off:e}");
    }
}
