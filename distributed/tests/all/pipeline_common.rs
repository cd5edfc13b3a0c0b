//! What the tests of the runner share: schedules, a model of layers, a world of threads.

use distributed::{
    comm::engine::Portable,
    pipeline::{PipeShape, balanced, split},
};

use crate::prelude::*;

/// Far more than any run takes: a hang becomes an error.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// `p` ranks, `v` stages per rank, `m` micro-batches.
pub fn shape(p: usize, v: usize, m: usize) -> PipeShape {
    PipeShape { ranks: p, stages_per_rank: v, micro_batches: m }
}

/// Every kind at these sizes, where its preconditions hold; where they do not it says so by name.
pub fn kinds(p: usize, v: usize, m: usize) -> impl Iterator<Item = (ScheduleKind, Checked)> {
    ScheduleKind::ALL.iter().filter_map(move |&kind| {
        let made = checked(kind, p, v, m);
        let refused = || kind.generate(shape(p, v, m)).unwrap_err().to_string();
        assert!(made.is_some() || refused().contains(&format!("{kind} needs ")), "{}", refused());
        Some((kind, made?))
    })
}

pub fn checked(kind: ScheduleKind, p: usize, v: usize, m: usize) -> Option<Checked> {
    let schedule = kind.generate(shape(p, v, m)).ok()?;
    Some(schedule.lower(Lowering::default()).unwrap().check(Limits::default()).unwrap())
}

/// A world of one needs no threads.
pub fn world<T: Portable>(p: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<T> {
    if p == 1 {
        let alone: Comm<Cpu> = std::sync::Arc::new(NoOpCommunicator::new(&cpu(0).unwrap()));
        return vec![program(alone).unwrap()];
    }
    Ranks::new(p).timeout(TIMEOUT).run(cpu, program).unwrap()
}

pub const WIDTH: usize = 12;
pub const ROWS: usize = 3;

/// `2 · depth` layers: Linear and Tanh in turn.
pub fn mlp(rt: &Cpu, depth: usize) -> Sequential<Cpu> {
    let init = Init::new(rt, 17);
    let linear = |_| Linear::new(&init, WIDTH, WIDTH).unwrap();
    (0..depth).map(linear).fold(Sequential::new(), |model, layer| model.push(layer).push(Tanh))
}

pub fn mlp_stages(rt: &Cpu, depth: usize, stages: usize) -> Vec<Box<dyn Stage<Cpu>>> {
    let layers = mlp(rt, depth).into_layers();
    let cuts = balanced(&layers, stages).unwrap();
    split(layers, &cuts).unwrap()
}

/// A trainer of two stages, which this rank has alone; `adapt` gets the stages before.
pub fn two_stages(rt: &Cpu, adapt: impl FnOnce(&[Box<dyn Stage<Cpu>>])) -> TrainStep<Cpu> {
    let stages = mlp_stages(rt, 2, 2);
    adapt(&stages);
    let checked = checked(ScheduleKind::Interleaved, 1, 2, 2).unwrap();
    pipelined(&NoOpCommunicator::new(rt), PipelineModel::on(0, checked, stages).loss(squares), config()).unwrap()
}

pub fn rows(rt: &Cpu, seed: u64, micros: usize) -> Tensor<Cpu> {
    Tensor::uniform(rt, [micros * ROWS, WIDTH], DType::F32, -1.0, 1.0, seed).unwrap()
}

/// The sum of squares, weighing as many rows as there are.
pub fn squares(outputs: &[Var<Cpu>], targets: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
    Loss::sum(mse(&outputs[0], &targets[0], Reduction::Sum)?, outputs[0].dims()[0] as f64)
}

pub fn pipeline(comm: &Comm<Cpu>, checked: &Checked, stages: Vec<Box<dyn Stage<Cpu>>>) -> Result<Pipeline<Cpu>> {
    Pipeline::new(comm, PipelineModel::on(comm.rank(), checked.clone(), stages).loss(squares))
}

/// Values by name.
pub type Numbers = BTreeMap<String, Vec<f32>>;

pub type Optimizers = BTreeMap<usize, Sgd<Cpu>>;
pub type StageGradients = BTreeMap<usize, FlatGradients<Cpu>>;

/// Gradient descent with momentum for every stage of this rank.
pub fn optimizers(pipeline: &Pipeline<Cpu>, lr: f64) -> Result<(Optimizers, StageGradients)> {
    let (mut optimizers, mut gradients) = (BTreeMap::new(), BTreeMap::new());
    for (&stage, module) in pipeline.stages() {
        let leaves: Vec<_> = module.parameters().iter().map(|p| p.leaf()).collect();
        let optimizer = Sgd::in_groups(SgdConfig { lr, momentum: 0.5, ..Default::default() });
        let optimizer = if leaves.is_empty() { optimizer } else { optimizer.group(leaves, |_| {})? };
        gradients.insert(stage, optimizer.alloc_gradients()?);
        optimizers.insert(stage, optimizer);
    }
    Ok((optimizers, gradients))
}

/// The parameters of this rank by name.
pub fn stage_weights<'a>(stages: impl Iterator<Item = &'a Box<dyn Stage<Cpu>>>) -> BTreeMap<String, Vec<f32>> {
    let values = stages.flat_map(|stage| stage.state_dict().unwrap());
    values.map(|(name, value)| (name, value.to_vec::<f32>().unwrap())).collect()
}

/// The same step on one rank, micro-batch by micro-batch or joined: losses of each step, and the weights in the end.
pub fn alone(
    rt: &Cpu,
    model: &(impl Forward<Cpu> + ?Sized),
    parts: usize,
    lr: f64,
    steps: usize,
    mut batch: impl FnMut(usize, usize) -> (Tensor<Cpu>, Tensor<Cpu>),
    loss: impl Fn(&[Var<Cpu>], &[Var<Cpu>]) -> Result<Loss<Cpu>>,
) -> (Vec<Vec<f32>>, BTreeMap<String, Vec<f32>>) {
    let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
    let mut optimizer = Sgd::over(SgdConfig { lr, momentum: 0.5, ..Default::default() }, leaves).unwrap();
    let mut gradients = optimizer.alloc_gradients().unwrap();
    let _ = rt;
    let mut losses = Vec::new();
    for step in 0..steps {
        gradients.zero();
        let mut of_step = Vec::new();
        for part in 0..parts {
            let (x, y) = batch(step, part);
            let loss = loss(&[model.forward(&Var::new(x)).unwrap()], &[Var::new(y)]).unwrap();
            of_step.push(loss.total().value().unwrap().to_vec::<f32>().unwrap()[0]);
            autograd::backward_with_hooks(loss.total(), &mut gradients).unwrap();
        }
        losses.push(of_step);
        optimizer.step_from(&gradients).unwrap();
    }
    let weights = model.state_dict().unwrap().into_iter().map(|(n, v)| (n, v.to_vec::<f32>().unwrap())).collect();
    (losses, weights)
}
