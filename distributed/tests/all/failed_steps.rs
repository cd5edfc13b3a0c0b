//! On one rank, where nobody else has to be told, a step that failed leaves no trace: the next one is a fresh trainer's first.

use crate::{
    pipeline_common::{rows, stage_weights, two_stages},
    prelude::*,
};

/// The place at which a step of two micro-batches fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The first micro-batch cannot be computed.
    First,
    /// The second one cannot, after the first was swept.
    Second,
    /// The backward pass of the second one ends before the first layer.
    Sweep,
    /// The losses weigh nothing: found after all backward passes.
    Weightless,
    /// Someone holds a state tensor when it is to be updated.
    HeldState,
    /// Someone holds a parameter's value when it is to be updated.
    Held,
}

const FAULTS: [Fault; 6] =
    [Fault::First, Fault::Second, Fault::Sweep, Fault::Weightless, Fault::HeldState, Fault::Held];
const BATCH: [usize; 4] = [0, 1, 2, 3];

/// Its gradient cannot be computed.
struct Broken;

impl autograd::Function<Cpu> for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }
    fn forward(&self, inputs: &[numcore::Tensor<Cpu>]) -> Result<Vec<numcore::Tensor<Cpu>>> {
        Ok(vec![inputs[0].clone()])
    }
    fn backward(&self, _: &mut dyn numcore::ops::Backprop<Var<Cpu>>) -> Result<()> {
        Err(Error::argument("broken", "has no gradient"))
    }
}

fn micro(model: &Mlp<Cpu>, rt: &Cpu, k: usize, fault: Option<Fault>) -> Result<Loss<Cpu>> {
    use nn::Forward;
    match (fault, k) {
        (Some(Fault::First), 0) | (Some(Fault::Second), 1) => Err(Error::argument("a test", "fails on purpose")),
        (Some(Fault::Sweep), 1) => {
            let (x, _) = model.batch(rt, 0, &BATCH)?;
            let hidden = model.b.forward(&model.a.forward(&x)?.tanh()?)?;
            let broken = autograd::apply_function(Arc::new(Broken), &[&hidden])?;
            Loss::sum(model.c.forward(&broken[0])?.square()?.sum_all()?, 1.0)
        }
        (Some(Fault::Weightless), _) => Loss::sum(model.loss(rt, 3, &BATCH[..1])?.total().clone(), 0.0),
        _ => model.loss(rt, k, &BATCH[2 * k..2 * k + 2]),
    }
}

/// One step that fails, if it is to, then two good ones.
fn train(model: &Mlp<Cpu>, rt: &Cpu, mut trainer: TrainStep<Cpu>, fault: Option<Fault>) -> Result<Trace> {
    if fault.is_some() {
        // Not the first parameter: those before it must not have been updated either.
        let _held = if fault == Some(Fault::Held) { Some(model.c.weight.value()?) } else { None };
        let mut states = if fault == Some(Fault::HeldState) { trainer.strategy().parts()? } else { Vec::new() };
        states.retain(|part| part.name == "state/exp_avg/c.weight");
        assert_eq!(states.len(), usize::from(fault == Some(Fault::HeldState)));
        assert!(trainer.step(|k| micro(model, rt, k, fault)).is_err(), "{fault:?}: an error");
    }
    let mut trace = Trace::default();
    for _ in 0..2 {
        let metrics = trainer.step(|k| micro(model, rt, k, None))?;
        trace.losses.push(metrics.loss()?);
        trace.norms.extend(metrics.grad_norm()?);
        trace.weights.push(weights(model)?);
    }
    assert_eq!(trainer.global_step(), 2, "after {fault:?}: {trace:?}");
    Ok(trace)
}

fn compare(name: &str, faults: &[Fault], run: impl Fn(&Mlp<Cpu>, &Cpu, Comm<Cpu>, Option<Fault>) -> Result<Trace>) {
    let with = |fault| {
        let rt = Cpu::with_threads(1);
        let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F32)).unwrap();
        let comm = Arc::new(NoOpCommunicator::new(&rt)) as Comm<Cpu>;
        run(&model, &rt, comm, fault).unwrap_or_else(|e| panic!("{name}, {fault:?}: {e}"))
    };
    let fresh = with(None);
    for &fault in faults {
        assert!(with(Some(fault)) == fresh, "{name}: a step that failed ({fault:?}) left a trace");
    }
}

fn two(scaled: bool) -> Result<TrainingConfig> {
    let loss_scaling = scaled.then(|| LossScaler::starting_at(64.0)).transpose()?;
    Ok(TrainingConfig { accumulation: 2, loss_scaling, ..config() })
}

#[test]
fn with_buckets() {
    let limits = Some(BucketLimits { first: 1, others: 1 });
    for (unused, scaled) in [(Unused::Error, false), (Unused::Allow, false), (Unused::Error, true)] {
        let small = BucketOptions { unused, limits: limits.clone(), ..Default::default() };
        let power = Some(PowerSgd { min_rate: 0.0, ..Default::default() });
        for (what, sums) in [
            ("plain", BucketOptions { unused, ..Default::default() }.into()),
            ("small", small.clone().into()),
            ("canonical", BucketOptions { canonical: true, ..small.clone() }.into()),
            ("f16", BucketOptions { compression: GradCompression::F16, ..small.clone() }.into()),
            ("powersgd", GradientSums { options: small, power }),
        ] {
            compare(&format!("{what} {unused:?} {scaled}"), &FAULTS, |model, rt, comm, fault| {
                train(model, rt, bucketed(&comm, model, two(scaled)?, sums.clone())?, fault)
            });
        }
    }
}

#[test]
fn with_shards() {
    for stage in ZeroStage::ALL {
        for (unused, state) in [
            (Unused::Error, StatePlace::Device),
            (Unused::Allow, StatePlace::Device),
            (Unused::Error, StatePlace::Host),
        ] {
            // A value that was gathered for a reader is not the one that is updated, nor is a copy of state in host memory.
            let harmless = |fault: &Fault| match fault {
                Fault::Held => stage.shards_parameters(),
                Fault::HeldState => state == StatePlace::Host,
                _ => false,
            };
            let faults: Vec<Fault> = FAULTS.into_iter().filter(|fault| !harmless(fault)).collect();
            compare(&format!("stage {} {unused:?} {state:?}", stage.number()), &faults, |model, rt, comm, fault| {
                let options = ZeroOptions { stage, units: UnitOf::children(), unused, state, ..Default::default() };
                train(model, rt, sharded(&comm, model, two(false)?, options)?, fault)
            });
        }
    }
}

#[test]
fn where_a_gradient_is_not_finite_and_its_bucket_has_left() {
    compare("check_finite", &FAULTS[..1], |model, rt, comm, fault| {
        let limits = Some(BucketLimits { first: 1, others: 1 });
        let options = BucketOptions { limits, check_finite: true, ..Default::default() };
        let mut trainer = bucketed(&comm, model, two(false)?, options)?;
        if fault.is_some() {
            // The last layer's buckets are sent; that of the first layer is found wrong.
            let spoiled = |k| {
                let loss = micro(model, rt, k, None)?;
                let nan = model.a.weight.var().mul(f64::NAN)?.sum_all()?;
                Loss::sum(loss.total().add(&nan)?, loss.weight())
            };
            let error = trainer.step(spoiled).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("a.weight") && error.contains("not finite"), "{error}");
        }
        train(model, rt, trainer, None)
    });
}

#[test]
fn no_parameter_stays_where_they_are_sharded() {
    for unused in [Unused::Error, Unused::Allow] {
        let rt = Cpu::with_threads(1);
        let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
        let comm = Arc::new(NoOpCommunicator::new(&rt)) as Comm<Cpu>;
        let options = ZeroOptions { units: UnitOf::children(), unused, ..Default::default() };
        let mut trainer = sharded(&comm, &model, two(false).unwrap(), options).unwrap();
        assert!(trainer.step(|k| micro(&model, &rt, k, Some(Fault::Second))).is_err());
        trainer.step(|k| micro(&model, &rt, k, None)).unwrap();
        assert!(model.named_parameters().iter().all(|(_, p)| !p.leaf().is_resident()), "{unused:?}");
    }
}

#[test]
fn no_stage_is_updated_where_another_cannot_be() {
    let rt = Cpu::with_threads(1);
    let mut trainer = two_stages(&rt, |_| ());
    let x = rows(&rt, 1, 2);
    let batch = |_| MicroBatches::split(from_ref(&x), from_ref(&x), 2);
    let weights = |trainer: &TrainStep<Cpu>| stage_weights(trainer.pipeline().expect("stages").stages().values());
    let before = weights(&trainer);
    let held = trainer.pipeline().expect("stages").stages()[&1].parameters()[0].value().unwrap();
    assert!(trainer.step(batch).is_err());
    assert_eq!(weights(&trainer), before);
    drop(held);
    trainer.step(batch).unwrap();
}

#[test]
fn a_load_that_failed_leaves_no_step_to_go_on_from() {
    let scratch = Scratch::new("torn-load");
    for how in STAGES {
        let folder = Folder::new(scratch.0.join(format!("{how:?}")));
        let comm = Arc::new(NoOpCommunicator::new(&cpu(0).unwrap())) as Comm<Cpu>;
        let model = Mlp::new(&Init::new(comm.runtime(), 0)).unwrap();
        let mut trainer = Any::new(&comm, &model, how, config()).unwrap();
        trainer.step(&model, &comm, 0).unwrap();
        trainer.save(&folder).unwrap();
        let numbers = trainer.0.numbers();
        let fails = |_: &Wanted| Err(Error::argument("a test", "fails on purpose"));
        assert!(trainer.0.restore(&mut { fails }, &numbers).is_err());
        let pushed = trainer.0.backward_and_step(model.loss(comm.runtime(), 1, &BATCH).unwrap()).map(drop);
        let gone_on = [pushed, trainer.step(&model, &comm, 1).map(drop), trainer.save(&folder)];
        assert!(gone_on.into_iter().all(|end| end.unwrap_err().to_string().contains("load a checkpoint")), "{how:?}");
        trainer.load(&folder).unwrap();
        assert_eq!(trainer.step(&model, &comm, 1).unwrap().global_step(), 2, "{how:?}");
    }
}
