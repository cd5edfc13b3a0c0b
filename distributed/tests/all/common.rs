//! Models and data that every strategy trains, and the single rank they are compared with.

use distributed::strategy::StrategySet;

use crate::prelude::*;

pub const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];
/// Steps of every comparison.
pub const STEPS: usize = 4;
/// Examples of a batch: not the same number on every rank at most world sizes.
pub const EXAMPLES: usize = 13;

pub fn cpu(_: usize) -> Result<Cpu> {
    Ok(Cpu::with_threads(1))
}

/// A model that knows its data.
pub trait Task: Module<Cpu> + Sized {
    fn new(init: &Init<Cpu>) -> Result<Self>;
    /// The loss of some examples of batch `step`.
    fn loss(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>>;
}

#[derive(Module)]
#[module(crate = "::nn")]
pub struct Mlp<R: Runtime> {
    pub a: Linear<R>,
    pub b: Linear<R>,
    pub c: Linear<R>,
}

impl<R: Runtime> Forward<R> for Mlp<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.a.forward(x)?.tanh()?;
        self.c.forward(&self.b.forward(&x)?.gelu()?)
    }
}

fn picked(all: &Tensor<Cpu>, examples: &[usize]) -> Result<Var<Cpu>> {
    let index: Vec<i64> = examples.iter().map(|&i| i as i64).collect();
    Ok(Var::new(all.index_select(0, &Tensor::from_slice(all.runtime(), [index.len()], &index)?)?))
}

impl Mlp<Cpu> {
    pub fn batch(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<(Var<Cpu>, Var<Cpu>)> {
        let dtype = self.a.weight.dtype();
        let all = |width, seed| Tensor::normal(rt, [EXAMPLES, width], dtype, 0.0, 1.0, seed + step as u64);
        Ok((picked(&all(5, 10)?, examples)?, picked(&all(3, 50)?, examples)?))
    }
}

impl Task for Mlp<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        Ok(Mlp { a: Linear::new(init, 5, 9)?, b: Linear::new(init, 9, 7)?, c: Linear::new(init, 7, 3)? })
    }

    fn loss(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
        let (x, y) = self.batch(rt, step, examples)?;
        let sum = nn::loss::mse(&self.forward(&x)?, &y, Reduction::Sum)?;
        Loss::sum(sum, (3 * examples.len()) as f64)
    }
}

impl Task for Gpt<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        let config =
            GptConfig { vocab: 11, context: 6, layers: 2, heads: 2, width: 8, tied_head: true, ..Default::default() };
        Gpt::new(init, config)
    }

    fn loss(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
        let token = |i: usize| ((i * 7 + i / 3 + step * 5) % 11) as i64;
        let text: Vec<i64> = (0..EXAMPLES * 7).map(token).collect();
        let text = Tensor::from_slice(rt, [EXAMPLES, 7], &text)?;
        let (x, y) = (picked(&text.narrow(1, 0, 6)?, examples)?, picked(&text.narrow(1, 1, 6)?, examples)?);
        let logits = self.forward(&x)?.reshape([6 * examples.len(), 11])?;
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let sum = logits.cross_entropy_with(&y.reshape([6 * examples.len()])?, options)?;
        Loss::sum(sum, (6 * examples.len()) as f64)
    }
}

/// What a run leaves: losses, gradient norms, and the weights after every step.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Trace {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub weights: Vec<Vec<f64>>,
}

pub fn weights<M: Module<Cpu> + ?Sized>(model: &M) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    for (_, p) in model.named_parameters() {
        all.extend(p.value()?.to_dtype(DType::F64)?.to_vec::<f64>()?);
    }
    Ok(all)
}

/// The optimizer of every comparison.
pub fn adamw() -> ParamGroups<AdamWConfig> {
    ParamGroups::decay_matrices(AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() })
}

pub fn sgd() -> SgdConfig {
    SgdConfig { lr: 0.05, ..Default::default() }
}

pub fn lamb() -> LambConfig {
    LambConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() }
}

/// Prodigy in two groups, and AdamW for tables of positions.
pub fn prodigy() -> ParamGroups<impl UpdateRule> {
    let config = ProdigyConfig { d0: 1e-3, weight_decay: 0.1, ..Default::default() };
    let groups = ParamGroups::new(config).group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0);
    groups.others(|name, _| name.contains("wpe"), adamw())
}

/// Muon for the matrices between the tables, AdamW for all else.
pub fn muon() -> ParamGroups<impl UpdateRule> {
    let others = |name: &str, spec: &numcore::ops::Spec| {
        spec.shape.rank() != 2 || ["wte", "wpe", "head"].iter().any(|t| name.contains(t))
    };
    ParamGroups::new(MuonConfig { lr: 1e-2, ..Default::default() }).others(others, adamw())
}

pub fn config() -> TrainingConfig {
    TrainingConfig { max_norm: Some(0.5), ..Default::default() }
}

pub fn simple(rt: &Cpu, model: &impl Module<Cpu>, config: TrainingConfig) -> Result<TrainStep<Cpu>> {
    TrainStep::builder(&NoOpCommunicator::new(rt), model).optimizer(adamw()).config(config).build()
}

/// The exchange of gradients in buckets, compressed by PowerSGD or not.
#[derive(Clone, Default)]
pub struct GradientSums {
    pub options: BucketOptions,
    pub power: Option<PowerSgd>,
}

impl From<BucketOptions> for GradientSums {
    fn from(options: BucketOptions) -> Self {
        GradientSums { options, power: None }
    }
}

impl From<PowerSgd> for GradientSums {
    fn from(power: PowerSgd) -> Self {
        GradientSums { options: BucketOptions::default(), power: Some(power) }
    }
}

pub fn bucketed<R: Runtime>(
    mesh: &impl AsMesh<R>,
    model: &impl Module<R>,
    config: TrainingConfig,
    sums: impl Into<GradientSums>,
) -> Result<TrainStep<R>> {
    let GradientSums { options, power } = sums.into();
    let builder = TrainStep::builder(mesh, model).optimizer(adamw()).config(config).buckets(options);
    match power {
        Some(power) => builder.reducer(move |comm| power.reducer(comm)).build(),
        None => builder.build(),
    }
}

pub fn sharded<R: Runtime>(
    mesh: &impl AsMesh<R>,
    model: &impl Module<R>,
    config: TrainingConfig,
    options: ZeroOptions,
) -> Result<TrainStep<R>> {
    TrainStep::builder(mesh, model).optimizer(adamw()).config(config).zero(options).build()
}

pub fn pipelined(mesh: &impl AsMesh<Cpu>, model: PipelineModel<Cpu>, config: TrainingConfig) -> Result<TrainStep<Cpu>> {
    TrainStep::builder(mesh, model).optimizer(adamw()).config(config).build()
}

pub fn sharded_pipeline(
    mesh: &impl AsMesh<Cpu>,
    model: PipelineModel<Cpu>,
    config: TrainingConfig,
    options: ZeroOptions,
) -> Result<TrainStep<Cpu>> {
    TrainStep::builder(mesh, model).optimizer(adamw()).config(config).zero(options).build()
}

/// Training on one rank with all examples.
pub fn single<M: Task>(dtype: DType, config: TrainingConfig) -> Result<Trace> {
    let rt = Cpu::with_threads(1);
    let model = M::new(&Init::new(&rt, 0).dtype(dtype))?;
    let mut trainer = simple(&rt, &model, config)?;
    let all: Vec<usize> = (0..EXAMPLES).collect();
    let mut trace = Trace::default();
    for step in 0..STEPS {
        let metrics = trainer.step(|_| model.loss(&rt, step, &all))?;
        trace.losses.push(metrics.loss()?);
        trace.norms.extend(metrics.grad_norm()?);
        trace.weights.push(weights(&model)?);
    }
    Ok(trace)
}

/// This rank's examples.
pub fn own(comm: &Comm<Cpu>) -> Vec<usize> {
    shard_batches(EXAMPLES, comm.rank(), comm.size())
}

/// Runs on every rank and requires the same trace, to the bit, on all.
pub fn everywhere(n: usize, program: impl Fn(Comm<Cpu>) -> Result<Trace> + Sync) -> Trace {
    let traces = Ranks::new(n).run(cpu, program).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
    for (rank, trace) in traces.iter().enumerate() {
        assert!(*trace == traces[0], "rank {rank} of {n} differs from rank 0:\n{trace:?}\n{:?}", traces[0]);
    }
    traces[0].clone()
}

/// The larger of two differences; NaN if one is.
pub fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// Asserts that two lists differ by at most `within` in each element.
pub fn close(a: &[f64], b: &[f64], within: f64, what: &str) {
    assert_eq!(a.len(), b.len());
    let off = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, larger);
    assert!(off <= within, "{what}: {off:e}");
}

/// The largest difference of two traces, relative to the largest value in each list.
pub fn difference(a: &Trace, b: &Trace) -> f64 {
    let lists = |t: &Trace| [vec![t.losses.clone(), t.norms.clone()], t.weights.clone()].concat();
    let (a, b) = (lists(a), lists(b));
    assert_eq!(a.len(), b.len());
    let of = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        assert_eq!(x.len(), y.len());
        let scale = y.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs()));
        x.iter().zip(y).map(|(x, y)| (x - y).abs() / scale).fold(0.0, larger)
    };
    a.iter().zip(&b).map(of).fold(0.0, larger)
}

/// Cases of a product that a test runs: one of `of` as they come, from the first on, or [all](all_cases). An `of` without a factor in common with the lengths of the inner lists meets each of their values.
pub struct Turns {
    of: usize,
    met: usize,
}

impl Turns {
    pub fn one_of(of: usize) -> Self {
        Self { of: if all_cases() { 1 } else { of }, met: 0 }
    }

    /// Whether it is the turn of the case that comes now.
    pub fn come(&mut self) -> bool {
        self.met += 1;
        (self.met - 1).is_multiple_of(self.of)
    }
}

/// Whether tests run all cases of their products, as in the stage `soak`.
pub fn all_cases() -> bool {
    std::env::var_os("WEFTGRAD_TEST_ALL_CASES").is_some()
}

/// Half of the pairs of two lists, like the fields of one colour on a chessboard: every value is in some. All pairs take long.
pub fn half<A: Copy, B: Copy>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    let all = a.iter().enumerate().flat_map(|(i, &a)| b.iter().enumerate().map(move |(j, &b)| (i + j, (a, b))));
    all.filter(|(place, _)| place % 2 == 0).map(|(_, pair)| pair).collect()
}

/// Requires that every rank was told an error with all of these words.
pub fn refused<T>(outcomes: impl IntoIterator<Item = Result<T>>, words: &[&str]) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.map(drop).expect_err("an error").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "rank {rank}, {words:?}: {error}");
    }
}

/// The strategy of a step without ZeRO.
pub fn data_parallel(step: &TrainStep<Cpu>) -> &DataParallel<Cpu> {
    step.strategy().downcast_ref().expect("data parallelism")
}

/// The strategy of a step with ZeRO.
pub fn shards(step: &TrainStep<Cpu>) -> &Sharded<Cpu> {
    step.strategy().downcast_ref().expect("shards")
}

/// The strategies of a step's stages.
pub fn set(step: &TrainStep<Cpu>) -> &StrategySet<Cpu> {
    step.strategy().downcast_ref().expect("several strategies")
}
