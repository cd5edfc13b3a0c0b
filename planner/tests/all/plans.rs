//! Plans and machines as text, and measured costs.

use nn::moe::{MixtureOfExperts, MoeConfig};
use numcore::NullRuntime;
use planner::{Machine, ModelCosts, OptimizerCosts, PlannedModel, TrainingPlan};

use crate::common::*;

const MICRO_BATCH: usize = 3;

/// The costs of a GPT under a plan, of which `change` may freeze parts.
pub fn gpt_costs(
    plan: &TrainingPlan,
    config: GptConfig,
    parts: usize,
    change: impl Fn(&Gpt<NullRuntime>),
) -> ModelCosts {
    let make = |mesh: &Mesh<NullRuntime>| {
        let rt = mesh.world().runtime();
        let model = Gpt::new(&Init::new(rt, 42), config)?;
        change(&model);
        mesh.parallelize(&model, &Gpt::<NullRuntime>::tensor_plan().sequence_parallel(plan.sequence_parallel))?;
        mesh.context_parallel(&model, ContextExchange::Ring)?;
        let (parts, loss) = model.split_with_loss(parts, summed())?;
        let loss = move |y: &[Var<NullRuntime>], t: &[Var<NullRuntime>]| {
            Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
        };
        let tokens = Tensor::zeros(rt, [plan.micro_batch, CONTEXT], DType::I64)?;
        Ok(PlannedModel::new(parts, loss).micro_batch(vec![tokens.clone()], vec![tokens]))
    };
    ModelCosts::measure(plan, true, make).unwrap()
}

fn measured(plan: &TrainingPlan) -> ModelCosts {
    gpt_costs(plan, gpt(), 2, |_| ())
}

#[test]
fn planner_flops_are_those_of_the_formula() {
    let (b, t, c, v) = (MICRO_BATCH as u64, CONTEXT as u64, gpt().width as u64, VOCAB as u64);
    let plan = TrainingPlan { micro_batch: MICRO_BATCH, ..TrainingPlan::default() };
    let costs = measured(&plan);
    let block = 24 * b * t * c * c + 4 * b * t * t * c;
    let forward: Vec<u64> = costs.parts.iter().map(|part| part.forward.flops).collect();
    assert_eq!(forward, [block, block + 2 * b * t * c * v]);
    for part in &costs.parts {
        let split = part.backward.input.flops + part.backward.weights.flops;
        assert_eq!(part.backward.all.flops, split, "both parts of a split pass are the whole");
        // Two products for each of forward, and the scores of attention once more.
        assert_eq!(part.backward.all.flops, 2 * part.forward.flops + 2 * b * t * t * c);
    }
    // Ranks along tensor have a part of each block.
    for tensor in [2, 4] {
        let cut = measured(&TrainingPlan { tensor, ..plan.clone() });
        assert_eq!(cut.parts[0].forward.flops, block / tensor as u64);
        let sums: u64 = cut.parts[0].forward_exchanges.iter().map(|exchange| exchange.calls).sum();
        assert_eq!(sums, 3, "one of the embedding, and two of the block");
    }
}

#[test]
fn planner_counts_tied_and_frozen_parameters_right() {
    let plan = TrainingPlan::default();
    let config = GptConfig { tied_head: true, ..gpt() };
    let one = gpt_costs(&plan, config, 1, |_| ());
    let tables = |costs: &ModelCosts| {
        let all = costs.parts.iter().flat_map(|part| &part.parameters);
        all.filter(|parameter| parameter.name.starts_with("wte")).map(|p| p.origin).collect::<Vec<_>>()
    };
    assert_eq!(tables(&one).len(), 1, "one part has one table");
    let two = tables(&gpt_costs(&plan, config, 2, |_| ()));
    assert_eq!((two.len(), two[0]), (2, two[1]), "two parts have copies of it");
    let frozen = gpt_costs(&plan, gpt(), 2, |model| {
        model.blocks.visit("", &mut Frozen);
    });
    assert!(frozen.parts[0].parameters.iter().filter(|p| p.name.starts_with("blocks")).all(|p| !p.trained));
    let work = |costs: &ModelCosts| costs.parts[1].backward.all.flops;
    assert!(work(&frozen) < work(&measured(&plan)), "frozen weights have no gradients");
}

/// Freezes parameters.
struct Frozen;

impl nn::Visitor<NullRuntime> for Frozen {
    fn parameter(&mut self, _: &str, parameter: &nn::Param<NullRuntime>) {
        parameter.set_requires_grad(false);
    }
}

/// A mixture is a stage of one value.
#[derive(nn::Module)]
pub struct Mixture<R: numcore::Runtime>(MixtureOfExperts<R>);

pub const EXPERTS: usize = 4;
pub const WIDTH: usize = 8;

impl<R: numcore::Runtime> Mixture<R> {
    /// A mixture over the ranks of a mesh, in which a token that is a unit vector picks the expert of its number.
    pub fn on(mesh: &Mesh<R>) -> Result<Self> {
        let rt = mesh.world().runtime();
        let model = Mixture(MixtureOfExperts::new(&Init::new(rt, 1), MoeConfig::new(WIDTH, 16, EXPERTS, 1))?);
        model.0.gate.weight.set(Tensor::eye(rt, WIDTH, DType::F32)?.narrow(0, 0, EXPERTS)?.contiguous()?)?;
        mesh.parallelize(&model, &TensorPlan::new().experts("0.experts"))?;
        Ok(model)
    }

    /// Tokens that pick all experts alike, `[1, tokens, WIDTH]`.
    pub fn tokens(rt: &R, tokens: usize) -> Result<Tensor<R>> {
        let one = |at: usize| if at % WIDTH == at / WIDTH % EXPERTS { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..tokens * WIDTH).map(one).collect();
        Tensor::from_slice(rt, [1, tokens, WIDTH], &values)
    }
}

impl<R: numcore::Runtime> nn::Stage<R> for Mixture<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        Ok(vec![self.0.forward(&inputs[0])?])
    }
}

/// The costs of a mixture under a plan.
pub fn mixture_costs(plan: &TrainingPlan, tokens: usize) -> ModelCosts {
    let make = |mesh: &Mesh<NullRuntime>| {
        let loss = |y: &[Var<NullRuntime>], _: &[Var<NullRuntime>]| Loss::sum(y[0].sum_all()?, 1.0);
        let x = Mixture::tokens(mesh.world().runtime(), tokens)?;
        Ok(PlannedModel::new([Mixture::on(mesh)?], loss).micro_batch(vec![x], vec![]))
    };
    ModelCosts::measure(plan, true, make).unwrap()
}

#[test]
fn planner_measures_experts_with_balanced_loads() {
    let costs = |expert: usize| {
        mixture_costs(&TrainingPlan { data: expert, expert, ..TrainingPlan::default() }, 16).parts.remove(0)
    };
    let (one, four) = (costs(1), costs(4));
    assert_eq!(one.forward.flops, four.forward.flops, "each rank computes as many rows as it has");
    let sent: u64 = four.forward_exchanges.iter().filter(|x| x.kind == "all_to_all").map(|x| x.sent).sum();
    // Rows go out and come back, but for a quarter that stays.
    assert_eq!(sent as usize, 2 * 12 * WIDTH * 4);
    let own =
        |part: &planner::PartCosts| part.parameters.iter().filter(|p| p.expert).map(|p| p.elements()).sum::<u64>();
    assert_eq!(own(&one), 0, "experts that are not shared out are parameters like others");
    assert!(own(&four) > 0);
}

#[test]
fn planner_optimizers_have_the_state_of_the_formula() {
    let adam = |dtype, main| OptimizerCosts::measure(AdamWConfig::default(), dtype, main).unwrap();
    assert_eq!(adam(DType::F32, false), OptimizerCosts { state: 8.0, update: 4.0 + 6.0 * 4.0 });
    // A master copy, and a gradient of two bytes or of four.
    assert_eq!(adam(DType::BF16, false).state, 12.0);
    assert_eq!(adam(DType::BF16, true).update - adam(DType::BF16, false).update, 2.0);
    let sgd = OptimizerCosts::measure(SgdConfig { lr: 0.1, ..SgdConfig::default() }, DType::F32, false).unwrap();
    assert_eq!(sgd, OptimizerCosts { state: 0.0, update: 12.0 });
}

#[test]
fn planner_refuses_wrong_plans_and_machines() {
    let plan = |text: &str| TrainingPlan::from_toml(text).unwrap_err().to_string();
    for (text, why) in [
        ("data = 0", "axis data is empty"),
        ("tensors = 2", "unknown field `tensors`"),
        ("zero = 4", "the stages 0 to 3"),
        ("micro_batches = 0", "`micro_batches` is 0"),
        ("schedule = \"2F2B\"", "unknown schedule"),
        ("pipe = 4\nschedule = \"ZBV\"\nmicro_batches = 8", "needs v = 2"),
        ("pipe = 2\nstages_per_rank = 2", "needs v = 1"),
        ("data = 4294967296\ntensor = 4294967296\ncontext = 4294967296", "at most 2^30"),
        ("data = 1048576\nmicro_batches = 67108864\nmicro_batch = 67108864", "at most 2^40"),
        ("data = 3\nexpert = 2", "cannot be laid over"),
        ("micro_batches = 99999999999", "at most 2^26"),
    ] {
        assert!(plan(text).contains(why), "{text}: {}", plan(text));
    }
    for name in ["V100", "a100", "H100", "H200", "H800", "B200"] {
        let machine = Machine::named(name).unwrap();
        assert_eq!(Machine::from_toml(&machine.to_toml().unwrap()).unwrap(), machine);
    }
    assert!(Machine::named("Z80").unwrap_err().to_string().contains("V100, A100"));
    let text = Machine::a100().to_toml().unwrap();
    let node = format!("bandwidth = {:.1}", Machine::a100().node.bandwidth);
    let slow = text.replace(&node, "bandwidth = 0.0");
    assert!(Machine::from_toml(&slow).unwrap_err().to_string().contains("`node.bandwidth` is 0"), "{text}");
    assert!(Machine::from_toml("name = \"x\"").unwrap_err().to_string().contains("missing field"));
    let matched = Machine::a100().matched(2.0, 4.0).unwrap();
    assert_eq!((matched.flops, matched.node), (Machine::a100().flops / 2.0, Machine::a100().node));
    for (estimated, measured) in [(0.0, 1.0), (1.0, 0.0), (-1.0, -2.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
        let refused = Machine::a100().matched(estimated, measured).unwrap_err().to_string();
        assert!(refused.contains("both must be above 0"), "{refused}");
    }
}

/// A training step refuses main gradients of what is not sharded, but for buckets.
#[test]
fn main_gradients_are_of_shards_or_of_buckets() {
    for zero in 0..4 {
        let plan = TrainingPlan { main_gradients: true, zero, ..TrainingPlan::default() };
        let comm: distributed::comm::Comm<Cpu> =
            std::sync::Arc::new(distributed::comm::NoOpCommunicator::new(&Cpu::with_threads(1)));
        let mesh = Mesh::new(&comm, plan.parallel().unwrap()).unwrap();
        let model = Gpt::new(&Init::new(comm.runtime(), 1).dtype(DType::BF16), gpt()).unwrap();
        let builder = TrainStep::builder(&mesh, &model).optimizer(AdamWConfig::default());
        let built = plan.configure(builder).unwrap().build();
        assert!(built.is_ok(), "{:?}", built.err());
    }
}
