//! Digests of what every strategy computes, printed: two versions of the code that print the same compute the same
//! bits.
//!
//! `WEFTGRAD_TEST_RECORD=1 cargo test -p weftgrad-distributed --test all -- recorded --nocapture | grep '^recorded'`,
//! on one machine. Schedules, stages of ZeRO and axes are there each by itself and in some products, with what a step
//! may be asked for beside them.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::{balance, local_updates, powersgd::compressed, prelude::*, zero_stages::options};

/// Whether digests are wanted: they take a minute, and say nothing by themselves.
fn is_asked() -> bool {
    std::env::var_os("WEFTGRAD_TEST_RECORD").is_some()
}

fn outcome(name: &str, values: impl Iterator<Item = u64>) {
    let mut digest = DefaultHasher::new();
    let count = values.inspect(|value| value.hash(&mut digest)).count();
    assert!(count > 0, "{name} computed nothing");
    println!("recorded {name}: {:016x}", digest.finish());
}

fn floats<'a>(name: &str, values: impl IntoIterator<Item = &'a f64>) {
    outcome(name, values.into_iter().map(|value| value.to_bits()));
}

fn trace(name: &str, trace: &Trace) {
    floats(name, trace.losses.iter().chain(&trace.norms).chain(trace.weights.iter().flatten()));
}

fn pieces(name: &str, trace: &RunOutcome) {
    floats(name, trace.losses.iter().chain(&trace.norms).chain(trace.pieces.iter().flat_map(|(.., values)| values)));
}

/// The steps of a trainer on this rank's examples, in two micro-batches.
macro_rules! steps {
    ($M:ty, $comm:expr, $dtype:expr, |$model:ident| $step:expr, $whole:expr) => {{
        let $model = <$M as Task>::new(&Init::new($comm.runtime(), 1).dtype($dtype))?;
        let (mut step, mut trace, own) = ($step, Trace::default(), own(&$comm));
        for k in 0..STEPS {
            let micro = |i: usize| own.iter().copied().skip(i).step_by(2).collect::<Vec<_>>();
            let metrics = step.step(|i| $model.loss($comm.runtime(), k, &micro(i)))?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
        }
        let _whole = $whole(&step)?;
        trace.weights.push(weights(&$model)?);
        Ok(trace)
    }};
}

#[test]
fn replicas_and_shards() {
    if !is_asked() {
        return;
    }
    let config = || TrainingConfig { accumulation: 2, ..config() };
    let none = |_: &TrainStep<Cpu>| -> numcore::Result<()> { Ok(()) };
    for dtype in [DType::F64, DType::BF16] {
        for n in WORLDS {
            let buckets = [
                ("data parallel", GradientSums::default()),
                ("canonical", BucketOptions { canonical: true, ..Default::default() }.into()),
                ("main gradients", BucketOptions { main_gradients: true, ..Default::default() }.into()),
                ("compressed", compressed(PowerSgd { rank: 1, min_rate: 1.0, ..Default::default() })),
            ];
            for (name, options) in buckets {
                let ddp = everywhere(n, |comm| {
                    steps!(Gpt<Cpu>, comm, dtype, |model| bucketed(&comm, &model, config(), options.clone())?, none)
                });
                trace(&format!("{name} {n} {dtype}"), &ddp);
            }
            for stage in ZeroStage::ALL {
                let zero = everywhere(n, |comm| {
                    let options = options(stage, UnitOf::layers());
                    steps!(
                        Gpt<Cpu>,
                        comm,
                        dtype,
                        |model| sharded(&comm, &model, config(), options)?,
                        |step: &TrainStep<Cpu>| step.gather_full_params()
                    )
                });
                trace(&format!("zero {} {n} {dtype}", stage.number()), &zero);
            }
        }
    }
}

#[test]
fn axes() {
    if !is_asked() {
        return;
    }
    use Axis::{Context, Data, Expert, Shard, Tensor};
    let cases: [(&[(Axis, usize)], ZeroStage); 6] = [
        (&[(Data, 2), (Tensor, 2)], ZeroStage::None),
        (&[(Shard, 3), (Tensor, 2)], ZeroStage::Optimizer),
        (&[(Data, 2), (Shard, 2), (Tensor, 2)], ZeroStage::Parameters),
        (&[(Data, 2), (Context, 2)], ZeroStage::None),
        (&[(Shard, 2), (Context, 2), (Tensor, 2)], ZeroStage::Gradients),
        (&[(Data, 5)], ZeroStage::None),
    ];
    let named = |stage: ZeroStage| (stage != ZeroStage::None).then_some(stage);
    for (axes, stage) in cases {
        let zero = named(stage);
        for sequence in [false, true] {
            let way =
                Way { sequence, accumulation: 3, frozen: &["blocks.0.ln1"], ..Way::gpt(2).zero(stage).over(axes) };
            pieces(&format!("{axes:?} {zero:?} sequence {sequence}"), &Way { steps: 3, ..way }.outcome());
        }
        let (way, scratch) = (Way { dtype: DType::F32, ..Way::gpt(8).zero(stage) }, Scratch::new("recorded"));
        way.over(axes).go_on(None, 0..2, Some(&scratch.folder()));
        for (name, bytes) in contents(&scratch.folder()) {
            outcome(&format!("saved {axes:?} {zero:?} {name}"), bytes.into_iter().map(u64::from));
        }
    }
    let experts: [(&[(Axis, usize)], ZeroStage); 4] = [
        (&[(Data, 2), (Expert, 2)], ZeroStage::None),
        (&[(Shard, 4), (Expert, 2)], ZeroStage::Parameters),
        (&[(Data, 2), (Shard, 2), (Expert, 4)], ZeroStage::Gradients),
        (&[(Data, 2), (Tensor, 2), (Expert, 2)], ZeroStage::None),
    ];
    for (axes, stage) in experts {
        let way = Way { router: [0.3, 0.1], steps: 3, ..Way::mixture(4).zero(stage).over(axes) };
        pieces(&format!("experts {axes:?} {:?}", named(stage)), &way.outcome());
    }
}

#[test]
fn pipelines() {
    if !is_asked() {
        return;
    }
    use Axis::{Data, Pipe, Tensor};
    for &kind in ScheduleKind::ALL {
        for v in [1, 2] {
            let way = Way::gpt(2).staged(kind, v).over(&[(Pipe, 2), (Data, 2)]);
            let zero = |stage: ZeroStage| (format!("Zero({stage:?})"), way.clone().zero(stage));
            let hows = ZeroStage::ALL.into_iter().map(zero);
            let hows = hows.chain([("Replicas".into(), way.clone()), ("Gathered".into(), way.clone().gathered())]);
            for (how, mut way) in hows.filter(|(_, way)| way.checked(2).is_some()) {
                (way.gpt.tied_head, way.steps) = (true, 3);
                pieces(&format!("{kind} {v} {how}"), &way.outcome());
            }
        }
    }
    let cut = Way::gpt(2).staged(ScheduleKind::Zbv, 2).zero(ZeroStage::Parameters);
    let cut = Way { steps: 3, ..cut.over(&[(Pipe, 2), (Data, 2), (Tensor, 2)]) };
    pieces("pipeline, data, tensor", &cut.outcome());
}

#[test]
fn wrappers() {
    if !is_asked() {
        return;
    }
    for n in WORLDS {
        let every = |every| LocalUpdates { every: Some(every), ..LocalUpdates::default() };
        let local = |name: &str, of: &(dyn Fn(&distributed::comm::Comm<Cpu>) -> numcore::Result<Vec<f64>> + Sync)| {
            let all = Ranks::new(n).run(cpu, |comm| of(&comm)).unwrap();
            floats(&format!("{name} {n}"), all.iter().flatten());
        };
        let own = local_updates::own;
        local("local sgd", &|comm| local_updates::train(comm, LocalSgd, every(2), 6, own));
        local("diloco", &|comm| local_updates::train(comm, DiLoCo::default(), every(3), 6, own));
        local("slow momentum", &|comm| local_updates::train(comm, SlowMo::default(), every(2), 6, own));
        local("elastic averaging", &|comm| local_updates::train(comm, ElasticAveraging::default(), every(1), 6, own));
        local("uneven", &|comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 3).dtype(DType::F64))?;
            let step = TrainStep::builder(comm, &model).optimizer(adamw()).config(config()).build()?;
            Ok(balance::uneven(comm, &model, step)?.0)
        });
    }
}
