//! Updates whose numbers are in memory: the bits of those that get them with each launch.

use numcore::{DType, Result};
use optim::{
    AdadeltaConfig, AdagradConfig, AdamConfig, AdamWConfig, AdamaxConfig, AdanConfig, Bf16State, Cosine, Elementwise,
    FlatOptimizer, LionConfig, NAdamConfig, Optimizer, OptimizerCore, RAdamConfig, RmsPropConfig,
    ScheduleFreeAdamWConfig, ScheduleFreeSgdConfig, SgdConfig,
};
use runtime_cpu::Cpu;

use crate::common::{bytes, copies, fill, leaves};

/// What eight updates of two groups leave, with a schedule, a factor on the gradients and parameters that sometimes have none.
fn trained<E: Elementwise>(config: E, dtype: DType, capturable: bool) -> Result<Vec<(String, Vec<u8>)>> {
    let rt = Cpu::with_threads(1);
    let params = leaves(&rt, &[&[3, 5], &[7], &[2, 2]], dtype);
    let optimizer =
        FlatOptimizer::in_groups(config).group(&params[..2], |_| {})?.group(&params[2..], |c| c.set_lr(0.03))?;
    let mut optimizer = optimizer.scheduled(Cosine { t_max: 8, eta_min: 1e-4 });
    if capturable {
        optimizer = optimizer.capturable();
    }
    let mut gradients = optimizer.alloc_gradients()?;
    for k in 0..8 {
        // Counts of updates differ from one parameter to the next.
        fill(&mut gradients, &params[usize::from(k == 2)..], k);
        if k % 2 == 1 {
            gradients.multiply(0.37)?;
        }
        optimizer.step_from(&gradients)?;
    }
    Ok(bytes(&copies(optimizer.state_dict()?))
        .into_iter()
        .chain(params.iter().map(|p| (p.name().to_string(), p.value().unwrap().to_bytes().unwrap())))
        .collect())
}

fn same_bits<E: Elementwise>(config: E) -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let plain = trained(config.clone(), dtype, false)?;
        assert_eq!(trained(config.clone(), dtype, true)?, plain, "{} {dtype}", E::NAME);
    }
    Ok(())
}

#[test]
fn numbers_in_memory_give_the_same_bits() -> Result<()> {
    same_bits(SgdConfig { lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.1, ..Default::default() })?;
    same_bits(AdamConfig { weight_decay: 0.1, ..Default::default() })?;
    same_bits(AdamWConfig { amsgrad: true, ..Default::default() })?;
    same_bits(AdamaxConfig::default())?;
    same_bits(NAdamConfig::default())?;
    same_bits(RAdamConfig::default())?;
    same_bits(AdagradConfig { lr_decay: 0.1, ..Default::default() })?;
    same_bits(RmsPropConfig { momentum: 0.5, centered: true, ..Default::default() })?;
    same_bits(AdadeltaConfig::default())?;
    same_bits(LionConfig::default())?;
    same_bits(ScheduleFreeAdamWConfig { warmup_steps: 3, ..Default::default() })?;
    same_bits(ScheduleFreeSgdConfig::default())?;
    same_bits(Bf16State(AdamConfig { weight_decay: 0.1, ..Default::default() }))?;
    same_bits(AdanConfig { weight_decay: 0.1, ..Default::default() })
}

/// Nothing was captured on a runtime that captures nothing.
#[test]
fn what_was_not_captured_cannot_advance() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let params = leaves(&rt, &[&[3]], DType::F32);
    let mut optimizer = FlatOptimizer::over(AdamWConfig::default(), &params)?.capturable();
    let mut gradients = optimizer.alloc_gradients()?;
    fill(&mut gradients, &params, 1);
    optimizer.step_from(&gradients)?;
    let error = optimizer.advance().unwrap_err().to_string();
    assert!(error.contains("AdamW") && error.contains("`capturable()`"), "{error}");
    assert_eq!(optimizer.steps(), 1);
    Ok(())
}
