//! Faults put in by hand, each named by its cause.

use std::sync::atomic::{AtomicUsize, Ordering};

use distributed::comm::Collectives;
use numcore::ops::{Apply, MatmulOps};

use crate::common::*;

/// The first difference that a report names.
pub fn first(report: Verification) -> (StepPart, Cause, String) {
    let found = report.differences.first().unwrap_or_else(|| panic!("no difference: {report}"));
    let named = format!("{} {}", found.module, found.what);
    (found.stage, found.cause, named)
}

pub fn is(report: Verification, stage: StepPart, cause: Cause, named: &str) {
    let text = report.to_string();
    let found = first(report);
    let cause_of =
        |cause| if let Cause::Scaled(factor) = cause { Cause::Scaled((4.0 * factor).round() / 4.0) } else { cause };
    assert_eq!((found.0, cause_of(found.1)), (stage, cause), "{text}");
    assert!(found.2.contains(named), "{named} is not named: {text}");
}

/// A model that a test writes itself.
fn report_of<M: Module<Cpu>>(
    axes: &[(Axis, usize)],
    model: impl Fn(&Mesh<Cpu>) -> Result<M> + Sync,
    loss: impl Fn(&M, &Examples<'_, Cpu>) -> Result<Loss<Cpu>> + Sync,
) -> Verification {
    let make = |mesh: &Mesh<Cpu>| {
        let model = model(mesh)?;
        let step = TrainStep::builder(mesh, &model).optimizer(adamw()).build()?;
        Ok((model, step))
    };
    Verify::new(plan(axes)).run(runtime, make, numbers(8, 4), loss).unwrap()
}

fn mlp(mesh: &Mesh<Cpu>) -> Result<Sequential<Cpu>> {
    Ok(Sequential::new().push(Linear::new(&init(mesh), 4, 8)?).push(Tanh).push(Linear::new(&init(mesh), 8, 4)?))
}

fn squares(model: &impl Forward<Cpu>, examples: &Examples<'_, Cpu>) -> Result<Loss<Cpu>> {
    let x = Var::new(examples.tensors[0].clone());
    Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
}

#[test]
fn a_loss_of_means_is_named() {
    // Rows count if their first number is positive: other numbers of them on each rank.
    let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
        let rows = examples.tensors[0].to_vec::<f64>()?;
        let counts: Vec<f64> = rows.chunks(4).map(|row| f64::from(u8::from(row[0] > 0.0))).collect();
        let mask = Tensor::from_slice(examples.tensors[0].runtime(), [counts.len(), 1], &counts)?;
        let x = Var::new(examples.tensors[0].clone());
        let sum = model.forward(&x)?.sub(&x)?.square()?.mul(&Var::new(mask))?.sum_all()?;
        Ok(Loss::mean(sum.div(counts.iter().sum::<f64>().max(1.0))?))
    };
    is(report_of(&[(Axis::Data, 2)], mlp, loss), StepPart::Loss, Cause::MeanOfMeans, "in place of");
}

/// Shares weigh as much as on one rank, and the mean of their losses is the loss of the ranks.
#[test]
fn a_loss_of_another_scale_is_no_mean_of_means() {
    let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
        let factor = if examples.mesh.world().size() > 1 { 1.25 } else { 1.0 };
        let x = Var::new(examples.tensors[0].clone());
        let sum = model.forward(&x)?.sub(&x)?.square()?.sum_all()?;
        Loss::sum(sum.mul(factor)?, examples.rows() as f64)
    };
    is(report_of(&[(Axis::Data, 2)], mlp, loss), StepPart::Loss, Cause::LossDiffers, "in place of");
}

#[test]
fn statistics_of_one_rank_are_named() {
    let model = |mesh: &Mesh<Cpu>| {
        let first = Linear::new(&init(mesh), 4, 4)?;
        Ok(Sequential::new().push(first).push(BatchNorm::new(&init(mesh), 4)?))
    };
    is(report_of(&[(Axis::Data, 2)], model, squares), StepPart::Forward, Cause::BatchStatistics, "1");
}

#[test]
fn data_read_twice_are_named() {
    let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
        // Every rank reads the first rows.
        let all = numbers(8, 4)(examples.tensors[0].runtime(), examples.step)?.remove(0);
        let x = Var::new(all.narrow(0, 0, examples.rows())?.contiguous()?);
        Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
    };
    is(report_of(&[(Axis::Data, 2)], mlp, loss), StepPart::Forward, Cause::DataReadTwice, "0");
}

#[test]
fn initial_values_of_ones_own_are_named() {
    let draws = AtomicUsize::new(0);
    let model = |mesh: &Mesh<Cpu>| {
        let seed = if mesh.world().size() > 1 { 100 + draws.fetch_add(1, Ordering::Relaxed) as u64 } else { 42 };
        let init = Init::new(mesh.world().runtime(), seed).dtype(DType::F64);
        let model = Sequential::new().push(Linear::new(&init, 4, 8)?).push(Tanh).push(Linear::new(&init, 8, 4)?);
        mesh.parallelize(&model, &TensorPlan::new().column("0").row("2"))?;
        Ok(model)
    };
    is(report_of(&[(Axis::Tensor, 2)], model, squares), StepPart::InitialWeights, Cause::InitialValues, "0");
}

/// A model with dropout whose random values are keyed by the rank.
#[test]
fn random_values_of_ones_own_are_named() {
    let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
        let rank = examples.mesh.world().rank() as u64;
        autograd::next_seed();
        let x = Var::new(examples.tensors[0].clone());
        let y = model.forward(&x.dropout(0.5, 7 + rank)?)?;
        Loss::sum(y.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
    };
    let model = |mesh: &Mesh<Cpu>| {
        let model = mlp(mesh)?;
        mesh.parallelize(&model, &TensorPlan::new().column("0").row("2"))?;
        Ok(model)
    };
    is(report_of(&[(Axis::Tensor, 2)], model, loss), StepPart::Forward, Cause::RandomValues, "dropout");
}

/// A product over pieces of the features whose parts nobody sums.
#[derive(Module)]
#[module(crate = "::nn", runtime = Cpu)]
struct ByHand {
    up: Linear<Cpu>,
    down: Linear<Cpu>,
    norm: LayerNorm<Cpu>,
}

/// The faults of layers that are cut by hand, or trained by hand.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The parts of the second product are not summed.
    PartsNotSummed,
    /// The parts are averaged.
    PartsAveraged,
    /// The norm sees the features of one rank.
    PieceNorm,
    /// The second bias is added on every rank before the sum.
    BiasTwice,
    /// The gradient of the input of the first product is not summed over the ranks that have its columns.
    InputGradient,
    /// The gradient of a weight of which a rank reads some rows is not summed.
    WeightGradient,
    /// The adjoint of a gather sums gradients that all ranks have.
    GatherCountsTwice,
    /// Half of the gradient of one rank ends before the first layer.
    Detached,
    /// Ranks add another number to the hidden features.
    Shifted,
    /// A rank computes in another activation.
    Activation,
    /// A rank reads the rows of the hidden features of another.
    WrongRows,
    /// Random values are keyed by rank.
    DropoutByRank,
}

/// Two layers cut along the hidden features by hand: this rank computes with its rows and columns alone.
fn by_hand(model: &ByHand, examples: &Examples<'_, Cpu>, fault: Fault) -> Result<Loss<Cpu>> {
    use distributed::differentiable::{all_gather, all_reduce, copy, gather, split};
    let tensor = examples.mesh.axis(Axis::Tensor);
    let (ranks, rank) = (tensor.size(), tensor.rank());
    let wrong = |own: Fault| own == fault && ranks > 1;
    let x = Var::new(examples.tensors[0].clone());
    let entered = model.norm.forward(&x)?;
    let entered = if wrong(Fault::Detached) && rank == 1 { entered.detach().add(&entered)?.mul(0.5)? } else { entered };
    let entered = if wrong(Fault::InputGradient) { entered } else { copy(tensor, &entered)? };
    let own = 8 / ranks;
    let at = if wrong(Fault::WrongRows) { (rank + 1) % ranks } else { rank } * own;
    let up = if wrong(Fault::WeightGradient) { model.up.weight.var() } else { copy(tensor, &model.up.weight.var())? };
    let down = copy(tensor, &model.down.weight.var())?.narrow(1, rank * own, own)?;
    let bias = copy(tensor, &model.up.bias.as_ref().expect("a bias").var())?.narrow(0, rank * own, own)?;
    let hidden = entered.linear(&up.narrow(0, at, own)?, Some(&bias))?;
    let hidden = if wrong(Fault::Activation) && rank == 1 { hidden.relu()? } else { hidden.tanh()? };
    let hidden = match fault {
        Fault::PieceNorm => hidden.layer_norm(None, None, 1e-5)?,
        Fault::Shifted => hidden.add(1e-3 * rank as f64)?,
        _ => hidden,
    };
    let parts = hidden.linear(&down, None)?;
    let bias = model.down.bias.as_ref().expect("a bias").var();
    let y = match fault {
        Fault::PartsNotSummed => parts.add(&bias)?,
        Fault::PartsAveraged => all_reduce(tensor, &parts)?.div(ranks as f64)?.add(&bias)?,
        Fault::BiasTwice => all_reduce(tensor, &parts.add(&bias)?)?,
        _ => all_reduce(tensor, &parts)?.add(&bias)?,
    };
    let y = match fault {
        Fault::GatherCountsTwice => all_gather(tensor, &split(tensor, &y, 1)?, 1)?,
        _ => gather(tensor, &split(tensor, &y, 1)?, 1)?,
    };
    let y = match fault {
        Fault::DropoutByRank => {
            autograd::next_seed();
            y.dropout(0.5, 7 + rank as u64)?
        }
        _ => y,
    };
    Loss::sum(y.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
}

fn by_hand_report(axes: &[(Axis, usize)], fault: Fault) -> Verification {
    let model = |mesh: &Mesh<Cpu>| {
        let init = init(mesh);
        let (up, down) = (Linear::new(&init, 4, 8)?, Linear::new(&init, 8, 4)?);
        let model = ByHand { up, down, norm: LayerNorm::new(&init, 4)? };
        mesh.parallelize(&model, &TensorPlan::new())?;
        Ok(model)
    };
    report_of(axes, model, |model, examples| by_hand(model, examples, fault))
}

#[test]
fn faults_of_layers_cut_by_hand_are_named() {
    use Axis::{Data, Tensor};
    let axes: [&[(Axis, usize)]; 2] = [&[(Tensor, 2)], &[(Data, 2), (Tensor, 2)]];
    for axes in axes {
        let right = by_hand_report(axes, Fault::None);
        assert!(right.is_equal(), "{right}");
        let forward = |fault, cause, named: &str| is(by_hand_report(axes, fault), StepPart::Forward, cause, named);
        forward(Fault::PartsNotSummed, Cause::LayerCut, "down add");
        forward(Fault::PartsAveraged, Cause::LayerCut, "down");
        forward(Fault::PieceNorm, Cause::PieceStatistics, "layer_norm");
        forward(Fault::BiasTwice, Cause::LayerCut, "down add");
        forward(Fault::Shifted, Cause::LayerCut, "add");
        forward(Fault::Activation, Cause::LayerCut, "down add");
        forward(Fault::WrongRows, Cause::LayerCut, "tanh");
        forward(Fault::DropoutByRank, Cause::RandomValues, "dropout");
        let gradient = |fault, cause, named: &str| is(by_hand_report(axes, fault), StepPart::Gradient, cause, named);
        gradient(Fault::InputGradient, Cause::PartialGradient, "norm");
        gradient(Fault::WeightGradient, Cause::PartialGradient, "up weight");
        gradient(Fault::GatherCountsTwice, Cause::Scaled(2.0), "down bias");
        gradient(Fault::Detached, Cause::Scaled(0.5), "norm");
    }
}

/// Stages whose copies of one weight are not tied, or are.
fn staged_report(axes: &[(Axis, usize)], tied: bool) -> Verification {
    let make = |mesh: &Mesh<Cpu>| {
        let pipe = mesh.axis(Axis::Pipe);
        let checked = schedule(ScheduleKind::OneFOneB, pipe.size(), 1)?;
        let layer = || Linear::new(&init(mesh), 4, 4);
        let (first, second) = (layer()?, layer()?);
        // On one rank both layers have one weight. The ranks of a pipeline make their own.
        let shared = if pipe.size() == 1 { first.weight.clone() } else { second.weight };
        let second = Linear { weight: shared, bias: second.bias, adapter: second.adapter };
        let layers = Sequential::new().push(first).push(Tanh).push(second).into_layers();
        let cuts: &[usize] = if pipe.size() == 1 { &[] } else { &[2] };
        let loss =
            |y: &[Var<Cpu>], t: &[Var<Cpu>]| Loss::sum(y[0].sub(&t[0])?.square()?.sum_all()?, t[0].dims()[0] as f64);
        let model = PipelineModel::on(pipe.rank(), checked, distributed::pipeline::split(layers, cuts)?).loss(loss);
        let ties = (tied && pipe.size() > 1).then(|| vec![Tie::new(["0.weight", "2.weight"])]);
        let model = if let Some(ties) = ties { model.ties(ties) } else { model };
        Ok((Vec::<Linear<Cpu>>::new(), TrainStep::builder(mesh, model).optimizer(adamw()).build()?))
    };
    let input = |_: &Vec<Linear<Cpu>>, examples: &Examples<'_, Cpu>| {
        MicroBatches::split(&examples.tensors, &examples.tensors, 4)
    };
    Verify::new(plan(axes)).run(runtime, make, numbers(16, 4), input).unwrap()
}

#[test]
fn a_missing_tie_is_named() {
    for axes in [&[(Axis::Pipe, 2)][..], &[(Axis::Pipe, 2), (Axis::Data, 2)]] {
        let right = staged_report(axes, true);
        assert!(right.is_equal(), "{right}");
        is(staged_report(axes, false), StepPart::Gradient, Cause::MissingTie, "0 weight");
    }
}

/// A step of each rank alone: nothing is summed.
#[test]
fn ranks_that_train_alone_are_named() {
    for axes in [&[(Axis::Data, 2)][..], &[(Axis::Shard, 2), (Axis::Data, 2)]] {
        let make = |mesh: &Mesh<Cpu>| {
            let model = mlp(mesh)?;
            let own = mesh.world().split(Some(mesh.world().rank()), 0)?.expect("a group of one");
            let step = TrainStep::builder(&own, &model).optimizer(adamw()).build()?;
            Ok((model, step))
        };
        let input = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
            // The share that the ranks of the mesh would have.
            let all = numbers(8, 4)(examples.tensors[0].runtime(), examples.step)?.remove(0);
            let (rank, ranks) = (examples.mesh.world().rank(), examples.mesh.world().size());
            let x = Var::new(all.narrow(0, rank * 8 / ranks, 8 / ranks)?.contiguous()?);
            Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, x.dims()[0] as f64)
        };
        let report = Verify::new(plan(axes)).run(runtime, make, numbers(8, 4), input).unwrap();
        let last = report.differences.last().expect("a difference").clone();
        assert_eq!(
            (last.stage, last.cause, last.axis),
            (StepPart::Loss, Cause::NotSummed, Some(Axis::Data)),
            "{report}"
        );
    }
}

/// A layer with a buffer that nothing reads.
#[derive(Module)]
#[module(crate = "::nn", runtime = Cpu)]
pub struct Observing {
    pub layer: Linear<Cpu>,
    pub seen: nn::Buffer<Cpu>,
}

#[test]
fn a_buffer_of_one_rank_is_named() {
    for axes in [&[(Axis::Data, 2)][..], &[(Axis::Shard, 4)]] {
        let model = |mesh: &Mesh<Cpu>| {
            let zero = Tensor::zeros(mesh.world().runtime(), [4], DType::F64)?;
            Ok(Observing { layer: Linear::new(&init(mesh), 4, 4)?, seen: nn::Buffer::new(zero) })
        };
        let loss = |model: &Observing, examples: &Examples<'_, Cpu>| {
            model.seen.set(examples.tensors[0].mean(&[0])?)?;
            squares(&model.layer, examples)
        };
        is(report_of(axes, model, loss), StepPart::Buffer, Cause::BufferOfOneRank, "seen");
    }
}

/// Weights of losses that only one rank counts otherwise.
#[test]
fn a_weight_of_one_rank_is_named() {
    for axes in [&[(Axis::Data, 2)][..], &[(Axis::Data, 2), (Axis::Shard, 2)]] {
        let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
            let extra = if examples.mesh.world().rank() == 1 { 1.0 } else { 0.0 };
            let x = Var::new(examples.tensors[0].clone());
            Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64 + extra)
        };
        let found = first(report_of(axes, mlp, loss));
        assert_eq!((found.0, found.1), (StepPart::Loss, Cause::LossDiffers));
    }
}

/// Every rank draws the masks of the first one's stream.
#[test]
fn one_stream_for_all_examples_is_named() {
    for axes in [&[(Axis::Data, 2)][..], &[(Axis::Shard, 2)]] {
        let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
            if examples.mesh.world().size() > 1 {
                autograd::set_random_stream(0);
            }
            let x = Var::new(examples.tensors[0].clone());
            let y = model.forward(&x.dropout(0.5, autograd::next_seed())?)?;
            Loss::sum(y.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
        };
        is(report_of(axes, mlp, loss), StepPart::Forward, Cause::RandomValues, "dropout");
    }
}
