//! ZeRO with every rule, and with parameters in half: shards are updated as the whole would be.

use std::sync::LazyLock;

use numcore::pointwise::Program;
use optim::{
    AdadeltaConfig, AdamConfig, AdamW8bitConfig, AdamaxConfig, Bf16State, NAdamConfig, Programs, RAdamConfig,
    RmsPropConfig, ScheduleFreeAdamWConfig, ScheduleFreeSgdConfig, ShampooConfig, SoapConfig, StateSpec, StepContext,
    UpdateMemory, norms::sum_of_squares,
};

use crate::{prelude::*, zero_stages::options};

/// With norms of the gradients, though they are not clipped.
fn config() -> TrainingConfig {
    TrainingConfig { max_norm: Some(1e9), ..Default::default() }
}

/// A model with a matrix of more than 4096 elements.
#[derive(Module)]
#[module(crate = "::nn")]
struct Broad<R: Runtime> {
    a: Linear<R>,
    b: Linear<R>,
}

impl Task for Broad<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        Ok(Broad { a: Linear::new(init, 5, 830)?, b: Linear::new(init, 830, 3)? })
    }

    fn loss(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
        let (x, y) = Mlp::new(&Init::new(rt, 0).dtype(self.a.weight.dtype()))?.batch(rt, step, examples)?;
        let out = self.b.forward(&self.a.forward(&x)?.tanh()?)?;
        Loss::sum(nn::loss::mse(&out, &y, Reduction::Sum)?, (3 * examples.len()) as f64)
    }
}

/// A model of square matrices: their gradients have full rank, so that SOAP's bases are unique from the first one on.
#[derive(Module)]
#[module(crate = "::nn")]
struct Squares<R: Runtime> {
    a: Linear<R>,
    b: Linear<R>,
}

impl Task for Squares<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        Ok(Squares { a: Linear::new(init, 5, 5)?, b: Linear::new(init, 5, 5)? })
    }

    fn loss(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
        let (x, _) = Mlp::new(&Init::new(rt, 0).dtype(self.a.weight.dtype()))?.batch(rt, step, examples)?;
        let out = self.b.forward(&self.a.forward(&x)?.tanh()?)?;
        Loss::sum(nn::loss::mse(&out, &x.square()?, Reduction::Sum)?, (5 * examples.len()) as f64)
    }
}

fn alone<E: UpdateRule>(dtype: DType, rule: &E) -> Trace
where
    FlatOptimizer<Cpu, E>: Optimizer<Cpu>,
{
    alone_with::<Mlp<Cpu>, E>(dtype, rule)
}

fn alone_with<M: Task, E: UpdateRule>(dtype: DType, rule: &E) -> Trace
where
    FlatOptimizer<Cpu, E>: Optimizer<Cpu>,
{
    let rt = Cpu::with_threads(1);
    let model = M::new(&Init::new(&rt, 0).dtype(dtype)).unwrap();
    let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
    let optimizer = FlatOptimizer::in_groups(rule.clone()).group(leaves, |_| {}).unwrap();
    let alone: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&rt));
    let mut trainer = TrainStep::builder(&alone, &model).optimizer(optimizer).config(config()).build().unwrap();
    let (all, mut trace): (Vec<usize>, _) = ((0..EXAMPLES).collect(), Trace::default());
    for step in 0..STEPS {
        let metrics = trainer.step(|_| model.loss(&rt, step, &all)).unwrap();
        trace.norms.extend(metrics.grad_norm().unwrap());
        trace.weights.push(weights(&model).unwrap());
    }
    trace
}

fn sharded<E: UpdateRule>(n: usize, stage: ZeroStage, dtype: DType, rule: &E) -> Trace {
    sharded_with::<Mlp<Cpu>, E>(n, stage, dtype, rule)
}

fn sharded_with<M: Task, E: UpdateRule>(n: usize, stage: ZeroStage, dtype: DType, rule: &E) -> Trace {
    everywhere(n, |comm| {
        let model = M::new(&Init::new(comm.runtime(), comm.rank() as u64).dtype(dtype))?;
        let (groups, options) = (ParamGroups::new(rule.clone()), options(stage, UnitOf::children()));
        let mut trainer = TrainStep::builder(&comm, &model).optimizer(groups).config(config()).zero(options).build()?;
        let mut trace = Trace::default();
        for step in 0..STEPS {
            let metrics = trainer.step(|_| model.loss(comm.runtime(), step, &own(&comm)))?;
            trace.norms.extend(metrics.grad_norm()?);
            let _scope = trainer.gather_full_params()?;
            trace.weights.push(weights(&model)?);
        }
        Ok(trace)
    })
}

optim::config! {
    /// A rule that writes each parameter three times, and reads it between.
    StepsDecayed = "decayed SGD" {
        /// The learning rate.
        lr: f64 = 1e-2, NonNegative;
    }
}

impl UpdateRule for StepsDecayed {
    type Kernel = Programs;

    fn tensors(&self) -> Vec<StateSpec> {
        SgdConfig::default().states()
    }

    fn kernel(&self, half: Option<DType>) -> Result<Programs> {
        SgdConfig::default().kernel(half)
    }

    fn update<R: Runtime>(&self, kernel: &Programs, now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        static DECAY: LazyLock<Program> = LazyLock::new(|| {
            Program::new("decay_by_norm", |[p, squares], []| [p - p * squares / (squares + 1.0) * 0.1])
        });
        SgdConfig::default().update(kernel, now, memory)?;
        for _ in 0..2 {
            let squares = sum_of_squares(&memory.weight()?)?;
            memory.update_weight(&DECAY, &[&squares], &[])?;
        }
        Ok(())
    }
}

fn parity<E: UpdateRule + std::fmt::Debug>(rule: &E) -> Result<()>
where
    FlatOptimizer<Cpu, E>: Optimizer<Cpu>,
{
    let one = alone(DType::F64, rule);
    for stage in ZeroStage::ALL {
        let off = difference(&sharded(3, stage, DType::F64, rule), &one);
        assert!(off <= 1e-11, "{rule:?}, stage {}: {off:e}", stage.number());
    }
    Ok(())
}

#[test]
fn blocks_of_eight_bits_do_not_depend_on_ranks() -> Result<()> {
    let rule = AdamW8bitConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
    let one = alone_with::<Broad<Cpu>, _>(DType::F64, &rule);
    for stage in ZeroStage::ALL {
        for n in 1..=4 {
            let off = difference(&sharded_with::<Broad<Cpu>, _>(n, stage, DType::F64, &rule), &one);
            assert!(off <= 1e-11, "stage {} on {n}: {off:e}", stage.number());
        }
    }
    Ok(())
}

/// States of one name, of two dtypes: weights and biases share units, and shards begin within them.
#[test]
fn rules_with_states_of_other_dtypes_share_shards() {
    let trained = |n: usize, stage: Option<ZeroStage>| {
        everywhere(n, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let rule = AdamWConfig { lr: 1e-2, ..Default::default() };
            let of_biases = ParamGroups::new(rule.clone());
            let groups = ParamGroups::new(Bf16State(rule)).others(|name, _| name.contains("bias"), of_biases);
            let builder = TrainStep::builder(&comm, &model).optimizer(groups).config(config());
            let mut trainer = match stage {
                Some(stage) => builder.zero(options(stage, UnitOf::children())).build()?,
                None => builder.build()?,
            };
            let mut trace = Trace::default();
            for step in 0..STEPS {
                let metrics = trainer.step(|_| model.loss(comm.runtime(), step, &own(&comm)))?;
                trace.norms.extend(metrics.grad_norm()?);
                let _scope = trainer.gather_full_params()?;
                trace.weights.push(weights(&model)?);
            }
            Ok(trace)
        })
    };
    let one = trained(1, None);
    for stage in ZeroStage::ALL {
        let off = difference(&trained(3, Some(stage)), &one);
        assert!(off <= 1e-11, "stage {}: {off:e}", stage.number());
    }
}

#[test]
fn bases_of_soap_do_not_depend_on_ranks() -> Result<()> {
    let rule = SoapConfig { lr: 1e-2, weight_decay: 0.1, precondition_frequency: 2, ..Default::default() };
    let one = alone_with::<Squares<Cpu>, _>(DType::F64, &rule);
    for stage in ZeroStage::ALL {
        for n in 1..=4 {
            let off = difference(&sharded_with::<Squares<Cpu>, _>(n, stage, DType::F64, &rule), &one);
            assert!(off <= 1e-9, "stage {} on {n}: {off:e}", stage.number());
        }
    }
    Ok(())
}

#[test]
fn every_rule_trains_as_on_one_rank() -> Result<()> {
    parity(&SgdConfig { lr: 0.01, momentum: 0.9, nesterov: true, weight_decay: 0.1, ..Default::default() })?;
    parity(&AdamConfig { amsgrad: true, ..Default::default() })?;
    parity(&AdamWConfig::default())?;
    parity(&Bf16State(AdamWConfig { lr: 1e-2, ..Default::default() }))?;
    parity(&AdamaxConfig::default())?;
    parity(&RmsPropConfig { momentum: 0.9, centered: true, ..Default::default() })?;
    parity(&AdagradConfig::default())?;
    parity(&AdadeltaConfig::default())?;
    parity(&RAdamConfig::default())?;
    parity(&NAdamConfig::default())?;
    parity(&LionConfig::default())?;
    parity(&AdanConfig::default())?;
    parity(&ScheduleFreeAdamWConfig { warmup_steps: 3, ..Default::default() })?;
    parity(&ScheduleFreeSgdConfig { lr: 0.01, weight_decay: 0.1, ..Default::default() })?;
    parity(&ProdigyConfig { d0: 1e-3, weight_decay: 0.1, ..Default::default() })?;
    parity(&LbfgsConfig { history_size: 3, ..Default::default() })?;
    parity(&StepsDecayed::default())?;
    parity(&ShampooConfig { momentum: 0.9, precondition_frequency: 2, ..Default::default() })?;
    parity(&LambConfig { maximize: true, ..Default::default() })?;
    parity(&AdafactorConfig { eps1: Some(1e-4), weight_decay: 0.1, ..Default::default() })
}

/// The rule searches along directions, and losses decide.
#[test]
fn a_training_step_gives_its_rule_the_mean_loss() -> Result<()> {
    let (rt, rule) = (Cpu::with_threads(1), LbfgsConfig { lr: 20.0, history_size: 2, ..Default::default() });
    let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64))?;
    let mut by_hand = FlatOptimizer::new(&model, rule.clone())?;
    let all: Vec<usize> = (0..EXAMPLES).collect();
    let (steps, mut trace) = (alone(DType::F64, &rule), Trace::default());
    for step in 0..STEPS {
        let (x, y) = model.batch(&rt, step, &all)?;
        by_hand.backward(&nn::loss::mse(&model.forward(&x)?, &y, Reduction::Mean)?)?;
        by_hand.step()?;
        trace.weights.push(weights(&model)?);
    }
    let off = difference(&Trace { norms: Vec::new(), ..steps }, &trace);
    assert!(off <= 1e-9, "{off:e}");
    Ok(())
}

#[test]
fn halves_with_a_master_copy_train_as_on_one_rank() {
    let adamw = AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
    let (alone_adamw, lr) = (alone(DType::BF16, &adamw).weights, 0.05 / EXAMPLES as f64);
    let lamb = LambConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
    let decayed = StepsDecayed::default();
    let [alone_lamb, alone_decayed] = [alone(DType::BF16, &lamb).weights, alone(DType::BF16, &decayed).weights];
    let sgd = SgdConfig { lr, ..Default::default() };
    let one = alone(DType::BF16, &sgd);
    let most = |values: &[f64]| values.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
    // A weight is rounded to 2⁻⁹ of itself on either side. A gradient is one of n sums, each rounded so, which are added with another
    // rounding each; a gradient is at most as large as the norm.
    let bound = |n: usize| {
        let rounded = (n + 1) as f64 * (-8.0_f64).exp2();
        2.0 * (-9.0_f64).exp2() * most(&one.weights[STEPS - 1]) + lr * STEPS as f64 * rounded * most(&one.norms)
    };
    for stage in ZeroStage::ALL {
        assert!(sharded(1, stage, DType::BF16, &adamw).weights == alone_adamw, "stage {}", stage.number());
        assert!(sharded(1, stage, DType::BF16, &lamb).weights == alone_lamb, "stage {}", stage.number());
        assert!(sharded(1, stage, DType::BF16, &decayed).weights == alone_decayed, "stage {}", stage.number());
        let whole = sharded(1, stage, DType::BF16, &sgd);
        assert!(whole.weights == one.weights, "stage {}", stage.number());
        // Norms are sums of squares, which the two add up in different orders.
        assert!(whole.norms.iter().zip(&one.norms).all(|(a, b)| (a - b).abs() <= 1e-6 * b), "stage {}", stage.number());
        for n in [3, 4] {
            let many = sharded(n, stage, DType::BF16, &sgd);
            for (got, want) in many.weights.iter().zip(&one.weights) {
                let off = got.iter().zip(want).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
                assert!(off <= bound(n), "stage {} on {n}: {off:e}, bound {:e}", stage.number(), bound(n));
            }
        }
    }
}

#[test]
fn groups_may_keep_different_state() {
    let groups = ParamGroups::new(SgdConfig { lr: 1e-2, ..Default::default() });
    let groups = groups.group(|name, _| name.starts_with('b'), |config| config.momentum = 0.9);
    let train = |n: usize, stage: ZeroStage, dtype: DType| {
        everywhere(n, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
            let options = ZeroOptions { units: UnitOf::whole(), ..stage.into() };
            let mut step = TrainStep::builder(&comm, &model).optimizer(groups.clone()).zero(options).build()?;
            (0..STEPS).try_for_each(|k| step.step(|_| model.loss(comm.runtime(), k, &own(&comm))).map(drop))?;
            let _scope = step.gather_full_params()?;
            Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
        })
    };
    for stage in ZeroStage::ALL {
        let off = difference(&train(3, stage, DType::F64), &train(1, ZeroStage::None, DType::F64));
        assert!(off <= CLOSE, "stage {}: {off:e}", stage.number());
        assert!(train(1, stage, DType::BF16).weights == train(1, ZeroStage::None, DType::BF16).weights);
    }
}
