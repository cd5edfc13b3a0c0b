//! The kit of tests that train on many ranks: a [`Way`] names the model and its distribution.
//!
//! [`Way::outcome`] trains the model on the ranks of the way's axes, in stages if it has some. It joins the ranks' losses,
//! norms and weights; elements that two ranks have must agree to the bit. [`Way::alone`] trains it on one rank with the
//! same examples, by the plainest step. [`Way::same`] compares the two. Tables of ways are in `ways`; `matrix` draws from
//! all ways. [`Way::each`] gives another test the [`Training`](crate::training::Training) of every rank.

use crate::{
    mixture,
    pipeline_common::{TIMEOUT, WIDTH},
    prelude::*,
    start::Answer,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment. A gradient that counts twice,
/// or a norm of the wrong parts, is off by more than a tenth.
pub const CLOSE: f64 = 1e-11;

/// A schedule of a pipeline.
#[derive(Clone, Copy, Debug)]
pub struct Stages {
    pub kind: ScheduleKind,
    /// Stages on each rank.
    pub v: usize,
    pub micros: usize,
    /// Whether parameters in shards are gathered as a stage is used, not as its layers are.
    pub gathered: bool,
}

/// The rule of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    AdamW,
    Sgd,
    Lamb,
    Adafactor,
    Muon,
    Prodigy,
    Lbfgs,
}

impl Rule {
    /// True if the rule needs whole parameters.
    pub fn is_whole(self) -> bool {
        matches!(self, Rule::Lamb | Rule::Adafactor | Rule::Muon)
    }
}

/// A model that is trained.
#[derive(Clone, Debug)]
pub enum Kind {
    /// The one that [`Way::gpt`] configures.
    Gpt,
    Mixture(MoeConfig),
    /// So many linear layers, each followed by Tanh.
    Layers(usize),
}

/// A model, and how it is trained.
#[derive(Clone, Debug)]
pub struct Way {
    pub axes: Vec<(Axis, usize)>,
    pub kind: Kind,
    pub gpt: GptConfig,
    pub dtype: DType,
    pub frozen: &'static [&'static str],
    /// Examples of a step.
    pub examples: usize,
    pub loss: VocabularyLoss,
    /// The factors of the routers' balance loss and z-loss.
    pub router: [f64; 2],
    /// The distance that balance biases move after a step.
    pub bias_rate: f64,
    pub steps: usize,
    pub max_norm: Option<f64>,
    pub rule: Rule,
    pub zero: ZeroOptions,
    /// Where nothing is sharded.
    pub buckets: BucketOptions,
    /// The compression of gradients by a reducer.
    pub power: Option<PowerSgd>,
    pub accumulation: usize,
    pub sequence: bool,
    /// In how many pieces layers exchange parts of the sequence.
    pub pieces: usize,
    pub exchange: ContextExchange,
    pub stages: Option<Stages>,
    /// Whether the first replica has all examples, and what the others compute weighs nothing.
    pub first_has_all: bool,
    /// True if a mixture is trained without `experts()`: each rank has all of them.
    pub bare: bool,
    /// Parameters of stages that are one, beside those that a GPT's configuration ties.
    pub tied: &'static [&'static str],
}

impl Way {
    /// A GPT whose sizes `t` divides.
    pub fn gpt(t: usize) -> Self {
        let heads = t.max(2);
        let gpt = GptConfig {
            vocab: 4 * heads,
            context: 2 * heads,
            layers: 2,
            heads,
            width: 4 * heads,
            ..Default::default()
        };
        let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        Way {
            axes: Vec::new(),
            kind: Kind::Gpt,
            gpt,
            dtype: DType::F64,
            frozen: &[],
            examples: 6,
            loss: VocabularyLoss { cross_entropy, z_loss: 0.0 },
            router: [0.0; 2],
            bias_rate: 0.0,
            steps: 2,
            max_norm: Some(0.5),
            rule: Rule::AdamW,
            zero: ZeroStage::None.into(),
            buckets: BucketOptions::default(),
            power: None,
            accumulation: 1,
            sequence: false,
            pieces: 1,
            exchange: ContextExchange::AllGather,
            stages: None,
            first_has_all: false,
            bare: false,
            tied: &[],
        }
    }

    /// A mixture of so many experts. Its examples are not as many on every rank at most world sizes.
    pub fn mixture(experts: usize) -> Self {
        let kind = Kind::Mixture(MoeConfig::new(mixture::WIDTH, 6, experts, 2.min(experts)));
        Way { kind, examples: 9, ..Way::gpt(2) }
    }

    /// So many layers.
    pub fn layers(layers: usize) -> Self {
        Way { kind: Kind::Layers(layers), ..Way::gpt(2) }
    }

    /// This mixture with another configuration.
    pub fn config(mut self, set: impl FnOnce(&mut MoeConfig)) -> Self {
        set(self.moe_mut());
        self
    }

    fn moe_mut(&mut self) -> &mut MoeConfig {
        match &mut self.kind {
            Kind::Mixture(config) => config,
            kind => panic!("{kind:?} is no mixture"),
        }
    }

    pub fn is_mixture(&self) -> bool {
        matches!(self.kind, Kind::Mixture(_))
    }

    /// Stages of this model, in four micro-batches.
    pub fn staged(mut self, kind: ScheduleKind, v: usize) -> Self {
        self.gpt.layers = self.gpt.layers.max(2 * v);
        Way { stages: Some(Stages { kind, v, micros: 4, gathered: false }), examples: 8, ..self }
    }

    pub fn micros(mut self, micros: usize) -> Self {
        self.stages.as_mut().expect("stages").micros = micros;
        self
    }

    /// Stages whose shards are gathered as a stage is used.
    pub fn gathered(mut self) -> Self {
        self.stages.as_mut().expect("stages").gathered = true;
        self.zero(ZeroStage::Parameters)
    }

    pub fn zero(self, zero: impl Into<ZeroOptions>) -> Self {
        Way { zero: zero.into(), ..self }
    }

    /// This way with each strategy there is: nothing in shards, what each stage of ZeRO shards, stages gathered whole.
    pub fn strategies(&self) -> Vec<Way> {
        let gathered = self.stages.map(|_| self.clone().gathered());
        STAGES.into_iter().map(|stage| self.clone().zero(stage)).chain(gathered).collect()
    }

    pub fn over(self, axes: &[(Axis, usize)]) -> Self {
        Way { axes: axes.to_vec(), ..self }
    }

    pub fn size(&self, axis: Axis) -> usize {
        self.axes.iter().filter(|(own, _)| *own == axis).map(|(_, size)| size).product()
    }

    pub fn tokens(&self) -> usize {
        if self.is_mixture() { mixture::TOKENS } else { self.gpt.context }
    }

    /// Tokens and targets, or rows, of some examples of a step.
    pub fn batch(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<(Var<Cpu>, Var<Cpu>)> {
        if let Kind::Layers(_) = self.kind {
            let index: Vec<i64> = examples.iter().map(|&row| row as i64).collect();
            let index = Tensor::from_slice(rt, [index.len()], &index)?;
            let rows = |seed| {
                Tensor::normal(rt, [self.examples, WIDTH], self.dtype, 0.0, 1.0, seed + step as u64)?
                    .index_select(0, &index)
                    .map(Var::new)
            };
            return Ok((rows(100)?, rows(200)?));
        }
        let (v, t) = (if self.is_mixture() { mixture::VOCAB } else { self.gpt.vocab }, self.tokens());
        let token = |i: usize| ((i * 7 + i / 3 + step * 5) % v) as i64;
        let row = |&row: &usize| (row * (t + 1)..(row + 1) * (t + 1)).map(token);
        let text: Vec<i64> = examples.iter().flat_map(row).collect();
        let text = Tensor::from_slice(rt, [examples.len(), t + 1], &text)?;
        Ok((Var::new(text.narrow(1, 0, t)?.contiguous()?), Var::new(text.narrow(1, 1, t)?.contiguous()?)))
    }

    /// The examples that replica `r` of `n` has in run `k` of a step. Those of a mixture are consecutive ones of each
    /// micro-batch: which tokens exceed a capacity depends on their order, and routers lose what a micro-batch makes.
    pub fn share(&self, k: usize, r: usize, n: usize) -> Vec<usize> {
        if !self.is_mixture() {
            let own = shard_batches(self.examples, r, n);
            let run = own.len().div_ceil(self.accumulation);
            return own[(k * run).min(own.len())..((k + 1) * run).min(own.len())].to_vec();
        }
        let micros = self.stages.map_or(1, |stages| stages.micros);
        let micro = |m: usize| {
            let cut = |m: usize| m * self.examples / (self.accumulation * micros);
            let at = |r: usize| cut(m) + r * (cut(m + 1) - cut(m)) / n;
            at(r)..at(r + 1)
        };
        (k * micros..(k + 1) * micros).flat_map(micro).collect()
    }

    /// Runs on the ranks of the axes.
    pub fn outcomes<T: Answer>(&self, program: impl Fn(&Mesh<Cpu>) -> Result<T> + Sync) -> Vec<Result<T>> {
        let plan = ParallelPlan::of(self.axes.clone()).unwrap();
        let ranks = Ranks::new(plan.world()).timeout(TIMEOUT);
        ranks.outcomes(cpu, |comm| program(&Mesh::new(&comm, plan.clone())?)).unwrap()
    }

    pub fn ranks<T: Answer>(&self, program: impl Fn(&Mesh<Cpu>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let plan = ParallelPlan::of(self.axes.clone())?;
        let ranks = Ranks::new(plan.world()).timeout(TIMEOUT);
        ranks.run(cpu, |comm| program(&Mesh::new(&comm, plan.clone())?))
    }

    /// What a program makes of the training of each rank.
    pub fn each<T: Answer>(&self, program: impl Fn(&mut Training) -> Result<T> + Sync) -> Vec<T> {
        let outcome = self.ranks(|mesh| program(&mut Training::new(self, mesh)?));
        outcome.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// What ranks make of it, and all of them agree on.
    pub fn outcome(&self) -> RunOutcome {
        assembled(self.each(|training| training.run()))
    }

    /// The same on one rank. The micro-batches of a mixture, or of a model that draws masks, are those of all ranks.
    pub fn reference(&self) -> Self {
        let micros = self.stages.map_or(1, |stages| stages.micros) * self.accumulation;
        Way {
            axes: Vec::new(),
            zero: ZeroStage::None.into(),
            buckets: BucketOptions::default(),
            power: None,
            accumulation: if self.is_mixture() || self.gpt.dropout > 0.0 { micros } else { 1 },
            sequence: false,
            pieces: 1,
            exchange: ContextExchange::AllGather,
            stages: None,
            first_has_all: false,
            ..self.clone()
        }
    }

    /// What one rank makes of it: computed once for all ways of which it is the same.
    pub fn alone(&self) -> RunOutcome {
        static KNOWN: Mutex<BTreeMap<String, RunOutcome>> = Mutex::new(BTreeMap::new());
        let reference = self.reference();
        let key = format!("{reference:?}");
        if let Some(outcome) = KNOWN.lock().unwrap().get(&key) {
            return outcome.clone();
        }
        let train = |_| Training::new(&reference, &NoOpCommunicator::new(&cpu(0)?).as_mesh())?.run();
        // In a world of one: where ranks are processes, the first trains, and tells the others.
        let outcome = Ranks::new(1).run(cpu, train).unwrap().remove(0);
        KNOWN.lock().unwrap().insert(key, outcome.clone());
        outcome
    }

    /// Requires what one rank makes of it.
    pub fn same(&self) {
        self.same_as(&self.alone());
    }

    pub fn same_as(&self, other: &RunOutcome) {
        let off = distance(&self.outcome(), other);
        assert!(off <= CLOSE, "{self:?}: {off:e}");
    }

    /// Requires the first loss and the first norm of one rank within a share of them.
    pub fn near(&self, within: f64) {
        let (many, one) = (self.outcome(), self.alone());
        for (many, one) in [(many.losses[0], one.losses[0]), (many.norms[0], one.norms[0])] {
            assert!((many - one).abs() <= within * one, "{self:?}: {many} and {one}");
        }
    }

    /// Loads what is in `from`, takes these steps, and saves into `to`; returns the outcome of the steps.
    pub fn go_on(&self, from: Option<&Folder>, steps: Range<usize>, to: Option<&Folder>) -> RunOutcome {
        assembled(self.each(|training| training.go_on(from, steps.clone(), to)))
    }
}
