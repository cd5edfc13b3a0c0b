//! Faults of models in stages: the op call of a stage is named, whichever ranks have it.

use nn::{
    Activation,
    moe::{ClampedSwiGlu, MixtureOfExperts, MoeConfig},
};
use numcore::ops::Apply;

use crate::{common::*, faults::is};

/// A layer whose output is scaled.
#[derive(Module)]
#[module(crate = "::nn", runtime = Cpu)]
struct Scaled {
    linear: Option<Linear<Cpu>>,
    #[module(skip)]
    factor: f64,
    /// A factor in a call of its own, which one rank does not make.
    #[module(skip)]
    extra: Option<f64>,
}

impl Forward<Cpu> for Scaled {
    fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        let y = self.linear.as_ref().map_or(Ok(x.clone()), |linear| linear.forward(x))?;
        let y = y.tanh()?.mul(self.factor)?;
        self.extra.map_or(Ok(y.clone()), |extra| y.mul(extra))
    }
}

const LAYERS: usize = 4;

/// A fault of a layer on several ranks: another factor, or a factor in a call more.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Factor(usize),
    Extra(usize, f64),
}

/// A model in stages, of layers with parameters or without, with a fault or without.
fn report_of(
    axes: &[(Axis, usize)],
    with_parameters: [bool; LAYERS],
    (kind, stages_per_rank): (ScheduleKind, usize),
    zero: ZeroStage,
    fault: Option<Fault>,
    is_reference_whole: bool,
) -> Verification {
    let layers = |mesh: &Mesh<Cpu>| -> Result<Sequential<Cpu>> {
        (0..LAYERS).try_fold(Sequential::new(), |layers, k| {
            let fault = fault.filter(|_| mesh.world().size() > 1);
            let factor = if fault == Some(Fault::Factor(k)) { 1.01 } else { 1.0 };
            let extra = match fault {
                Some(Fault::Extra(layer, factor)) if layer == k => Some(factor),
                _ => None,
            };
            let linear = with_parameters[k].then(|| Linear::new(&init(mesh), 4, 4)).transpose()?;
            Ok(layers.push(Scaled { linear, factor, extra }))
        })
    };
    let make = |mesh: &Mesh<Cpu>| {
        let pipe = mesh.axis(Axis::Pipe);
        let layers = layers(mesh)?;
        if is_reference_whole && mesh.world().size() == 1 {
            let step = TrainStep::builder(mesh, &layers).optimizer(adamw()).accumulation(2).build()?;
            return Ok((Some(layers), step));
        }
        let stages = pipe.size() * stages_per_rank;
        let checked = schedule(kind, pipe.size(), stages_per_rank)?;
        let cuts: Vec<usize> = (1..stages).map(|k| k * LAYERS / stages).collect();
        let loss =
            |y: &[Var<Cpu>], t: &[Var<Cpu>]| Loss::sum(y[0].sub(&t[0])?.square()?.sum_all()?, t[0].dims()[0] as f64);
        let stages = distributed::pipeline::split(layers.into_layers(), &cuts)?;
        let model = PipelineModel::on(pipe.rank(), checked, stages).loss(loss);
        let builder = TrainStep::builder(mesh, model).optimizer(adamw()).accumulation(2);
        let builder = if mesh.world().size() > 1 { builder.zero(zero) } else { builder };
        Ok((None, builder.build()?))
    };
    let input = |model: &Option<Sequential<Cpu>>, examples: &Examples<'_, Cpu>| -> Result<StepInput<Cpu>> {
        let Some(model) = model else {
            return Ok(MicroBatches::split(&examples.tensors, &examples.tensors, 4)?.into());
        };
        let x = Var::new(examples.tensors[0].clone());
        Ok(Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)?.into())
    };
    Verify::new(plan(axes)).run(runtime, make, numbers(32, 4), input).unwrap()
}

#[test]
fn op_calls_of_stages_are_named() {
    use Axis::{Data, Pipe};
    let plans: [(&[(Axis, usize)], _, _); 6] = [
        (&[(Pipe, 2)], (ScheduleKind::OneFOneB, 1), ZeroStage::None),
        (&[(Pipe, 4)], (ScheduleKind::GPipe, 1), ZeroStage::None),
        (&[(Pipe, 2)], (ScheduleKind::Interleaved, 2), ZeroStage::None),
        (&[(Pipe, 2)], (ScheduleKind::Zbv, 2), ZeroStage::None),
        (&[(Pipe, 2), (Data, 2)], (ScheduleKind::OneFOneB, 1), ZeroStage::Optimizer),
        (&[(Pipe, 2), (Data, 2)], (ScheduleKind::Interleaved, 2), ZeroStage::Parameters),
    ];
    let cases = plans.map(|plan| (plan, [true; LAYERS]));
    // Stages without parameters: the first, the last, and some between.
    let without = [(plans[1], [false, true, false, false]), (plans[2], [true, false, false, true])];
    for ((axes, kind, zero), with_parameters) in cases.into_iter().chain(without) {
        for whole in [false, true] {
            report_of(axes, with_parameters, kind, zero, None, whole).assert_equal();
            for wrong in 0..LAYERS {
                let report = report_of(axes, with_parameters, kind, zero, Some(Fault::Factor(wrong)), whole);
                is(report.clone(), StepPart::Forward, Cause::LayerCut, "mul");
                // The call is that of one layer, so its ranks are those of one stage.
                let (plan, ranks) = (plan(axes), &report.differences[0].ranks);
                let stages = plan.size(Pipe) * kind.1;
                let placement = schedule(kind.0, plan.size(Pipe), kind.1).unwrap().schedule().placement().clone();
                let here =
                    |rank: &usize| Some(plan.coordinate(Pipe, *rank)) == placement.rank_of(wrong * stages / LAYERS);
                let expected: Vec<usize> = (0..plan.world()).filter(here).collect();
                assert_eq!(*ranks, expected, "layer {wrong} of {axes:?} in {kind:?}, {with_parameters:?}: {report}");
            }
        }
    }
}

/// Calls that only the ranks make are named in their own stage, also if no parameter tells it from the next one.
#[test]
fn extra_op_calls_of_stages_are_named() {
    let axes: &[_] = &[(Axis::Pipe, 4)];
    for with_parameters in [[false, true, false, false], [false; LAYERS].map(|_| true)] {
        for extra in 0..LAYERS {
            let fault = |factor| Some(Fault::Extra(extra, factor));
            let of = |fault| report_of(axes, with_parameters, (ScheduleKind::GPipe, 1), ZeroStage::None, fault, true);
            of(fault(1.0)).assert_equal();
            let report = of(fault(1.01));
            let named = report.differences[0].clone();
            // After the last layer's extra call comes the loss, which is on the same rank.
            let op = if extra + 1 == LAYERS { named.what.as_str() } else { "mul" };
            assert_eq!(
                (named.stage, named.what.as_str(), &named.ranks[..]),
                (StepPart::Forward, op, &[extra][..]),
                "{report}"
            );
        }
    }
}

/// A mixture whose experts have another activation on one rank.
#[test]
fn op_calls_of_experts_are_named() {
    use Axis::{Data, Expert};
    for axes in [&[(Data, 2), (Expert, 2)][..], &[(Data, 4), (Expert, 2)]] {
        let report_of = |wrong: Option<usize>| {
            let make = |mesh: &Mesh<Cpu>| {
                let alpha = if mesh.world().size() > 1 && wrong == Some(mesh.world().rank()) { 1.8 } else { 1.7 };
                let clamped = Some(ClampedSwiGlu { limit: 7.0, alpha });
                let model = MixtureOfExperts::new(&init(mesh), MoeConfig { clamped, ..MoeConfig::new(4, 6, 4, 2) })?;
                mesh.parallelize(&model, &TensorPlan::new().experts("experts"))?;
                let builder = TrainStep::builder(mesh, &model).optimizer(adamw());
                let builder = if mesh.world().size() > 1 { builder.experts() } else { builder };
                let step = builder.build()?;
                Ok((model, step))
            };
            let loss = |model: &MixtureOfExperts<Cpu>, examples: &Examples<'_, Cpu>| {
                let x = Var::new(examples.tensors[0].clone());
                Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
            };
            Verify::new(plan(axes)).run(runtime, make, numbers(32, 4), loss).unwrap()
        };
        report_of(None).assert_equal();
        let report = report_of(Some(1));
        is(report.clone(), StepPart::Forward, Cause::LayerCut, "experts mul");
        assert_eq!(report.differences[0].ranks, [1], "{report}");
    }
}

/// A language model in stages, whose head has the embedding's weight. On several ranks, its loss has another term.
#[test]
fn op_calls_of_losses_in_stages_are_named() {
    use Axis::{Data, Pipe, Tensor};
    // With layers, and the place along the pipeline of the first of them. Two layers in four stages leave one without
    // parameters.
    let plans: [(&[(Axis, usize)], _, _, _); 4] = [
        (&[(Pipe, 2)], (ScheduleKind::Interleaved, 2), 4, 0),
        (&[(Pipe, 2)], (ScheduleKind::Interleaved, 2), 2, 1),
        (&[(Pipe, 2), (Tensor, 2)], (ScheduleKind::OneFOneB, 1), 4, 0),
        (&[(Pipe, 2), (Data, 2)], (ScheduleKind::ZbH1, 1), 4, 0),
    ];
    for (axes, kind, layers, first) in plans {
        let (plan, pipe) = (plan(axes), 2);
        let report_of = |z_loss: f64, other: Activation| {
            let make = |mesh: &Mesh<Cpu>| {
                let (z_loss, activation) = if mesh.world().size() > 1 { (z_loss, other) } else { Default::default() };
                let config = GptConfig { layers, tied_head: true, activation, ..gpt() };
                gpt_in_stages(mesh, config, kind, VocabularyLoss { z_loss, ..summed() })
            };
            Verify::new(plan.clone()).run(runtime, make, texts(16), texts_in_stages).unwrap()
        };
        report_of(0.0, Activation::default()).assert_equal();
        // A cut layer adds its bias after the exchange: the norm is the first call that reads parameters as one rank's.
        let after = if plan.size(Tensor) > 1 { "blocks.1.ln1 layer_norm" } else { "blocks.0.fc2 linear" };
        for (z_loss, activation, named, stage) in
            [(0.1, Activation::default(), "", pipe - 1), (0.0, Activation::Relu, after, first)]
        {
            let report = report_of(z_loss, activation);
            is(report.clone(), StepPart::Forward, Cause::LayerCut, named);
            let ranks = (0..plan.world()).filter(|rank| plan.coordinate(Pipe, *rank) == stage);
            assert_eq!(report.differences[0].ranks, ranks.collect::<Vec<_>>(), "{report}");
        }
    }
}

/// Layers that look at all examples of a micro-batch: those of the other shares are in it, as on one rank.
#[test]
fn statistics_of_all_shares_in_stages_are_those_of_one_rank() {
    for axes in [&[(Axis::Pipe, 2), (Axis::Data, 2)][..], &[(Axis::Pipe, 2), (Axis::Shard, 2)]] {
        let make = |mesh: &Mesh<Cpu>| {
            let pipe = mesh.axis(Axis::Pipe);
            let checked = schedule(ScheduleKind::OneFOneB, pipe.size(), 1)?;
            let norm = distributed::SyncBatchNorm::over(BatchNorm::new(&init(mesh), 4)?, mesh.batch());
            let linear = || Linear::new(&init(mesh), 4, 4);
            let layers = Sequential::new().push(linear()?).push(norm).push(Tanh).push(linear()?);
            let cuts: &[usize] = if pipe.size() == 1 { &[] } else { &[2] };
            let loss = |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
                Loss::sum(y[0].sub(&t[0])?.square()?.sum_all()?, t[0].dims()[0] as f64)
            };
            let stages = distributed::pipeline::split(layers.into_layers(), cuts)?;
            let model = PipelineModel::on(pipe.rank(), checked, stages).loss(loss);
            Ok((Vec::<Linear<Cpu>>::new(), TrainStep::builder(mesh, model).optimizer(adamw()).build()?))
        };
        let input = |_: &Vec<Linear<Cpu>>, examples: &Examples<'_, Cpu>| {
            MicroBatches::split(&examples.tensors, &examples.tensors, 4)
        };
        Verify::new(plan(axes)).run(runtime, make, numbers(32, 4), input).unwrap().assert_equal();
    }
}

/// A difference of the gradient alone: no value of a forward pass is another, and calls of a cut head have no equal.
#[test]
fn a_difference_of_a_gradient_is_not_searched_in_the_forward_pass() {
    for axes in [&[(Axis::Tensor, 2)][..], &[(Axis::Data, 2), (Axis::Tensor, 2)]] {
        let make = |mesh: &Mesh<Cpu>| {
            let model = gpt_on(mesh, gpt(), &Gpt::<Cpu>::tensor_plan())?;
            let step = TrainStep::builder(mesh, &model).optimizer(adamw()).build()?;
            Ok((model, step))
        };
        let loss = |model: &Gpt<Cpu>, examples: &Examples<'_, Cpu>| {
            let [tokens, targets] = [0, 1].map(|k| Var::new(examples.tensors[k].clone()));
            let mut sum = model.next_token_loss(&tokens, &targets, &summed())?;
            if examples.mesh.world().size() > 1 {
                let named = nn::ModuleExt::named_parameters(model);
                let (_, weight) = named.into_iter().find(|(name, _)| name == "lnf.weight").expect("a last norm");
                sum = sum.add(&weight.var().sub(&weight.var().detach())?.sum_all()?)?;
            }
            Loss::sum(sum, (examples.rows() * CONTEXT) as f64)
        };
        let report = Verify::new(plan(axes)).run(runtime, make, texts(16), loss).unwrap();
        let found = &report.differences[0];
        assert_eq!((found.stage, found.module.as_str()), (StepPart::Gradient, "lnf"), "{report}");
    }
}
