//! Every way to train one model, on every number of ranks: axes, stages of ZeRO, options. A way that the table of
//! combinations refuses is refused with its words; every other takes the steps of one rank, and one rank goes on from
//! its checkpoint.

use distributed::train::{StepInput, StepModel};

use crate::{
    pipeline_common::{TIMEOUT, checked},
    prelude::*,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;
/// Sequences of a step.
const ROWS: usize = 32;
/// Tokens of a sequence.
const TOKENS: usize = 24;
/// Micro-batches of a run of a pipeline.
const MICROS: usize = 2;
/// Steps before the checkpoint; one is taken after it.
const STEPS: usize = 2;

/// A way to train.
#[derive(Clone, Debug)]
struct Way {
    axes: [(Axis, usize); 5],
    zero: ZeroStage,
    tied: bool,
    accumulation: usize,
    reduce_once: bool,
    sequence: bool,
    canonical: bool,
    unused: bool,
    kind: ScheduleKind,
}

/// Losses and norms, the last of which are those of one rank that goes on, and the weights in the end.
#[derive(Clone, Debug, Default)]
struct Outcome {
    numbers: Vec<f64>,
    weights: Vec<(String, Vec<f64>)>,
}

impl Way {
    /// The `k`-th way over some axes: options take turns, so that each meets every other in some way.
    fn new(axes: [usize; 5], zero: ZeroStage, k: usize) -> Self {
        let axes: [(Axis, usize); 5] = std::array::from_fn(|at| (Axis::ALL[at], axes[at]));
        let kinds = [ScheduleKind::OneFOneB, ScheduleKind::GPipe, ScheduleKind::ZbH1];
        Way {
            axes,
            zero,
            tied: k.is_multiple_of(2),
            accumulation: 1 + k / 2 % 2,
            reduce_once: k.is_multiple_of(3),
            sequence: k % 5 < 2,
            canonical: k.is_multiple_of(7),
            unused: k.is_multiple_of(11),
            kind: kinds[k % 3],
        }
    }

    fn size(&self, axis: Axis) -> usize {
        self.axes[axis as usize].1
    }

    fn ranks(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    fn is_staged(&self) -> bool {
        self.size(Axis::Pipe) > 1
    }

    /// What the table is asked, said once more.
    fn features(&self) -> Features {
        let zero = match self.zero {
            ZeroStage::None => Features::default(),
            ZeroStage::Optimizer => Features::of([Feature::ZeroOptimizer]),
            ZeroStage::Gradients => Features::of([Feature::ZeroGradients]),
            ZeroStage::Parameters => Features::of([Feature::ZeroParameters]),
        };
        let axes =
            [(Axis::Pipe, Feature::Pipeline), (Axis::Context, Feature::Context), (Axis::Tensor, Feature::Tensor)];
        let axes = axes.into_iter().filter(|(axis, _)| self.size(*axis) > 1).map(|(_, feature)| feature);
        let buckets = self.zero == ZeroStage::None;
        zero.union(Features::of(axes))
            .and_if(self.unused, Feature::Unused)
            .and_if(self.canonical && buckets, Feature::Canonical)
    }

    fn model(&self, rt: &Cpu) -> Result<Gpt<Cpu>> {
        let config = GptConfig {
            vocab: 12,
            context: TOKENS,
            layers: 4,
            heads: 4,
            width: 8,
            tied_head: self.tied,
            ..Default::default()
        };
        Gpt::new(&Init::new(rt, 7).dtype(DType::F64).lazily(), config)
    }

    fn builder<'m>(&self, mesh: &Mesh<Cpu>, model: impl Into<StepModel<'m, Cpu>>) -> TrainStepBuilder<'m, Cpu> {
        let unused = if self.unused { Unused::Allow } else { Unused::Error };
        let builder = TrainStep::builder(mesh, model).optimizer(adamw()).max_norm(0.5).accumulation(self.accumulation);
        match self.zero {
            ZeroStage::None => {
                let limits = Some(BucketLimits { first: 100, others: 1000 });
                builder.buckets(BucketOptions { limits, unused, canonical: self.canonical, ..Default::default() })
            }
            stage => builder.zero(ZeroOptions { stage, unused, reduce_once: self.reduce_once, ..Default::default() }),
        }
    }

    /// Trains on the ranks of a mesh, and saves: losses and norms.
    fn train(&self, comm: &Comm<Cpu>, folder: &Folder) -> Result<Vec<f64>> {
        manual_seed(3);
        let mesh = Mesh::new(comm, ParallelPlan::of(self.axes)?)?;
        let (rt, plan) = (comm.runtime(), Gpt::<Cpu>::tensor_plan().sequence_parallel(self.sequence));
        let model = self.model(rt)?;
        let own = shard_batches(ROWS, mesh.batch().rank(), mesh.batch().size());
        let part = own.len().div_ceil(self.accumulation);
        let rows = |k: usize| &own[(k * part).min(own.len())..((k + 1) * part).min(own.len())];
        if !self.is_staged() {
            mesh.parallelize(&model, &plan)?;
            mesh.context_parallel(&model, ContextExchange::AllGather)?;
            let step = self.builder(&mesh, &model).build()?;
            return steps(step, folder, &|number, k| loss_of(&model, rt, number, rows(k)).map(Into::into));
        }
        let pipe = mesh.axis(Axis::Pipe);
        let (stages, loss) = model.split_with_loss(pipe.size(), summed())?;
        let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
            Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
        };
        let checked = checked(self.kind, pipe.size(), 1, MICROS).expect("a schedule");
        let staged = PipelineModel::on(pipe.rank(), checked, stages).loss(loss).parallelize(&mesh, &plan)?;
        let step = self.builder(&mesh, staged.context_parallel(&mesh, ContextExchange::AllGather)?).build()?;
        steps(step, folder, &|number, k| {
            let [x, y] = batch(rt, number, rows(k))?;
            MicroBatches::split(&[x], &[y], MICROS).map(Into::into)
        })
    }

    /// What all ranks make of it, and one rank after them.
    fn outcome(&self) -> Result<Outcome> {
        let scratch = Scratch::new("matrix");
        let folder = scratch.folder();
        let ranks = Ranks::new(self.ranks()).timeout(TIMEOUT);
        let told = ranks.run(cpu, |comm| self.train(&comm, &folder))?;
        assert!(told.iter().all(|own| own == &told[0]), "ranks tell other stories: {told:?}");
        let (rt, mut numbers) = (cpu(0)?, told[0].clone());
        let model = self.model(&rt)?;
        let mut step = TrainStep::builder(&rt, &model).optimizer(adamw()).max_norm(0.5).build()?;
        assert!(step.load(&folder)?.is_some());
        let all: Vec<usize> = (0..ROWS).collect();
        let metrics = step.step(|_| loss_of(&model, &rt, STEPS, &all))?;
        numbers.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(f64::NAN)]);
        let weights = model.state_dict()?.into_iter().map(|(name, value)| Ok((name, value.to_f64s()?)));
        Ok(Outcome { numbers, weights: weights.collect::<Result<_>>()? })
    }
}

fn steps(
    mut step: TrainStep<Cpu>,
    folder: &Folder,
    input: &dyn Fn(usize, usize) -> Result<StepInput<Cpu>>,
) -> Result<Vec<f64>> {
    let mut numbers = Vec::new();
    for number in 0..STEPS {
        let metrics = step.step(|k| input(number, k))?;
        numbers.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(f64::NAN)]);
    }
    step.save(folder, &Default::default())?;
    Ok(numbers)
}

fn summed() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, z_loss: 0.0 }
}

/// Tokens and targets of some rows of a step.
fn batch(rt: &Cpu, number: usize, rows: &[usize]) -> Result<[Tensor<Cpu>; 2]> {
    let token = |i: usize| ((i * 7 + i / 3 + number * 5) % 12) as i64;
    let text: Vec<i64> = (0..ROWS * (TOKENS + 1)).map(token).collect();
    let index: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let text = Tensor::from_slice(rt, [ROWS, TOKENS + 1], &text)?;
    let text = text.index_select(0, &Tensor::from_slice(rt, [index.len()], &index)?)?;
    Ok([text.narrow(1, 0, TOKENS)?.contiguous()?, text.narrow(1, 1, TOKENS)?.contiguous()?])
}

fn loss_of(model: &Gpt<Cpu>, rt: &Cpu, number: usize, rows: &[usize]) -> Result<Loss<Cpu>> {
    let [x, y] = batch(rt, number, rows)?.map(Var::new);
    Loss::sum(model.next_token_loss(&x, &y, &summed())?, (rows.len() * TOKENS) as f64)
}

/// The largest difference of two lists, relative to the largest value.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(f64::MIN_POSITIVE, |most, value| most.max(value.abs()));
    a.iter()
        .zip(b)
        .fold(0.0, |most: f64, (a, b)| if (a - b).is_nan() { f64::NAN } else { most.max((a - b).abs() / scale) })
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

/// All ways, in an order in which options take turns.
fn ways() -> Vec<Way> {
    let stages = [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
    let all = WORLDS.into_iter().flat_map(meshes).flat_map(|axes| stages.map(|zero| (axes, zero)));
    all.enumerate().map(|(k, (axes, zero))| Way::new(axes, zero, k)).collect()
}

#[test]
fn every_way_to_train_is_one_rank_or_refused_by_the_table() {
    let alone = [true, false].map(|tied| {
        let plain =
            Way { tied, canonical: false, unused: false, accumulation: 1, ..Way::new([1; 5], ZeroStage::None, 1) };
        plain.outcome().unwrap()
    });
    let (mut turns, mut refused, mut met) = (Turns::one_of(7), 0, Features::default());
    for way in ways().into_iter().filter(|_| turns.come()) {
        let (features, outcome) = (way.features(), way.outcome());
        if let Err(table) = features.check("TrainStep::builder") {
            let why = outcome.expect_err("the table refuses this").to_string();
            assert!(why.contains(&table.to_string()), "{way:?}: {why}");
            refused += 1;
            continue;
        }
        met = met.union(features);
        let (own, one) = (outcome.unwrap_or_else(|error| panic!("{way:?}: {error}")), &alone[usize::from(!way.tied)]);
        let off = apart(&own.numbers, &one.numbers);
        assert!(off < CLOSE, "{way:?}: {off:e}");
        for ((name, own), (_, one)) in own.weights.iter().zip(&one.weights) {
            let off = apart(own, one);
            assert!(off < CLOSE, "{way:?}, {name}: {off:e}");
        }
    }
    let each = [
        Feature::Pipeline,
        Feature::Context,
        Feature::Tensor,
        Feature::ZeroParameters,
        Feature::Canonical,
        Feature::Unused,
    ];
    assert!(refused > 2 && each.into_iter().all(|feature| met.has(feature)), "{refused} refused, {met:?} worked");
}
