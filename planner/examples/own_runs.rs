//! Steps of random plans on ranks as threads over modelled links, beside their estimates: seconds and peak bytes.
//!
//! Run it on an idle machine: `cargo run --release -p weftgrad-planner --example own_runs`. With the argument `picked`,
//! it runs the plan that a search picks, beside 100 random ones; with `verified`, it verifies a larger model on 8 ranks.

use std::{sync::Arc, time::Duration};

use autograd::Var;
use distributed::{
    comm::{Collectives, Comm, Communicator, Link, Ranks, SlowCommunicator},
    mesh::Mesh,
    pipeline::{MicroBatches, PipelineModel, ScheduleKind},
    plan::Axis,
    train::{Loss, TrainStep},
};
use nn::{Gpt, GptConfig, Init, parallel::VocabularyLoss};
use numcore::{
    DType, Error, NullRuntime, Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::{PointwiseOps, ViewOps},
    rng::Philox,
};
use optim::AdamWConfig;
use planner::{
    Estimate, LinkSpeed, Machine, ModelCosts, OptimizerCosts, PlanSearch, PlannedModel, SimulatedStep, TrainingPlan,
    calibrate,
    verify::{Examples, Verify},
};
use runtime_cpu::Cpu;

const LENGTH: usize = 64;
const CONFIG: GptConfig = GptConfig {
    vocab: 512,
    context: LENGTH,
    layers: 4,
    heads: 4,
    width: 128,
    bias: true,
    dropout: 0.0,
    activation: nn::Activation::GeluTanh,
    tied_head: false,
};

fn summed() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, z_loss: 0.0 }
}

fn planned(config: GptConfig, plan: &TrainingPlan, mesh: &Mesh<NullRuntime>) -> Result<PlannedModel> {
    let rt = mesh.world().runtime();
    let model = Gpt::new(&Init::new(rt, 42), config)?;
    mesh.parallelize(&model, &Gpt::<NullRuntime>::tensor_plan().sequence_parallel(plan.sequence_parallel))?;
    let (parts, loss) = model.split_with_loss(config.layers, summed())?;
    let loss = move |y: &[Var<NullRuntime>], t: &[Var<NullRuntime>]| {
        Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
    };
    let tokens = Tensor::zeros(rt, [plan.micro_batch, LENGTH], DType::I64)?;
    Ok(PlannedModel::new(parts, loss).micro_batch(vec![tokens.clone()], vec![tokens]))
}

/// A step of a plan on the ranks of a mesh.
fn step_of(mesh: &Mesh<Cpu>, plan: &TrainingPlan) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let rt = mesh.world().runtime().clone();
    let cut = Gpt::<Cpu>::tensor_plan().sequence_parallel(plan.sequence_parallel);
    let model = Gpt::new(&Init::new(&rt, 42), CONFIG)?;
    let m = plan.micro_batches;
    let tokens = Tensor::zeros(&rt, [m * plan.micro_batch, LENGTH], DType::I64)?;
    let own = tokens.narrow(0, 0, plan.micro_batch)?.contiguous()?;
    if plan.stages() > 1 {
        let (stages, loss) = model.split_with_loss(plan.stages(), summed())?;
        let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
            Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
        };
        let pipe = mesh.axis(Axis::Pipe).rank();
        let model = PipelineModel::on(pipe, plan.checked()?, stages).loss(loss).parallelize(mesh, &cut)?;
        let builder = TrainStep::builder(mesh, model).optimizer(AdamWConfig::default());
        let mut step = plan.configure(builder)?.build()?;
        return Ok(Box::new(move || {
            let all = std::slice::from_ref(&tokens);
            step.step(|_| MicroBatches::split(all, all, m)).map(drop)
        }));
    }
    mesh.parallelize(&model, &cut)?;
    let builder = TrainStep::builder(mesh, &model).optimizer(AdamWConfig::default());
    let mut step = plan.configure(builder)?.build()?;
    Ok(Box::new(move || {
        step.step(|_| {
            let x = Var::new(own.clone());
            Loss::sum(model.next_token_loss(&x, &x, &summed())?, own.shape().numel() as f64)
        })
        .map(drop)
    }))
}

/// The median seconds of five steps from the third on, which all ranks of `everyone` begin together.
fn median(everyone: &Comm<Cpu>, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    step()?;
    step()?;
    everyone.runtime().reset_peak();
    let mut all = Vec::new();
    for _ in 0..5 {
        everyone.exchange_equal([0])?;
        let begun = std::time::Instant::now();
        step()?;
        everyone.runtime().synchronize()?;
        all.push(begun.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all[2])
}

/// The median seconds of a step on rank 0, and the largest peak of all ranks in bytes.
fn measured(plan: &TrainingPlan, link: Link) -> Result<(f64, u64)> {
    let run = |comm: Comm<Cpu>| {
        let world: Comm<Cpu> = Arc::new(SlowCommunicator::new(comm, link)?);
        let seconds = median(&world, step_of(&Mesh::new(&world, plan.parallel()?)?, plan)?)?;
        Ok((seconds, world.runtime().memory().total.peak as u64))
    };
    let all = Ranks::new(plan.world()).run(|_| Ok(Cpu::with_threads(1)), run)?;
    Ok((all[0].0, all.iter().map(|(_, peak)| *peak).max().unwrap_or(0)))
}

fn drawn(rng: &mut Philox, world: usize) -> Option<TrainingPlan> {
    let mut one = |of: &[usize]| of[rng.below(of.len() as u64) as usize];
    let (tensor, pipe) = (one(&[1, 2, 4]), one(&[1, 1, 2, 4]));
    let kind = ScheduleKind::ALL[one(&[0, 1, 2, 3, 4, 5, 6])];
    let plan = TrainingPlan {
        tensor,
        pipe,
        data: world / tensor / pipe,
        zero: one(&[0, 1, 2, 3]) as u8,
        schedule: kind.to_string(),
        stages_per_rank: if pipe == 2 { one(&[1, 2]) } else { 1 },
        micro_batches: one(&[2, 4, 8, 16]),
        micro_batch: one(&[1, 2, 4]),
        sequence_parallel: tensor > 1 && one(&[0, 1]) == 1,
        ..TrainingPlan::default()
    };
    (tensor * pipe <= world && plan.check().is_ok()).then_some(plan)
}

/// Microseconds of an estimate, and milliseconds of a simulation, of 64 ranks with 4 stages and 512 micro-batches.
fn speed(optimizer: &OptimizerCosts) -> Result<()> {
    let plan = TrainingPlan {
        pipe: 64,
        data: 16,
        zero: 1,
        stages_per_rank: 4,
        schedule: ScheduleKind::Interleaved.to_string(),
        micro_batches: 512,
        ..TrainingPlan::default()
    };
    let config = GptConfig { layers: 256, width: 16, ..CONFIG };
    let costs = ModelCosts::measure(&plan, false, |mesh| planned(config, &plan, mesh))?;
    let machine = Machine::a100();
    let begun = std::time::Instant::now();
    for _ in 0..1000 {
        Estimate::of(&plan, &costs, optimizer, &machine)?;
    }
    println!("estimate: {:.1} microseconds", 1e3 * begun.elapsed().as_secs_f64());
    let begun = std::time::Instant::now();
    for _ in 0..5 {
        SimulatedStep::of(&plan, &costs, optimizer, &machine)?;
    }
    println!("simulation: {:.1} ms", 1e3 * begun.elapsed().as_secs_f64() / 5.0);
    Ok(())
}

/// The machine of ranks as threads over a modelled link, which adds to what the engine itself takes. It is calibrated
/// with all ranks at once, and matched with a step of the model on each, for micro-batches of 1, 2 and 4 sequences.
fn calibrated(optimizer: &OptimizerCosts, world: usize) -> Result<impl Fn(usize, f64) -> Machine + use<>> {
    let plans = [1, 2, 4].map(|micro_batch| TrainingPlan { micro_batches: 4, micro_batch, ..TrainingPlan::default() });
    let of_rank = |comm: Comm<Cpu>| {
        let machine = calibrate(&comm, 8e9)?;
        let alone = comm.split(Some(comm.rank()), 0)?.ok_or_else(|| Error::internal("own_runs", "no group"))?;
        let seconds = |plan| median(&comm, step_of(&Mesh::new(&alone, TrainingPlan::parallel(plan)?)?, plan)?);
        Ok((machine, plans.iter().map(seconds).collect::<Result<Vec<_>>>()?))
    };
    let (machine, seconds) = Ranks::new(world).run(|_| Ok(Cpu::with_threads(1)), of_rank)?.swap_remove(0);
    let mut matched = Vec::new();
    for (plan, seconds) in plans.iter().zip(seconds) {
        let costs = ModelCosts::measure(plan, machine.recomputes, |mesh| planned(CONFIG, plan, mesh))?;
        let estimated = Estimate::of(plan, &costs, optimizer, &machine)?.step();
        println!("{world} ranks, {plan}: {:.1} ms, {:.2} of the estimate", 1e3 * seconds, seconds / estimated);
        matched.push((plan.micro_batch, machine.clone().matched(estimated, seconds)?));
    }
    println!("{machine:?}");
    Ok(move |micro_batch: usize, bandwidth: f64| {
        let own = machine.node;
        let link = LinkSpeed { latency: 5e-5 + own.latency, bandwidth: 1.0 / (1.0 / bandwidth + 1.0 / own.bandwidth) };
        let machine = matched.iter().find(|(of, _)| *of == micro_batch).map_or(&machine, |(_, machine)| machine);
        Machine { node: link, network: link, ..machine.clone() }
    })
}

/// Runs the plan that a search picks, and 100 random plans with the same batch.
fn picked(optimizer: &OptimizerCosts, (world, batch): (usize, usize), bandwidth: f64) -> Result<()> {
    let machine = calibrated(optimizer, world)?(2, bandwidth);
    let search = PlanSearch { most_micro_batch: 4, most_stages_per_rank: 2, ..PlanSearch::new(world, batch) };
    let best = search.run(&machine, optimizer, |plan, mesh| planned(CONFIG, plan, mesh))?.best.swap_remove(0);
    let run = |plan: &TrainingPlan| measured(plan, Link { latency: Duration::from_micros(50), bandwidth });
    let own = run(&best.plan)?.0;
    let (mut rng, mut others) = (Philox::new(2, 0), Vec::new());
    while others.len() < 100 {
        let fits = |plan: &TrainingPlan| plan.global_batch() == batch && plan.stages() <= CONFIG.layers;
        let Some(plan) = drawn(&mut rng, world).filter(fits) else { continue };
        others.push(run(&plan)?.0);
    }
    let again = run(&best.plan)?.0;
    others.sort_by(f64::total_cmp);
    let beaten = others.iter().filter(|other| **other > own.max(again)).count();
    println!(
        "{world} ranks, {:.0} Gb/s: {:.1} and {:.1} ms, estimated {:.1}; beats {beaten} of 100, {:.1} to {:.1} ms: {}",
        8e-9 * bandwidth,
        1e3 * own,
        1e3 * again,
        1e3 * best.estimate.step(),
        1e3 * others[0],
        1e3 * others[99],
        best.plan
    );
    Ok(())
}

/// Seconds in which a GPT of 11 million parameters is verified on 8 ranks, without a fault and with one in the loss.
fn verified() -> Result<()> {
    let base = TrainingPlan { micro_batches: 4, micro_batch: 1, ..TrainingPlan::default() };
    let plans = [
        TrainingPlan { data: 8, zero: 3, micro_batches: 1, micro_batch: 4, ..base.clone() },
        TrainingPlan { data: 4, tensor: 2, zero: 1, micro_batches: 1, micro_batch: 8, ..base.clone() },
        TrainingPlan { data: 2, tensor: 2, pipe: 2, micro_batch: 4, ..base },
    ];
    for (plan, is_right) in plans.iter().flat_map(|plan| [(plan, true), (plan, false)]) {
        let make = |mesh: &Mesh<Cpu>| {
            let pipe = mesh.axis(Axis::Pipe);
            let own = TrainingPlan { pipe: pipe.size(), ..plan.clone() };
            let model = Gpt::new(
                &Init::new(mesh.world().runtime(), 42),
                GptConfig { layers: 6, heads: 6, width: 384, ..CONFIG },
            )?;
            let (stages, loss) = model.split_with_loss(own.stages(), summed())?;
            let factor = if is_right || mesh.world().size() == 1 { 1.0 } else { 1.01 };
            let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
                Loss::sum(loss.of(&y[0], &t[0])?.mul(factor)?, t[0].dims().iter().product::<usize>() as f64)
            };
            let model = PipelineModel::on(pipe.rank(), own.checked()?, stages).loss(loss);
            let model = model.parallelize(mesh, &Gpt::<Cpu>::tensor_plan())?;
            let builder = TrainStep::builder(mesh, model).optimizer(AdamWConfig::default());
            let builder = if mesh.world().size() == 1 { builder } else { plan.configure(builder)? };
            Ok((Vec::<nn::Linear<Cpu>>::new(), builder.build()?))
        };
        let batch = |rt: &Cpu, step: u64| {
            let tokens =
                (0..plan.global_batch() * LENGTH).map(|k| ((k * 7 + k / 3 + step as usize * 5) % CONFIG.vocab) as i64);
            Ok(vec![Tensor::from_slice(rt, [plan.global_batch(), LENGTH], &tokens.collect::<Vec<_>>())?])
        };
        let input = |_: &Vec<nn::Linear<Cpu>>, examples: &Examples<'_, Cpu>| {
            MicroBatches::split(&examples.tensors, &examples.tensors, plan.micro_batches)
        };
        let begun = std::time::Instant::now();
        let report = Verify::new(plan.parallel()?).run(|_| Ok(Cpu::with_threads(1)), make, batch, input)?;
        let seconds = begun.elapsed().as_secs_f64();
        assert_eq!(report.is_equal(), is_right, "{plan}: {report}");
        println!("{seconds:.1} s, {plan}: {report}");
    }
    Ok(())
}

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("verified") {
        return verified();
    }
    let optimizer = OptimizerCosts::measure(AdamWConfig::default(), DType::F32, false)?;
    if std::env::args().nth(1).as_deref() == Some("picked") {
        let ways = [(4, 1.25e9), (4, 0.125e9), (2, 1.25e9), (2, 0.125e9)];
        return ways.into_iter().try_for_each(|(world, bandwidth)| picked(&optimizer, (world, 32), bandwidth));
    }
    speed(&optimizer)?;
    let mut rng = Philox::new(1, 0);
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    for world in [2, 4, 8] {
        let count = if world == 4 { 18 } else { 16 };
        let calibrated = calibrated(&optimizer, world)?;
        let mut done = 0;
        while done < count {
            let Some(plan) = drawn(&mut rng, world) else { continue };
            let bandwidth = if done % 2 == 0 { 1.25e9 } else { 0.125e9 };
            let machine = calibrated(plan.micro_batch, bandwidth);
            let costs = ModelCosts::measure(&plan, true, |mesh| planned(CONFIG, &plan, mesh))?;
            let estimate = SimulatedStep::of(&plan, &costs, &optimizer, &machine)?.estimate;
            let (seconds, peak) = measured(&plan, Link { latency: Duration::from_micros(50), bandwidth })?;
            let (time, memory) = (estimate.step() / seconds - 1.0, estimate.memory.total() as f64 / peak as f64 - 1.0);
            println!(
                "{:>6.1} ms {:>+6.1} %  {:>7.2} MB {:>+6.1} %  {:.0} Gb/s, {plan}",
                1e3 * seconds,
                100.0 * time,
                peak as f64 / 1e6,
                100.0 * memory,
                8e-9 * bandwidth
            );
            times.push(time.abs());
            peaks.push(memory.abs());
            done += 1;
        }
    }
    for (what, all) in [("time", &mut times), ("peak", &mut peaks)] {
        all.sort_by(f64::total_cmp);
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        println!(
            "{what}: mean {:.1} %, median {:.1} %, worst {:.1} %",
            100.0 * mean,
            100.0 * all[all.len() / 2],
            100.0 * all[all.len() - 1]
        );
    }
    Ok(())
}
