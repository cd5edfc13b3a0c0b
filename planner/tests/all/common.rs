//! Models of the tests.

pub use autograd::Var;
pub use distributed::{
    comm::Communicator,
    context_parallel::ContextExchange,
    mesh::Mesh,
    pipeline::{Checked, Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind, Tie},
    plan::{Axis, ParallelPlan},
    train::{Loss, StepInput, StepModel, TrainStep},
    zero::ZeroStage,
};
pub use nn::{
    BatchNorm, Forward, Gpt, GptConfig, Init, LayerNorm, Linear, Module, Sequential, Tanh,
    parallel::{TensorPlan, VocabularyLoss},
};
pub use numcore::{
    DType, Result, Tensor,
    fused::{CrossEntropyOptions, NnOps, Reduction},
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
pub use optim::{AdamWConfig, SgdConfig};
pub use planner::verify::{Cause, Examples, StepPart, Verification, Verify};
pub use runtime_cpu::Cpu;

pub const VOCAB: usize = 16;
pub const CONTEXT: usize = 8;

pub fn plan(axes: &[(Axis, usize)]) -> ParallelPlan {
    ParallelPlan::of(axes.iter().copied()).unwrap()
}

pub fn init(mesh: &Mesh<Cpu>) -> Init<Cpu> {
    Init::new(mesh.world().runtime(), 42).dtype(DType::F64)
}

/// Rows of numbers, `[rows, width]`.
pub fn numbers(rows: usize, width: usize) -> impl Fn(&Cpu, u64) -> Result<Vec<Tensor<Cpu>>> + Sync {
    move |rt, step| Ok(vec![Tensor::uniform(rt, [rows, width], DType::F64, -1.0, 1.0, 10 + step)?])
}

/// Sequences of tokens with their targets, `[rows, CONTEXT]` each.
pub fn texts(rows: usize) -> impl Fn(&Cpu, u64) -> Result<Vec<Tensor<Cpu>>> + Sync {
    move |rt, step| {
        let token = |i: usize| ((i * 7 + i / 3 + step as usize * 5) % VOCAB) as i64;
        let text: Vec<i64> = (0..rows * (CONTEXT + 1)).map(token).collect();
        let text = Tensor::from_slice(rt, [rows, CONTEXT + 1], &text)?;
        Ok(vec![text.narrow(1, 0, CONTEXT)?.contiguous()?, text.narrow(1, 1, CONTEXT)?.contiguous()?])
    }
}

pub fn gpt() -> GptConfig {
    GptConfig { vocab: VOCAB, context: CONTEXT, layers: 2, heads: 4, width: 16, ..Default::default() }
}

pub fn summed() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, z_loss: 0.0 }
}

pub fn gpt_loss(model: &Gpt<Cpu>, examples: &Examples<'_, Cpu>) -> Result<Loss<Cpu>> {
    let [tokens, targets] = [0, 1].map(|k| Var::new(examples.tensors[k].clone()));
    Loss::sum(model.next_token_loss(&tokens, &targets, &summed())?, (examples.rows() * CONTEXT) as f64)
}

/// The cut GPT.
pub fn gpt_on(mesh: &Mesh<Cpu>, config: GptConfig, cut: &TensorPlan) -> Result<Gpt<Cpu>> {
    let model = Gpt::new(&init(mesh), config)?;
    mesh.parallelize(&model, cut)?;
    if mesh.plan().size(Axis::Context) > 1 {
        mesh.context_parallel(&model, ContextExchange::Ring)?;
    }
    Ok(model)
}

/// A step of a cut GPT in stages, which holds the model.
pub fn gpt_in_stages(
    mesh: &Mesh<Cpu>,
    config: GptConfig,
    (kind, stages_per_rank): (ScheduleKind, usize),
    loss: VocabularyLoss,
) -> Result<(Vec<Linear<Cpu>>, TrainStep<Cpu>)> {
    let pipe = mesh.axis(Axis::Pipe);
    let checked = schedule(kind, pipe.size(), stages_per_rank)?;
    let count = checked.schedule().stages();
    let (stages, loss) = Gpt::new(&init(mesh), config)?.split_with_loss(count, loss)?;
    let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
        Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
    };
    let model = PipelineModel::on(pipe.rank(), checked, stages).loss(loss);
    let model = model.parallelize(mesh, &Gpt::<Cpu>::tensor_plan())?;
    Ok((Vec::new(), TrainStep::builder(mesh, model).optimizer(adamw()).build()?))
}

/// The micro-batches of texts for a model in stages.
pub fn texts_in_stages(_: &Vec<Linear<Cpu>>, examples: &Examples<'_, Cpu>) -> Result<MicroBatches<Cpu>> {
    let [tokens, targets] = [0, 1].map(|k| [examples.tensors[k].clone()]);
    MicroBatches::split(&tokens, &targets, 4)
}

pub fn adamw() -> AdamWConfig {
    AdamWConfig { lr: 1e-2, ..Default::default() }
}

pub fn runtime(_: usize) -> Result<Cpu> {
    Ok(Cpu::new())
}

pub fn schedule(kind: ScheduleKind, ranks: usize, stages_per_rank: usize) -> Result<Checked> {
    let shape = PipeShape { ranks, stages_per_rank, micro_batches: 4 };
    kind.generate(shape)?.lower(Lowering::default())?.check(Limits::default())
}
