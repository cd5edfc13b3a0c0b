//! Comparisons of values that one run alone has: gradients, frozen weights, buffers in pieces.

use distributed::{
    buckets::{BucketOptions, Unused},
    comm::Comm,
    zero::ZeroOptions,
};
use nn::{Dropout, Param};
use numcore::ops::{Apply, MatmulOps};

use crate::{
    common::*,
    faults::{Observing, first},
};

/// Two layers, and a parameter that the loss may read.
#[derive(Module)]
#[module(crate = "::nn", runtime = Cpu)]
struct Layers {
    up: Linear<Cpu>,
    down: Linear<Cpu>,
    extra: Param<Cpu>,
}

impl Layers {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        let extra = init.param([4], nn::Initializer::Constant(0.5))?;
        Ok(Layers { up: Linear::new(init, 4, 8)?, down: Linear::new(init, 8, 4)?, extra })
    }
}

fn allowing() -> BucketOptions {
    BucketOptions { unused: Unused::Allow, ..BucketOptions::default() }
}

fn report_of(
    axes: &[(Axis, usize)],
    change: impl Fn(&Layers, &Mesh<Cpu>) -> Result<()> + Sync,
    loss: impl Fn(&Layers, &Mesh<Cpu>, &Var<Cpu>) -> Result<Var<Cpu>> + Sync,
) -> Verification {
    let make = |mesh: &Mesh<Cpu>| {
        let model = Layers::new(&init(mesh))?;
        change(&model, mesh)?;
        mesh.parallelize(&model, &TensorPlan::new().column("up").row("down"))?;
        let step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(allowing()).build()?;
        Ok((model, step))
    };
    let input = |model: &Layers, examples: &Examples<'_, Cpu>| {
        let x = Var::new(examples.tensors[0].clone());
        let y = loss(model, examples.mesh, &x)?;
        Loss::sum(y.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
    };
    Verify::new(plan(axes)).run(runtime, make, numbers(8, 4), input).unwrap()
}

fn is_cut(mesh: &Mesh<Cpu>) -> bool {
    mesh.world().size() > 1
}

#[test]
fn a_gradient_of_the_ranks_alone_is_found() {
    for axes in [&[(Axis::Data, 2)][..], &[(Axis::Tensor, 2)]] {
        let forward = |model: &Layers, mesh: &Mesh<Cpu>, x: &Var<Cpu>| {
            let y = model.down.forward(&model.up.forward(x)?.tanh()?)?;
            let extra = model.extra.var();
            // No value differs.
            if is_cut(mesh) { y.add(&extra.sub(&extra.detach())?) } else { Ok(y) }
        };
        let report = report_of(axes, |_, _| Ok(()), forward);
        let found = first(report.clone());
        assert_eq!((found.0, found.2.trim()), (StepPart::Gradient, "extra"), "{report}");
    }
}

#[test]
fn a_piece_without_a_gradient_is_found() {
    let forward = |model: &Layers, mesh: &Mesh<Cpu>, x: &Var<Cpu>| {
        let tensor = mesh.axis(Axis::Tensor);
        let x = distributed::differentiable::copy(tensor, x)?;
        let weight = model.up.weight.var();
        let weight = if tensor.rank() == 1 { weight.detach() } else { weight };
        let bias = model.up.bias.as_ref().expect("a bias").var();
        model.down.forward(&x.linear(&weight, Some(&bias))?.tanh()?)
    };
    let report = report_of(&[(Axis::Tensor, 2)], |_, _| Ok(()), forward);
    let found = first(report.clone());
    assert_eq!((found.0, found.2.as_str()), (StepPart::Gradient, "up weight"), "{report}");
}

/// Nothing reads the frozen parameter, so that no output of a call differs.
#[test]
fn frozen_weights_of_ones_own_are_found() {
    let freeze = |model: &Layers, mesh: &Mesh<Cpu>| {
        model.extra.set_requires_grad(false);
        let value = if is_cut(mesh) { 0.25 } else { 0.5 };
        model.extra.set(Tensor::full(mesh.world().runtime(), [4], DType::F64, value)?)
    };
    let forward = |model: &Layers, _: &Mesh<Cpu>, x: &Var<Cpu>| model.down.forward(&model.up.forward(x)?.tanh()?);
    let report = report_of(&[(Axis::Data, 2)], freeze, forward);
    let found = first(report.clone());
    let named = (found.0, found.1, found.2.trim());
    assert_eq!(named, (StepPart::InitialWeights, Cause::InitialValues, "extra"), "{report}");
}

#[test]
fn buffers_in_pieces_are_listed() {
    let make = |mesh: &Mesh<Cpu>| {
        let seen = Tensor::zeros(mesh.world().runtime(), [4 / mesh.world().size()], DType::F64)?;
        let model = Observing { layer: Linear::new(&init(mesh), 4, 4)?, seen: nn::Buffer::new(seen) };
        let step = TrainStep::builder(mesh, &model).optimizer(adamw()).build()?;
        Ok((model, step))
    };
    let loss = |model: &Observing, examples: &Examples<'_, Cpu>| {
        let x = Var::new(examples.tensors[0].clone());
        Loss::sum(model.layer.forward(&x)?.square()?.sum_all()?, examples.rows() as f64)
    };
    let report = Verify::new(plan(&[(Axis::Data, 2)])).run(runtime, make, numbers(8, 4), loss).unwrap();
    assert!(report.is_equal(), "{report}");
    assert_eq!(report.not_compared, ["seen"]);
    assert!(report.to_string().ends_with("not compared: seen"), "{report}");
    let whole = Verify::new(plan(&[(Axis::Data, 1)])).run(runtime, make, numbers(8, 4), loss).unwrap();
    assert!(whole.not_compared.is_empty(), "{whole}");
}

/// Half-precision layers whose gradients are added up in `f32`; on several ranks, `lost` is a micro-batch whose
/// gradients are lost.
fn main_gradients_report(zero: ZeroStage, dropout: f64, lost: Option<usize>) -> Verification {
    let make = |mesh: &Mesh<Cpu>| {
        let init = Init::new(mesh.world().runtime(), 42).dtype(DType::BF16);
        let model = Sequential::new().push(Linear::new(&init, 4, 8)?).push(Tanh).push(Dropout::new(dropout)?);
        let model = model.push(Linear::new(&init, 8, 4)?);
        let builder = TrainStep::builder(mesh, &model).optimizer(adamw()).accumulation(2);
        let step = match zero {
            ZeroStage::None => builder.buckets(BucketOptions { main_gradients: true, ..BucketOptions::default() }),
            stage => builder.zero(ZeroOptions { stage, main_gradients: true, ..ZeroOptions::default() }),
        };
        let step = step.build()?;
        Ok((model, step))
    };
    let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
        let x = Var::new(examples.tensors[0].to_dtype(DType::BF16)?);
        let y = model.forward(&x)?;
        let is_lost = is_cut(examples.mesh) && lost == Some(examples.micro_batch);
        let y = if is_lost { y.detach().add(&y.sub(&y.detach())?.mul(0.0)?)? } else { y };
        let sum = y.sub(&x)?.to_dtype(DType::F32)?.square()?.sum_all()?;
        Loss::sum(sum, examples.rows() as f64)
    };
    Verify::new(plan(&[(Axis::Data, 2)])).run(runtime, make, numbers(16, 4), loss).unwrap()
}

#[test]
fn main_gradients_are_those_of_all_micro_batches() {
    for zero in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters] {
        for dropout in [0.0, 0.5] {
            let report = main_gradients_report(zero, dropout, None);
            assert!(report.is_equal(), "{zero:?}, dropout {dropout}: {report}");
        }
        for lost in [0, 1] {
            let report = main_gradients_report(zero, 0.0, Some(lost));
            // Its calls differ too.
            let last = report.differences.last().expect("a difference");
            assert_eq!(last.stage, StepPart::Gradient, "{zero:?}, micro-batch {lost}: {report}");
        }
    }
}

/// Noise by a tensor of random values, which no op call draws.
struct Noise;

impl Module<Cpu> for Noise {
    fn visit(&self, _: &str, _: &mut dyn nn::Visitor<Cpu>) {}
}

impl Forward<Cpu> for Noise {
    fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        let spec = x.spec();
        let noise = Tensor::normal(x.runtime(), spec.shape, spec.dtype, 0.0, 1.0, autograd::next_seed())?;
        x.add(&Var::new(noise))
    }
}

#[test]
fn random_values_of_any_op_in_stages_are_refused() {
    for noisy in [false, true] {
        let make = |mesh: &Mesh<Cpu>| {
            let pipe: &Comm<Cpu> = mesh.axis(Axis::Pipe);
            let checked = schedule(ScheduleKind::OneFOneB, pipe.size(), 1)?;
            let layers = Sequential::new().push(Linear::new(&init(mesh), 4, 4)?);
            let layers = if noisy { layers.push(Noise) } else { layers.push(Tanh) };
            let layers = layers.push(Linear::new(&init(mesh), 4, 4)?).into_layers();
            let cuts: &[usize] = if pipe.size() == 1 { &[] } else { &[2] };
            let loss = |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
                Loss::sum(y[0].sub(&t[0])?.square()?.sum_all()?, t[0].dims()[0] as f64)
            };
            let model = PipelineModel::on(pipe.rank(), checked, distributed::pipeline::split(layers, cuts)?).loss(loss);
            Ok((Vec::<Linear<Cpu>>::new(), TrainStep::builder(mesh, model).optimizer(adamw()).build()?))
        };
        let input = |_: &Vec<Linear<Cpu>>, examples: &Examples<'_, Cpu>| {
            MicroBatches::split(&examples.tensors, &examples.tensors, 4)
        };
        let report = Verify::new(plan(&[(Axis::Pipe, 2)])).run(runtime, make, numbers(16, 4), input);
        match noisy {
            false => report.unwrap().assert_equal(),
            true => assert!(report.unwrap_err().to_string().contains("set dropout to 0")),
        }
    }
}
