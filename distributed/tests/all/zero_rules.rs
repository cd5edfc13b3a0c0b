//! ZeRO with every elementwise rule, and with parameters in half: shards are updated as the whole would be.

use optim::{AdadeltaConfig, AdamConfig, AdamaxConfig, NAdamConfig, RAdamConfig, RmsPropConfig};

use crate::{prelude::*, zero_stages::options};

/// With norms of the gradients, though they are not clipped.
fn config() -> TrainingConfig {
    TrainingConfig { max_norm: Some(1e9), ..Default::default() }
}

fn alone<E: Elementwise>(dtype: DType, rule: &E) -> Trace
where
    FlatOptimizer<Cpu, E>: Optimizer<Cpu>,
{
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0).dtype(dtype)).unwrap();
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

fn sharded<E: Elementwise>(n: usize, stage: ZeroStage, dtype: DType, rule: &E) -> Trace {
    everywhere(n, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), comm.rank() as u64).dtype(dtype))?;
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

fn parity<E: Elementwise + std::fmt::Debug>(rule: &E) -> Result<()>
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
fn every_elementwise_rule_trains_as_on_one_rank() -> Result<()> {
    parity(&SgdConfig { lr: 0.01, momentum: 0.9, nesterov: true, weight_decay: 0.1, ..Default::default() })?;
    parity(&AdamConfig { amsgrad: true, ..Default::default() })?;
    parity(&AdamWConfig::default())?;
    parity(&AdamaxConfig::default())?;
    parity(&RmsPropConfig { momentum: 0.9, centered: true, ..Default::default() })?;
    parity(&AdagradConfig::default())?;
    parity(&AdadeltaConfig::default())?;
    parity(&RAdamConfig::default())?;
    parity(&NAdamConfig::default())?;
    parity(&LionConfig::default())
}

#[test]
fn halves_with_a_master_copy_train_as_on_one_rank() {
    let adamw = AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
    let (alone_adamw, lr) = (alone(DType::BF16, &adamw).weights, 0.05 / EXAMPLES as f64);
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
