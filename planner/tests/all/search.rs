//! Simulated steps, searches and goodput.

use numcore::NullRuntime;
use planner::{
    Estimate, Goodput, Machine, ModelCosts, OptimizerCosts, PlanSearch, PlannedModel, Recompute, Reliability,
    SimulatedStep, TrainingPlan,
};

use crate::{common::*, plans::gpt_costs, right::Draw};

fn adam() -> OptimizerCosts {
    OptimizerCosts::measure(AdamWConfig::default(), DType::F32, false).unwrap()
}

fn staged(kind: ScheduleKind, pipe: usize, v: usize, m: usize) -> TrainingPlan {
    let schedule = kind.to_string();
    TrainingPlan { pipe, schedule, stages_per_rank: v, micro_batches: m, micro_batch: 2, ..TrainingPlan::default() }
}

/// Blocks that are all alike: the middle one of a GPT.
fn alike(plan: &TrainingPlan) -> ModelCosts {
    let block = gpt_costs(plan, GptConfig { layers: 3, ..gpt() }, 3, |_| ()).parts.remove(1);
    let mut costs = ModelCosts { parts: vec![block; plan.stages()] };
    for (number, parameter) in costs.parts.iter_mut().flat_map(|part| &mut part.parameters).enumerate() {
        parameter.origin = number;
    }
    costs
}

/// Formulas against the simulation of the passes, for every schedule.
#[test]
fn planner_estimates_are_near_simulations() {
    for &kind in ScheduleKind::ALL {
        for (p, v, m) in [(4, 1, 8), (4, 1, 32), (8, 2, 16), (8, 2, 64), (4, 4, 32), (2, 1, 4)] {
            let plan = staged(kind, p, v, m);
            if plan.check().is_err() {
                continue;
            }
            // Links of these speeds hide transfers, or some, or none.
            for bandwidth in [1e15, 1e10, 1e8] {
                let mut machine = Machine::a100();
                machine.network.bandwidth = bandwidth;
                machine.node.bandwidth = bandwidth;
                // Small blocks take as long as larger ones on a slower device.
                (machine.flops, machine.memory_bandwidth) = (1e10, 1e9);
                let mut costs = alike(&plan);
                // The first stage receives nothing: it would be another.
                costs.parts.iter_mut().for_each(|part| part.input = 0);
                let estimate = Estimate::of(&plan, &costs, &adam(), &machine).unwrap();
                let simulated = SimulatedStep::of(&plan, &costs, &adam(), &machine).unwrap();
                let error = estimate.step() / simulated.estimate.step() - 1.0;
                assert!(error.abs() < 0.08, "{plan} at {bandwidth} bytes/s: {estimate:?}, {error}");
                let memory = [&estimate, &simulated.estimate].map(|of| of.memory.activations);
                // Of split passes, few are between their two parts.
                let splits = matches!(kind, ScheduleKind::ZbH1 | ScheduleKind::ZbH2 | ScheduleKind::Zbv);
                let splits = splits || kind == ScheduleKind::InterleavedZeroBubble;
                let most = if splits { memory[1] * 2 } else { memory[1] };
                assert!((memory[1]..=most).contains(&memory[0]), "{plan}: {memory:?}");
                // The parts of a simulated step add up to the end of its passes, and none is that of the formula.
                let Estimate { compute, layers, bubble, transfers, .. } = simulated.estimate;
                let makespan = simulated.simulation().unwrap().makespan() as f64 * 1e-9;
                let sum = compute + layers + bubble + transfers;
                assert!((sum / makespan - 1.0).abs() < 1e-9, "{plan}: {sum} of {makespan}");
                assert!(compute >= 0.0 && bubble >= 0.0 && transfers >= 0.0, "{plan}: {:?}", simulated.estimate);
                let share = transfers / makespan;
                assert!(
                    if bandwidth == 1e15 { share < 1e-6 } else { bandwidth > 1e8 || share > 1e-3 },
                    "{plan}: {share}"
                );
            }
        }
    }
}

#[test]
fn planner_simulations_have_memory_over_time_and_a_picture() {
    let plan = staged(ScheduleKind::OneFOneB, 4, 1, 8);
    let costs = alike(&plan);
    for blocking_transfers in [false, true] {
        let machine = Machine { blocking_transfers, ..Machine::a100() };
        let step = SimulatedStep::of(&plan, &costs, &adam(), &machine).unwrap();
        for rank in 0..4 {
            let over_time = step.memory_over_time(rank).unwrap();
            let peak = over_time.iter().map(|(_, bytes)| *bytes).max().unwrap();
            let (first, last) = (over_time[0].1, over_time[over_time.len() - 1].1);
            assert_eq!(first, last, "activations are gone after the step");
            let received = if rank == 0 { 0 } else { costs.parts[0].input };
            let held = (4 - rank as u64) * (costs.parts[0].saved + received);
            assert_eq!(peak - first, held, "1F1B holds p − r micro-batches");
            assert!(over_time.is_sorted_by(|a, b| a.0 <= b.0));
        }
        assert!(step.memory_over_time(4).unwrap_err().to_string().contains("below 4"));
        let passes = step.timeline().unwrap().ranks.iter().flatten().filter(|event| event.end > event.start).count();
        assert!(passes >= 2 * 4 * 8);
        assert!(step.timeline().unwrap().to_svg().contains("rank 3"));
    }
}

/// A GPT that the planner may cut in any way.
fn any_gpt(plan: &TrainingPlan, mesh: &Mesh<NullRuntime>) -> Result<PlannedModel> {
    let rt = mesh.world().runtime();
    let model = Gpt::new(&Init::new(rt, 42), GptConfig { layers: 4, width: 64, ..gpt() })?;
    mesh.parallelize(&model, &Gpt::<NullRuntime>::tensor_plan().sequence_parallel(plan.sequence_parallel))?;
    mesh.context_parallel(&model, ContextExchange::Ring)?;
    let (parts, loss) = model.split_with_loss(4, summed())?;
    let loss = move |y: &[Var<NullRuntime>], t: &[Var<NullRuntime>]| {
        Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
    };
    let tokens = Tensor::zeros(rt, [plan.micro_batch, CONTEXT], DType::I64)?;
    Ok(PlannedModel::new(parts, loss).micro_batch(vec![tokens.clone()], vec![tokens]))
}

/// A machine on which a small model takes some time.
fn slow() -> Machine {
    let mut machine = Machine::a100();
    (machine.flops, machine.peak_flops, machine.memory_bandwidth) = (1e11, 1e11, 1e10);
    machine.ranks_per_node = 4;
    (machine.node.bandwidth, machine.network.bandwidth) = (1e10, 1e9);
    (machine.node.latency, machine.network.latency) = (1e-6, 1e-5);
    machine
}

#[test]
fn planner_finds_the_best_plan_that_fits() {
    let search = PlanSearch { most_context: 2, most_micro_batch: 4, ..PlanSearch::new(8, 16) };
    let found = search.run(&slow(), &adam(), any_gpt).unwrap();
    assert_eq!(found.best.len(), 10);
    assert!(found.best.is_sorted_by(|a, b| a.estimate.step() <= b.estimate.step()));
    assert_eq!(found.too_large, 0);
    let table = found.table(&slow());
    assert_eq!(table.lines().count(), 1 + 10 + 1);
    assert!(table.lines().nth(1).unwrap().ends_with(&found.best[0].plan.to_string()), "{table}");
    let told = found.best[0].estimate.to_string();
    assert!(told.contains("compute") && told.contains("kernels of forward") && told.contains("activations"), "{told}");
    // Plans drawn at random are simulated too; the best of all is no worse than any of them.
    let mut draw = Draw(7);
    let mut tried = 0;
    while tried < 100 {
        let one = |draw: &mut Draw, of: &[usize]| draw.one(of);
        let (tensor, context, pipe) = (one(&mut draw, &[1, 2, 4]), one(&mut draw, &[1, 2]), one(&mut draw, &[1, 2, 4]));
        if tensor * context * pipe > 8 {
            continue;
        }
        let data = 8 / tensor / context / pipe;
        let micro_batch = one(&mut draw, &[1, 2, 4]);
        let kind = draw.one(ScheduleKind::ALL);
        let plan = TrainingPlan {
            tensor,
            context,
            pipe,
            data,
            micro_batch,
            sequence_parallel: tensor > 1,
            micro_batches: 16 / data / micro_batch,
            schedule: kind.to_string(),
            stages_per_rank: one(&mut draw, &[1, 2]),
            zero: draw.one(&[0, 1, 2, 3]),
            recompute: draw.one(&Recompute::ALL),
            ..TrainingPlan::default()
        };
        if plan.check().is_err() || plan.stages() > 4 || plan.pipe == 1 && plan.stages_per_rank > 1 {
            continue;
        }
        tried += 1;
        let costs = ModelCosts::measure(&plan, false, |mesh| any_gpt(&plan, mesh)).unwrap();
        let step = SimulatedStep::of(&plan, &costs, &adam(), &slow()).unwrap().estimate.step();
        let best = &found.best[0];
        assert!(best.estimate.step() <= step * 1.0001, "{plan}: {step}, and {}: {:?}", best.plan, best.estimate);
    }
}

#[test]
fn planner_search_prunes_by_memory_and_says_what_is_missing() {
    let search = PlanSearch::new(4, 8);
    let rich = search.run(&slow(), &adam(), any_gpt).unwrap();
    let least = |found: &planner::FoundPlans| found.best.iter().map(|plan| plan.estimate.memory.total()).min().unwrap();
    let fast = rich.best[0].estimate.memory.total();
    let machine = Machine { memory: fast as f64 * 0.6, ..slow() };
    let poor = search.run(&machine, &adam(), any_gpt).unwrap();
    assert!(poor.too_large > 0 && least(&poor) as f64 <= machine.memory);
    assert!(poor.best[0].estimate.step() >= rich.best[0].estimate.step());
    let none = search.run(&Machine { memory: 1e3, ..slow() }, &adam(), any_gpt).unwrap_err().to_string();
    assert!(none.contains("no plan of 4 ranks fits into 0.0 GB: the smallest needs"), "{none}");
    let odd = PlanSearch::new(3, 8).run(&slow(), &adam(), any_gpt);
    // Two sequences cannot be shared out among three ranks, but one rank of each of three pieces can read all.
    assert!(odd.is_ok_and(|found| found.best.iter().all(|plan| plan.plan.data == 1)));
    assert!(PlanSearch::new(0, 8).run(&slow(), &adam(), any_gpt).is_err());
}

/// A block, and a table that nothing reads.
#[derive(nn::Module)]
struct Wide<R: numcore::Runtime> {
    block: Linear<R>,
    table: Option<nn::Param<R>>,
}

impl<R: numcore::Runtime> nn::Stage<R> for Wide<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        Ok(vec![self.block.forward(&inputs[0])?])
    }
}

/// Four parts, of which the third has a table of 4 MB. An estimate looks at the ranks with most work, most activations
/// and the ends; a simulation looks at all.
fn wide_third(plan: &TrainingPlan, mesh: &Mesh<NullRuntime>) -> Result<PlannedModel> {
    let init = Init::new(mesh.world().runtime(), 42);
    let part = |number: usize| {
        let table = (number == 2).then(|| init.param([1 << 20], nn::Initializer::Zeros)).transpose()?;
        Ok(Wide { block: Linear::new(&init, 64, 64)?, table })
    };
    let parts = (0..4).map(part).collect::<Result<Vec<_>>>()?;
    let loss = |y: &[Var<NullRuntime>], _: &[Var<NullRuntime>]| Loss::sum(y[0].square()?.sum_all()?, 1.0);
    let x = Tensor::zeros(mesh.world().runtime(), [plan.micro_batch, 64], DType::F32)?;
    Ok(PlannedModel::new(parts, loss).micro_batch(vec![x], vec![]))
}

#[test]
fn planner_search_simulates_until_plans_fit() {
    let search = PlanSearch { most_tensor: Some(1), keep: 2, ..PlanSearch::new(4, 16) };
    // State of the table is 16 MB whole, and a quarter of it in shards.
    let small = Machine { memory: 2e6, ..slow() };
    let none = search.run(&small, &adam(), wide_third).map(|found| found.best.len()).map_err(|e| e.to_string());
    assert!(none.as_ref().is_err_and(|why| why.contains("no plan of 4 ranks fits")), "{none:?}");
    let large = Machine { memory: 1.2e7, ..slow() };
    let found = search.run(&large, &adam(), wide_third).unwrap();
    assert_eq!(found.best.len(), 2);
    assert!(found.best.iter().all(|plan| plan.estimate.memory.total() as f64 <= large.memory), "{found:?}");
}

/// A change of a machine, by a factor.
type Change<'a> = &'a dyn Fn(&mut Machine, f64);

#[test]
fn planner_steps_are_faster_over_faster_links() {
    let plan = TrainingPlan { data: 2, tensor: 2, pipe: 2, micro_batches: 4, zero: 2, ..TrainingPlan::default() };
    let costs = ModelCosts::measure(&plan, false, |mesh| any_gpt(&plan, mesh)).unwrap();
    let step = |change: Change<'_>| {
        let of = |factor: f64| {
            let mut machine = Machine { flops: 1e9, ..slow() };
            change(&mut machine, factor);
            SimulatedStep::of(&plan, &costs, &adam(), &machine).unwrap().estimate.step()
        };
        [0.5, 1.0, 2.0, 4.0].map(of)
    };
    let changes: [Change<'_>; 4] = [
        &|machine, factor| machine.flops *= factor,
        &|machine, factor| machine.memory_bandwidth *= factor,
        &|machine, factor| machine.node.bandwidth *= factor,
        &|machine, factor| machine.network.bandwidth *= factor,
    ];
    for change in changes {
        let steps = step(change);
        assert!(steps.is_sorted_by(|a, b| a >= b) && steps[0] > steps[3], "{steps:?}");
    }
}

/// Llama 3's run of 16 384 GPUs: 419 unexpected failures in 54 days, and more than 90 % of the time in training.
#[test]
fn planner_goodput_is_that_of_formulas() {
    let rank_mtbf = 54.0 * 86_400.0 / 419.0 * 16_384.0;
    let llama = Goodput::of(16_384, &Reliability { rank_mtbf, save: 10.0, restart: 300.0 }).unwrap();
    assert!((llama.mtbf / 3600.0 - 3.1).abs() < 0.05);
    assert!(llama.share > 0.9 && llama.share < 0.97, "{llama:?}");
    // Young's formula, for short checkpoints.
    let young = (2.0 * 10.0 * llama.mtbf).sqrt();
    assert!((llama.interval / young - 1.0).abs() < 0.02, "{llama:?}, Young has {young}");
    let lost = (2.0 * 10.0 / llama.mtbf).sqrt() + 300.0 / llama.mtbf;
    assert!((1.0 - llama.share - lost).abs() < 0.003, "{llama:?}, {lost}");
    // No other interval is better, by a sum over runs that end at random: an interval of t seconds takes
    // M·(e^((t+C)/M) − 1) seconds.
    let share = |t: f64| t / (llama.mtbf * (300.0 / llama.mtbf).exp() * ((t + 10.0) / llama.mtbf).exp_m1());
    assert!([0.5, 0.9, 1.1, 2.0].iter().all(|factor| share(llama.interval * factor) < llama.share));
    assert!((share(llama.interval) - llama.share).abs() < 1e-12);
    // Without failures nearly nothing is lost, and free checkpoints are made all the time.
    let safe = Goodput::of(1, &Reliability { rank_mtbf: 1e15, save: 1.0, restart: 1.0 }).unwrap();
    assert!(safe.share > 0.999_999);
    let free = Goodput::of(8, &Reliability { rank_mtbf: 8e4, save: 0.0, restart: 100.0 }).unwrap();
    assert_eq!((free.interval, free.share), (0.0, (-0.01_f64).exp()));
    assert!((llama.seconds(100, 2.0) - 200.0 / llama.share).abs() < 1e-9);
    for wrong in [0.0, -1.0, f64::NAN] {
        assert!(Goodput::of(8, &Reliability { rank_mtbf: wrong, save: 1.0, restart: 1.0 }).is_err());
    }
}

/// Speeds depend on the machine; that they are speeds does not.
#[test]
fn planner_calibrates_any_machine() {
    use distributed::comm::Ranks;
    for ranks in [1, 2] {
        let all = Ranks::new(ranks).run(|_| Ok(Cpu::with_threads(1)), |comm| planner::calibrate(&comm, 8e9)).unwrap();
        for machine in all {
            assert_eq!(Machine::from_toml(&machine.to_toml().unwrap()).unwrap(), machine);
            assert_eq!((machine.ranks_per_node, machine.memory, machine.recomputes), (ranks, 8e9, true));
        }
    }
}
