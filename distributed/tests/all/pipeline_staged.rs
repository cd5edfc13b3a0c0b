//! What the tests of staged trainers share: models that can be whole or in stages, every strategy, and what runs tell.
#![allow(dead_code, reason = "each test file uses its part")]

use distributed::pipeline::{balanced, split};

use crate::{
    pipeline_common::{ROWS, TIMEOUT, WIDTH, shape},
    prelude::*,
    zero_stages::options,
};

pub const GPT: GptConfig = GptConfig {
    vocab: 11,
    context: 6,
    layers: 3,
    heads: 2,
    width: 8,
    bias: true,
    dropout: 0.0,
    activation: Activation::Gelu,
    tied_head: true,
};

/// How each stage is trained over its replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    Replicas,
    Zero(ZeroStage),
    /// Stage 3, gathered as a stage of the pipeline is used, not as its layers are.
    Gathered,
}

pub const HOWS: [How; 5] = [
    How::Replicas,
    How::Zero(ZeroStage::Optimizer),
    How::Zero(ZeroStage::Gradients),
    How::Zero(ZeroStage::Parameters),
    How::Gathered,
];

impl How {
    pub fn checked(self, kind: ScheduleKind, p: usize, v: usize, m: usize) -> Option<Checked> {
        let schedule = kind.generate(shape(p, v, m)).ok()?;
        let lowering = Lowering { sharded: self == How::Gathered, ..Lowering::default() };
        Some(schedule.lower(lowering.clone()).unwrap().check(Limits::default()).unwrap())
    }

    pub fn zero(self) -> Option<ZeroOptions> {
        match self {
            How::Replicas => None,
            How::Zero(stage) => Some(options(stage, UnitOf::layers())),
            How::Gathered => Some(options(ZeroStage::Parameters, UnitOf::layers())),
        }
    }
}

/// A model that can be whole or in stages, with its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Model {
    Mlp,
    Gpt,
    /// The first in `bf16`.
    Half,
}

impl Model {
    fn dtype(self) -> DType {
        if self == Model::Half { DType::BF16 } else { DType::F64 }
    }

    pub fn whole(self, rt: &Cpu, layers: usize) -> Box<dyn Forward<Cpu>> {
        let init = Init::new(rt, 5).dtype(self.dtype());
        match self {
            Model::Mlp | Model::Half => Box::new(mlp(&init, layers)),
            Model::Gpt => Box::new(Gpt::new(&init, GPT).unwrap()),
        }
    }

    /// This rank's stages of `layers` layers in all.
    pub fn staged(self, comm: &Comm<Cpu>, checked: &Checked, layers: usize) -> PipelineModel<Cpu> {
        let stages = self.stages(comm, checked, layers);
        PipelineModel::on(comm.rank(), checked.clone(), stages).loss(move |y, t| self.loss(&y[0], &t[0]))
    }

    /// All stages of `layers` layers. Replicas start from other values than the first, whose count.
    pub fn stages(self, comm: &Comm<Cpu>, checked: &Checked, layers: usize) -> Vec<Box<dyn Stage<Cpu>>> {
        let (count, p) = (checked.schedule().stages(), checked.schedule().placement().ranks());
        let init = Init::new(comm.runtime(), 5 + (comm.rank() / p) as u64).dtype(self.dtype());
        match self {
            Model::Mlp | Model::Half => {
                let layers = mlp(&init, layers).into_layers();
                let cuts = balanced(&layers, count).unwrap();
                split(layers, &cuts).unwrap()
            }
            Model::Gpt => {
                let cut = Gpt::new(&init, GPT).unwrap().split(count).unwrap();
                cut.into_iter().map(|stage| Box::new(stage) as _).collect()
            }
        }
    }

    /// All examples of a step.
    pub fn batch(self, rt: &Cpu, step: usize, micros: usize) -> Result<(Tensor<Cpu>, Tensor<Cpu>)> {
        match self {
            Model::Mlp | Model::Half => {
                let (rows, dtype) = (micros * ROWS, self.dtype());
                let rows = |seed| Tensor::normal(rt, [rows, WIDTH], dtype, 0.0, 1.0, seed + step as u64);
                Ok((rows(100)?, rows(200)?))
            }
            Model::Gpt => {
                let token = |k: usize| ((k * k + 3 * step + k / 5) % GPT.vocab) as i64;
                let tokens: Vec<i64> = (0..micros * ROWS * (GPT.context + 1)).map(token).collect();
                let all = Tensor::from_slice(rt, [micros * ROWS, GPT.context + 1], &tokens)?;
                Ok((all.narrow(1, 0, GPT.context)?, all.narrow(1, 1, GPT.context)?))
            }
        }
    }

    pub fn loss(self, y: &Var<Cpu>, target: &Var<Cpu>) -> Result<Loss<Cpu>> {
        let weight = target.dims().iter().product::<usize>() as f64;
        match self {
            Model::Mlp | Model::Half => Loss::sum(mse(y, target, Reduction::Sum)?, weight),
            Model::Gpt => {
                let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                Loss::sum(cross_entropy_with(y, target, None, options)?, weight)
            }
        }
    }
}

fn mlp(init: &Init<Cpu>, layers: usize) -> Sequential<Cpu> {
    let linear = |_| Linear::new(init, WIDTH, WIDTH).unwrap();
    (0..layers).map(linear).fold(Sequential::new(), |model, layer| model.push(layer).push(Tanh))
}

/// Values by name.
pub type Values = BTreeMap<String, Vec<f64>>;

/// What a run tells: losses, norms, weights after every step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub weights: Vec<Values>,
}

pub fn values(state: Vec<(String, Tensor<Cpu>)>) -> Result<Values> {
    state.into_iter().map(|(name, value)| Ok((name, value.to_dtype(DType::F64)?.to_vec::<f64>()?))).collect()
}

pub fn reference(model: Model, layers: usize, micros: usize, steps: usize) -> Told {
    let rt = cpu(0).unwrap();
    let whole = model.whole(&rt, layers);
    let mut trainer = simple(&rt, &whole, config()).unwrap();
    let mut told = Told::default();
    for step in 0..steps {
        let (x, y) = model.batch(&rt, step, micros).unwrap();
        let loss = |_| model.loss(&whole.forward(&Var::new(x.clone()))?, &Var::new(y.clone()));
        let metrics = trainer.step(loss).unwrap();
        told.losses.push(metrics.loss().unwrap());
        told.norms.extend(metrics.grad_norm().unwrap());
        told.weights.push(values(whole.state_dict().unwrap()).unwrap());
    }
    told
}

/// Takes some steps of one run of the pipeline each; every rank is told what it has of the model after each.
pub fn steps<G>(
    comm: &Comm<Cpu>,
    model: Model,
    trainer: &mut TrainStep<Cpu>,
    steps: std::ops::Range<usize>,
    scope: impl Fn(&TrainStep<Cpu>) -> Result<G>,
) -> Result<Told> {
    steps_of(1, comm, model, trainer, steps, scope)
}

/// The same with so many runs in a step.
pub fn steps_of<G>(
    runs: usize,
    comm: &Comm<Cpu>,
    model: Model,
    trainer: &mut TrainStep<Cpu>,
    steps: std::ops::Range<usize>,
    scope: impl Fn(&TrainStep<Cpu>) -> Result<G>,
) -> Result<Told> {
    let schedule = trainer.pipeline().expect("stages").schedule();
    let (p, m) = (schedule.placement().ranks(), schedule.micro_batches());
    let mut told = Told::default();
    for step in steps {
        let (x, y) = model.batch(comm.runtime(), step, m * runs * comm.size() / p)?;
        let part = |k| {
            let at = (comm.rank() / p * runs + k) * m * ROWS;
            MicroBatches::split(&[x.narrow(0, at, m * ROWS)?], &[y.narrow(0, at, m * ROWS)?], m)
        };
        let metrics = trainer.step(part)?;
        assert_eq!(metrics.global_step(), step as u64 + 1);
        told.losses.push(metrics.loss()?);
        told.norms.extend(metrics.grad_norm()?);
        let _scope = scope(trainer)?;
        let mut here = Values::new();
        for stage in trainer.pipeline().expect("stages").stages().values() {
            for (name, value) in values(stage.state_dict()?)? {
                // Both copies may be here.
                assert!(here.get(&name).is_none_or(|other| *other == value), "copies of {name} differ");
                here.insert(name, value);
            }
        }
        told.weights.push(here);
    }
    Ok(told)
}

pub fn ranks_of<T: Send>(n: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Result<Vec<T>> {
    if n == 1 {
        return Ok(vec![program(Arc::new(NoOpCommunicator::new(&cpu(0)?)))?]);
    }
    Ranks::new(n).timeout(TIMEOUT).run(cpu, program)
}

/// What all ranks have together: they are told the same, and have the same bits of what several have.
pub fn joined(ranks: Vec<Told>) -> Told {
    let mut all = Told { weights: vec![Values::new(); ranks[0].weights.len()], ..ranks[0].clone() };
    for rank in ranks {
        assert!(rank.losses == all.losses && rank.norms == all.norms, "every rank is told the same");
        for (all, here) in all.weights.iter_mut().zip(rank.weights) {
            for (name, value) in here {
                let first = all.entry(name.clone()).or_insert_with(|| value.clone());
                assert!(*first == value, "copies of {name} differ");
            }
        }
    }
    all
}

/// The largest difference, relative to the largest value of each kind.
pub fn far(got: &Told, want: &Told) -> f64 {
    let lists = |told: &Told| {
        let mut lists = vec![told.losses.clone(), told.norms.clone()];
        lists.extend(told.weights.iter().flat_map(|of| of.values().cloned()));
        lists
    };
    assert_eq!(got.weights.len(), want.weights.len());
    for (got, want) in got.weights.iter().zip(&want.weights) {
        assert!(got.keys().eq(want.keys()), "{:?}", got.keys());
    }
    let of = |(got, want): (&Vec<f64>, &Vec<f64>)| {
        assert_eq!(got.len(), want.len());
        let largest = want.iter().fold(f64::MIN_POSITIVE, |most, v| most.max(v.abs()));
        let worst = got.iter().zip(want).fold(0.0_f64, |most, (a, b)| most.max((a - b).abs()));
        assert!(!got.iter().any(|v| v.is_nan()));
        worst / largest
    };
    lists(got).iter().zip(&lists(want)).map(of).fold(0.0, f64::max)
}

/// Two layers of equal size a stage, so that formulas need no allowance for padding.
pub fn layers(comm: &Comm<Cpu>, checked: &Checked) -> Result<PipelineModel<Cpu>> {
    let init = Init::new(comm.runtime(), 0);
    let count = checked.schedule().stages();
    let linear = |_| Linear::new(&init, 128, 128).map(Linear::without_bias);
    let layers = (0..2 * count).map(linear).collect::<Result<Vec<_>>>()?.into_iter();
    let layers: Vec<Box<dyn Forward<Cpu>>> = layers.map(|layer| Box::new(layer) as _).collect();
    let cuts: Vec<usize> = (1..count).map(|k| 2 * k).collect();
    let staged = PipelineModel::on(comm.rank(), checked.clone(), split(layers, &cuts)?);
    Ok(staged.loss(|y, t| Ok(Loss::mean(mse(&y[0], &t[0], Reduction::Mean)?))))
}
