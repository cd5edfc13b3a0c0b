//! The right columns of `docs/book/src/coming-from.md`, so that they stay true.

use weftgrad::{
    TensorMut, autograd,
    distributed::{
        comm::{Collectives, NoOpCommunicator, Ranks, ReduceOp},
        mesh::Mesh,
        plan::{Axis, ParallelPlan},
        train::{Loss, TrainStep},
        zero::ZeroStage,
    },
    ops,
    optim::{AdamW, AdamWConfig, LossScaler, Optimizer},
    prelude::*,
};

fn counted(shape: &[usize]) -> Result<Tensor<Cpu>> {
    Tensor::arange(&Cpu::with_threads(1), 0, 1, shape.iter().product(), DType::F32)?.reshape(shape)
}

#[test]
fn tensors() -> Result<()> {
    let rt = Cpu::with_threads(1);
    assert_eq!(Tensor::from_slice(&rt, [2], &[1f32, 2.0])?.dims(), [2]);
    assert_eq!(Tensor::arange(&rt, 0, 2, 5, DType::I64)?.to_vec::<i64>()?, [0, 2, 4, 6, 8]);
    let (x, index) = (counted(&[2, 3])?, Tensor::from_slice(&rt, [2], &[1i64, 0])?);
    let is = |y: Result<Tensor<Cpu>>, values: &[f32]| assert_eq!(y.unwrap().to_vec::<f32>().unwrap(), values);
    is(x.t(), &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    is(x.repeat(&[2, 1]), &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    is(x.i((.., 1..3)), &[1.0, 2.0, 4.0, 5.0]);
    is(x.i((Ellipsis, -1)), &[2.0, 5.0]);
    assert_eq!(x.i(NewAxis)?.dims(), [1, 2, 3]);
    is(x.i(&index), &[3.0, 4.0, 5.0, 0.0, 1.0, 2.0]);
    is(x.masked_select(&x.lt(2.0)?), &[0.0, 1.0]);
    assert_eq!(ops::stack(&[&x, &x], 0)?.dims(), [2, 2, 3]);
    assert_eq!(ops::cat(&[&x, &x], 0)?.dims(), [4, 3]);
    assert_eq!((x.split(1, 2)?.len(), x.chunk(1, 3)?.len()), (2, 3));
    is(1.0 - &x, &[1.0, 0.0, -1.0, -2.0, -3.0, -4.0]);
    is(ops::einsum("ij,kj->ik", &[&x, &x]), &[5.0, 14.0, 14.0, 50.0]);
    is(x.where_cond(&x.gt(2.0)?, &(-&x)?), &[-0.0, -1.0, -2.0, 3.0, 4.0, 5.0]);
    assert_eq!((x.sum_all()?.item()?, x.mean_all()?.item()?), (15.0, 2.5));
    is(x.sum_keepdim(&[1]), &[3.0, 12.0]);
    is(x.amax(&[-1]), &[2.0, 5.0]);
    assert_eq!(x.argmax(-1)?.to_vec::<i64>()?, [2, 2]);
    is(x.topk(1, -1).map(|(values, _)| values), &[2.0, 5.0]);
    is(x.sort(-1, true).map(|(values, _)| values), &[2.0, 1.0, 0.0, 5.0, 4.0, 3.0]);
    is(x.cumsum(0), &[0.0, 1.0, 2.0, 3.0, 5.0, 7.0]);
    assert!(!x.copy()?.shares_memory_with(&x));
    Ok(())
}

#[test]
fn autograd_and_modules() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let w = Var::leaf("w", counted(&[3])?)?;
    let loss = w.square()?.sum_all()?;
    assert_eq!(loss.backward()?.of(&w).unwrap().to_vec::<f32>()?, [0.0, 2.0, 4.0]);
    let first = autograd::differentiable_grad(&[&w.square()?.sum_all()?], &[&w])?.remove(0).unwrap();
    assert!(first.requires_grad() && !no_grad(|| w.square())?.requires_grad());
    assert_eq!(w.map(|x| x * x.sigmoid())?.dims(), [3]);
    let init = nn::Init::new(&rt, 0);
    let model = nn::Sequential::new().push(nn::Linear::new(&init, 3, 4)?.without_bias()).push(nn::Tanh);
    model.freeze_where(nn::under("0"));
    model.eval();
    model.load_state_dict(model.state_dict()?)?;
    assert!(model.summary().contains("0.weight"));
    let q = Var::new(counted(&[1, 2, 3, 4])?);
    assert_eq!(q.causal_attention(&q, &q)?.dims(), [1, 2, 3, 4]);
    let (x, y) = (Var::new(counted(&[2, 3])?), Var::new(Tensor::from_slice(&rt, [2], &[0i64, 2])?));
    assert!(nn::loss::cross_entropy(&x, &y)?.item()? > 0.0);
    assert_eq!(nn::loss::mse(&x, &x, Default::default())?.item()?, 0.0);
    Ok(())
}

#[test]
fn training() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let model = nn::Linear::new(&nn::Init::new(&rt, 0), 3, 1)?;
    let x = Var::new(counted(&[2, 3])?);
    let loss = || model.forward(&x)?.square()?.mean_all();
    let mut optimizer = AdamW::new(&model, AdamWConfig { lr: 1e-3, ..Default::default() })?;
    let mut scaler = LossScaler::default();
    let before = loss()?.item()?;
    optimizer.backward(&loss()?)?;
    optimizer.step()?;
    optimizer.backward(&scaler.scale(&loss()?)?)?;
    scaler.step(&mut optimizer)?;
    assert!(loss()?.item()? < before);
    let sums = Ranks::new(2).run(
        |_| Ok(Cpu::with_threads(1)),
        |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 2)])?)?;
            let model = nn::Linear::new(&nn::Init::new(comm.runtime(), 0), 3, 1)?;
            let x = Var::new(Tensor::ones(comm.runtime(), [2, 3], DType::F32)?);
            let mut step = TrainStep::builder(&mesh, &model)
                .optimizer(AdamWConfig { lr: 3e-4, ..Default::default() })
                .zero(ZeroStage::Parameters)
                .max_norm(1.0)
                .build()?;
            step.step(|_| Loss::sum(model.forward(&x)?.square()?.sum_all()?, 2.0))?;
            let one = TensorMut::zeros(comm.runtime(), [1].into(), DType::F32)?;
            comm.all_reduce(one, ReduceOp::Sum)?.wait()?.freeze()?.item()
        },
    )?;
    assert_eq!(sums, [0.0, 0.0]);
    let alone = NoOpCommunicator::new(&rt);
    TrainStep::builder(&alone, &model).optimizer(AdamWConfig::default()).build().map(drop)
}
