//! Ways to train, drawn from all there are: axes, models, stages of ZeRO, schedules, options. A way that the table of
//! combinations refuses is refused with its words. Every other begins with what the one before it has loaded and saved
//! again, which must be the same bytes, and takes the steps of one rank, which then goes on from its checkpoint.

use crate::prelude::*;

/// Steps before the first checkpoint, and between it and the second.
const STEPS: Range<usize> = 1..3;

/// One of these.
pub fn one<T: Clone>(random: &mut Philox, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize].clone()
}

/// A GPT, or a mixture that these ranks can share out, with what else decides about one rank's numbers.
fn model(random: &mut Philox, size: impl Fn(Axis) -> usize) -> Way {
    let replicas: usize = [Axis::Data, Axis::Shard, Axis::Context].map(&size).iter().product();
    if size(Axis::Context).max(size(Axis::Tensor)) <= 2 && one(random, &[true, false, false]) {
        let experts = [8, 6, 5, 4].into_iter().find(|experts| replicas.is_multiple_of(*experts)).unwrap_or(4);
        let over: Vec<usize> =
            (1..=experts).filter(|n| experts.is_multiple_of(*n) && replicas.is_multiple_of(*n)).collect();
        let frozen = one(random, &[&[][..], &["blocks.0.mlp.experts", "wte"]]);
        let way = Way::mixture(experts).over(&[(Axis::Expert, one(random, &over))]);
        let bare = way.size(Axis::Expert) == 1 && one(random, &[true, false]);
        return Way { frozen, examples: 16, bare, ..way };
    }
    let mut way = Way::gpt(4);
    let context = if size(Axis::Context) == 3 { 12 } else { 16 };
    way.gpt = GptConfig { vocab: 12, context, layers: 2, heads: 4, width: 8, ..way.gpt };
    let losses = [(-100, 0.0, 0.0), (3, 0.1, 1e-2)];
    let frozen = [&[][..], &["blocks.0.ln1", "wte"], &["blocks.1.qkv", "lnf"]];
    let ((ignore_index, label_smoothing, z_loss), frozen) = one(random, &half(&losses, &frozen));
    way.gpt.tied_head = frozen.is_empty() == (z_loss == 0.0);
    let cross_entropy = CrossEntropyOptions { ignore_index, label_smoothing, reduction: Reduction::Sum };
    Way { frozen, loss: VocabularyLoss { cross_entropy, z_loss }, examples: 16, ..way }
}

/// What may be asked of ZeRO at a stage.
fn zero(random: &mut Philox, stage: ZeroStage) -> ZeroOptions {
    let parameters = stage.shards_parameters();
    let place = |random: &mut Philox, may: bool| match may && one(random, &[true, false, false, false]) {
        true => StatePlace::Host,
        false => StatePlace::Device,
    };
    ZeroOptions {
        stage,
        units: one(random, &[UnitOf::layers(), UnitOf::layers(), UnitOf::children(), UnitOf::whole()]),
        unused: one(random, &[[Unused::Error; 6].as_slice(), &[Unused::Allow]].concat()),
        state: place(random, true),
        parameters: place(random, parameters),
        gradients: place(random, stage.shards_gradients()),
        reduce_dtype: one(random, &[None, Some(DType::F64)]),
        main_gradients: one(random, &[false, true]),
        reduce_once: one(random, &[false, true]),
        gathered_until_backward: parameters && one(random, &[false, true]),
        whole_up_to: if parameters { one(random, &[0, 0, 100, usize::MAX]) } else { 0 },
    }
}

fn buckets(random: &mut Philox) -> BucketOptions {
    let limit = |first, others| Some(BucketLimits { first, others });
    BucketOptions {
        limits: one(random, &[None, limit(100, 1000), limit(1, 1)]),
        unused: one(random, &[[Unused::Error; 2].as_slice(), &[Unused::Allow]].concat()),
        canonical: one(random, &[true, false, false]),
        check_finite: one(random, &[false, true]),
        main_gradients: one(random, &[false, true]),
        ..Default::default()
    }
}

/// The `k`-th way over some axes.
fn draw(axes: [usize; 5], stage: ZeroStage, k: u64) -> Way {
    let (random, size) = (&mut Philox::new(k, 0), |axis: Axis| axes[axis as usize]);
    let mut way = model(random, size);
    (way.zero, way.buckets) = (zero(random, stage), buckets(random));
    way.axes.extend((0..5).map(|at| (Axis::ALL[at], axes[at])));
    let heads = if let Kind::Mixture(_) = way.kind { 2 } else { 4 };
    way.exchange = one(random, &[ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses]);
    if heads % (size(Axis::Tensor) * size(Axis::Context)) != 0 {
        way.exchange = ContextExchange::Ring;
    }
    (way.sequence, way.pieces) = (heads == 4 && one(random, &[false, true]), one(random, &[1, 2, 3]));
    way.accumulation = one(random, &[1, 2, 3]);
    if size(Axis::Pipe) > 1 {
        let most = way.examples / (size(Axis::Data) * size(Axis::Shard));
        way.accumulation = one(random, &[1, 1, 2]);
        while way.stages.is_none() || way.checked(size(Axis::Pipe)).is_none() {
            let (kind, v) = (one(random, ScheduleKind::ALL), one(random, &[1, 2]));
            let micros = one(random, &[most / way.accumulation, (most / way.accumulation).min(4)]);
            way.stages = Some(Stages { kind, v, micros, gathered: way.zero.stage.shards_parameters() && v == 2 });
        }
    } else if size(Axis::Data) * size(Axis::Shard) == 1 && heads == 4 {
        // Of a batch that is shared out, ranks have masks of their own.
        way.gpt.dropout = one(random, &[0.0, 0.2]);
    }
    if let Kind::Mixture(_) = way.kind {
        // What routers lose is of a micro-batch.
        let micros = way.accumulation * way.stages.map_or(1, |stages| stages.micros);
        way.router = if micros == 4 || micros == 1 { [0.3, 0.1] } else { [0.0; 2] };
    }
    way.rule = match way.is_mixture() {
        // Experts are tensors of three dimensions, which are no matrices.
        true => one(random, &[Rule::AdamW, Rule::Prodigy, Rule::Lbfgs, Rule::Lamb, Rule::Adafactor]),
        false => one(random, &[Rule::AdamW, Rule::Prodigy, Rule::Lbfgs, Rule::Lamb, Rule::Adafactor, Rule::Muon]),
    };
    if !way.is_mixture() {
        // Of 5 rows the last of 4 ranks has none, and a shard cannot have nothing of a whole parameter.
        let none = way.rule.is_whole() && way.zero.stage != ZeroStage::None && size(Axis::Tensor) == 4;
        way.gpt.vocab = one(random, if none { &[12, 13] } else { &[12, 13, 5] });
    }
    way
}

/// The number of ranks that read different tokens.
fn readers(way: &Way) -> usize {
    way.size(Axis::Data) * way.size(Axis::Shard) * way.size(Axis::Context)
}

/// The features of a way, listed apart from the builder; `readers` ranks read different tokens.
pub fn features(way: &Way, readers: usize) -> Features {
    let sharded = way.zero.stage != ZeroStage::None;
    // One rank along the expert axis has whole experts.
    let is_whole = way.rule.is_whole() && (!way.is_mixture() || way.size(Axis::Expert) > 1);
    let stage = match way.zero.stage {
        ZeroStage::None => Features::default(),
        ZeroStage::Optimizer => Features::of([Feature::ZeroOptimizer]),
        ZeroStage::Gradients => Features::of([Feature::ZeroGradients]),
        ZeroStage::Parameters => Features::of([Feature::ZeroParameters]),
    };
    let unused = if sharded { way.zero.unused } else { way.buckets.unused };
    let axes = [(Axis::Pipe, Feature::Pipeline), (Axis::Context, Feature::Context), (Axis::Tensor, Feature::Tensor)];
    let axes = axes.into_iter().filter(|(axis, _)| way.size(*axis) > 1).map(|(_, feature)| feature);
    stage
        .union(Features::of(axes))
        .and_if(way.is_mixture() && !way.bare, Feature::Experts)
        .and_if(unused == Unused::Allow, Feature::Unused)
        .and_if(way.size(Axis::Pipe) > 1 && way.gpt.tied_head && !way.is_mixture(), Feature::Tied)
        .and_if(way.buckets.canonical && !sharded, Feature::Canonical)
        .and_if(!sharded, Feature::Buckets)
        .and_if(way.is_mixture() && readers > 1, Feature::CountedTokens)
        .and_if(way.zero.stage.shards_gradients() && !way.zero.reduce_once, Feature::ReduceEachPass)
        .and_if(way.buckets.canonical && !sharded, Feature::ReduceEachPass)
        .and_if(way.zero.stage.shards_parameters() && unused == Unused::Error, Feature::GatherAsRead)
        .and_if(is_whole, Feature::WholeParameters)
}

/// The features that a way on several ranks shows to work; `expert_ranks` ranks have the experts together.
pub fn shown(features: Features, way: &Way, expert_ranks: usize) -> Option<Features> {
    let shares = |feature: &Feature| *feature != Feature::Experts || expert_ranks > 1;
    let shown = Features::of(features.iter().filter(shares)).and_if(way.rule.is_whole(), Feature::WholeParameters);
    (way.axes.iter().map(|(_, size)| size).product::<usize>() > 1).then_some(shown)
}

/// The features of each way that works.
pub fn worked() -> Vec<Features> {
    let all = ways().into_iter().map(|way| (features(&way, readers(&way)), way));
    let worked = all.filter(|(features, _)| features.check("a test").is_ok());
    worked.filter_map(|(features, way)| shown(features, &way, way.size(Axis::Expert))).collect()
}

/// Sizes along pipe, data, shard, context and tensor, of so many ranks in all, that the model can be cut by.
fn meshes(ranks: usize) -> Vec<[usize; 5]> {
    let sizes = || (1..=ranks).filter(|size| ranks.is_multiple_of(*size));
    let mut all = Vec::new();
    for pipe in sizes().filter(|pipe| *pipe <= 4) {
        for data in sizes() {
            for shard in sizes() {
                for context in sizes().filter(|context| *context <= 4) {
                    let rest = pipe * data * shard * context;
                    if let Some(tensor) = ranks.checked_div(rest).filter(|tensor| [1, 2, 4].contains(tensor))
                        && rest * tensor == ranks
                    {
                        all.push([pipe, data, shard, context, tensor]);
                    }
                }
            }
        }
    }
    all
}

/// All ways: every mesh with every stage of ZeRO, and what is drawn for them.
pub fn ways() -> Vec<Way> {
    let all = WORLDS.into_iter().flat_map(meshes).flat_map(|axes| STAGES.map(|zero| (axes, zero)));
    all.zip(0..).map(|((axes, zero), k)| draw(axes, zero, k)).collect()
}

/// One rank's run: what it has saved first, what follows, and what follows that.
struct One {
    first: BTreeMap<String, Vec<u8>>,
    saved: Scratch,
    then: RunOutcome,
    last: RunOutcome,
}

impl One {
    fn of(way: &Way) -> Self {
        let (saved, way) = (Scratch::new("matrix"), way.reference());
        way.go_on(None, 0..STEPS.start, Some(&saved.folder()));
        let whole = Scratch::new("matrix");
        let then = way.go_on(Some(&saved.folder()), STEPS, Some(&whole.folder()));
        let last = way.go_on(Some(&whole.folder()), STEPS.end..STEPS.end + 1, None);
        One { first: contents(&saved.folder()), saved, then, last }
    }

    /// Compares with what ranks make of a way that goes on from what is saved here, and keeps what they have saved:
    /// where they differ.
    fn compare(&mut self, way: &Way) -> Result<Vec<String>> {
        let [again, then] = [Scratch::new("matrix"), Scratch::new("matrix")];
        let outcome = way.ranks(|mesh| {
            let mut training = Training::new(way, mesh)?;
            training.go_on(Some(&self.saved.folder()), 0..0, Some(&again.folder()))?;
            training.go_on(None, STEPS, Some(&then.folder()))
        })?;
        let mut wrong = Vec::new();
        if contents(&again.folder()) != self.first {
            wrong.push(format!("{way:?}: what is loaded is saved otherwise"));
        }
        let last = way.reference().go_on(Some(&then.folder()), STEPS.end..STEPS.end + 1, None);
        for (many, one, what) in [(&assembled(outcome), &self.then, "steps"), (&last, &self.last, "one that goes on")] {
            let off = distance(many, one);
            if off.is_nan() || off > CLOSE {
                wrong.push(format!("{way:?}, {what}: {off:e}"));
            }
        }
        self.saved = again;
        Ok(wrong)
    }
}

#[test]
fn every_way_to_train_is_one_rank_or_refused_by_the_table() {
    let (mut turns, mut refused, mut met) = (Turns::one_of(7), 0, Features::default());
    let (mut known, mut wrong) = (BTreeMap::new(), Vec::new());
    for way in ways().into_iter().filter(|_| turns.come()) {
        let one = known.entry(format!("{:?}", way.reference())).or_insert_with(|| One::of(&way));
        let (features, outcome) = (features(&way, readers(&way)), one.compare(&way));
        match features.check("TrainStep::builder") {
            Ok(()) => wrong.extend(outcome.unwrap_or_else(|error| vec![format!("{way:?}: {error}")])),
            Err(table) => {
                let why = outcome.map_or_else(|error| error.to_string(), |_| "none".into());
                wrong.extend((!why.contains(&table.to_string())).then(|| format!("{way:?}: {why}, and not {table}")));
                refused += 1;
                continue;
            }
        }
        met = met.union(features);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let each = [
        Feature::Pipeline,
        Feature::Context,
        Feature::Tensor,
        Feature::Experts,
        Feature::ZeroParameters,
        Feature::Canonical,
        Feature::Unused,
        Feature::WholeParameters,
    ];
    assert!(refused > 0 && each.into_iter().all(|feature| met.has(feature)), "{refused} refused, {met:?} worked");
}
