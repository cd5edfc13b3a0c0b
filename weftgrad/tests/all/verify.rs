//! The macro that tests a model on ranks.

use weftgrad::{
    distributed::{
        comm::Communicator,
        train::{Loss, TrainStep},
    },
    optim::AdamWConfig,
    planner::verify::Examples,
    prelude::*,
};

type Built = (nn::Linear<Cpu>, TrainStep<Cpu>);

fn make(mesh: &Mesh<Cpu>) -> Result<Built> {
    let model = nn::Linear::new(&nn::Init::new(mesh.world().runtime(), 42), 4, 1)?;
    let step = TrainStep::builder(mesh, &model).optimizer(AdamWConfig::default()).build()?;
    Ok((model, step))
}

fn batch(rt: &Cpu, step: u64) -> Result<Vec<Tensor<Cpu>>> {
    Ok(vec![Tensor::uniform(rt, [8, 4], DType::F32, -1.0, 1.0, step)?])
}

fn loss(model: &nn::Linear<Cpu>, examples: &Examples<'_, Cpu>) -> Result<Loss<Cpu>> {
    let x = Var::new(examples.tensors[0].clone());
    Loss::sum(model.forward(&x)?.square()?.sum_all()?, examples.rows() as f64)
}

weftgrad::test_on_ranks!(a_linear_layer_is_that_of_one_rank, [[Data 2], [Data 2, Shard 2]], make, batch, loss);
