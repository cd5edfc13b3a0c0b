//! QLoRA on a mesh: adapters are trained over weights in four bits, in two stages of a pipeline. The layers of a stage
//! are cut over two ranks, and the sequences between them too. The losses are those of one rank.
#![forbid(unsafe_code)]

use weftgrad::{
    distributed::{
        comm::{Comm, Communicator},
        mesh::Mesh,
        plan::{Axis, ParallelPlan},
        train::TrainStep,
    },
    models::{Decoder, Lora, LoraConfig, LoraTargets, QuantizeConfig, quantize},
    nn::Init,
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

const STEPS: usize = 20;
const MICRO_BATCHES: usize = 4;

fn main() -> Outcome<()> {
    let mesh = small::on_ranks(4, on_a_mesh)?;
    small::compare("QLoRA on a mesh", &mesh, &small::on_ranks(1, alone)?)
}

fn on_a_mesh(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Pipe, 2), (Axis::Tensor, 2)])?)?;
    let (model, _lora) = adapted(&comm)?;
    let plan = Decoder::<Cpu>::tensor_plan().sequence_parallel(true);
    let stages = small::stages(&mesh, model, &plan, MICRO_BATCHES)?;
    let mut step = TrainStep::builder(&mesh, stages).optimizer(small::adamw(5e-3)).max_norm(1.0).build()?;
    let mut loss = |k| step.step(|_| small::micro_batches(&comm, k, 0..small::ROWS, MICRO_BATCHES))?.loss();
    (0..STEPS).map(&mut loss).collect()
}

fn alone(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let (model, lora) = adapted(&comm)?;
    let mut step = TrainStep::builder(&comm, &lora).optimizer(small::adamw(5e-3)).max_norm(1.0).build()?;
    let mut loss = |k| step.step(|_| small::loss(&model, small::batch(&comm, k, 0..small::ROWS)?))?.loss();
    (0..STEPS).map(&mut loss).collect()
}

/// The model in four bits, and its adapters. Both are made whole, and cut with the model afterwards.
fn adapted(comm: &Comm<Cpu>) -> Result<(Decoder<Cpu>, Lora<Cpu>)> {
    let model = small::decoder(comm, 0)?;
    quantize(&model, &QuantizeConfig::default())?;
    let config = LoraConfig { rank: 4, target_modules: LoraTargets::AllLinear, ..Default::default() };
    let lora = Lora::new(&model, &Init::new(comm.runtime(), 2).dtype(DType::F64), config)?;
    Ok((model, lora))
}
