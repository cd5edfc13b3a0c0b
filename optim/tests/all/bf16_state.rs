//! States of 16 bits: rounded to a neighbor, right on average, with draws that depend on neither place nor neighbors.

use autograd::Leaf;
use numcore::{DType, Result, Tensor, ops::PointwiseOps};
use optim::{
    AdamConfig, AdamWConfig, Bf16State, FlatOptimizer, Optimizer, OptimizerCore, RmsPropConfig,
    ScheduleFreeAdamWConfig, StateSpec, UpdateRule,
};
use runtime_cpu::Cpu;

use crate::common::{leaves, numbers, train};

/// The states `exp_avg` of each of so many steps, where they are the gradient, rounded.
fn rounded(dtype: DType, gradient: &[f64], steps: usize) -> Result<Vec<Vec<f64>>> {
    let rt = Cpu::with_threads(1);
    let leaf = Leaf::new("x", Tensor::zeros(&rt, [gradient.len()], dtype)?)?;
    let rule = Bf16State(AdamConfig { lr: 0.0, betas: [0.0, 0.9], ..Default::default() });
    let mut optimizer = FlatOptimizer::over(rule, [&leaf])?;
    let mut gradients = optimizer.alloc_gradients()?;
    let one = |_| {
        gradients.zero();
        gradients.set(&leaf, &Tensor::from_slice(&rt, [gradient.len()], gradient)?.to_dtype(dtype)?)?;
        optimizer.step_from(&gradients)?;
        let state = optimizer.state_dict()?;
        let (_, first) = state.iter().find(|(name, _)| name == "exp_avg.x").expect("the first moment");
        assert_eq!(first.dtype(), DType::BF16);
        first.to_f64s()
    };
    (0..steps).map(one).collect()
}

/// The values of bfloat16 next to `x`, below and above; `x` twice if it is one.
fn neighbors(x: f64) -> [f64; 2] {
    let cut = f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000));
    let toward_zero = if cut.abs() > x.abs() { f32::from_bits((cut as f32).to_bits() - 0x1_0000).into() } else { cut };
    if toward_zero == x {
        return [x, x];
    }
    let away = f64::from(f32::from_bits((toward_zero as f32).to_bits() + 0x1_0000));
    [toward_zero.min(away), toward_zero.max(away)]
}

/// Different values of both signs over eight binades, none a power of two.
fn spread(n: usize) -> Vec<f64> {
    let one = |i: usize| {
        let fraction = (i as f64 * 0.618_033_988_749_895).fract();
        f64::from((1.0 + fraction) as f32) * f64::from(1 << (i % 8)) * if i.is_multiple_of(3) { -1.0 } else { 1.0 }
    };
    (1..=n).map(one).collect()
}

#[test]
fn rounding_is_right_on_average_and_independent() -> Result<()> {
    let (n, steps) = (2000, 96);
    let values = spread(n);
    for dtype in [DType::F32, DType::F64] {
        let all = rounded(dtype, &values, steps)?;
        // Errors in steps of bfloat16, and their expected squares.
        let (mut of_element, mut of_step, mut squares) = (vec![0.0; n], vec![0.0; steps], vec![0.0; n]);
        for (s, states) in all.iter().enumerate() {
            for (i, (&state, &x)) in states.iter().zip(&values).enumerate() {
                let [below, above] = neighbors(x);
                assert!(state == below || state == above, "{x} became {state}, not {below} or {above}");
                let (error, up) = ((state - x) / (above - below), (x - below) / (above - below));
                of_element[i] += error;
                of_step[s] += error;
                squares[i] = up * (1.0 - up);
            }
        }
        let expected: f64 = squares.iter().sum();
        let total = of_step.iter().sum::<f64>() / (expected * steps as f64).sqrt();
        assert!(total.abs() < 4.0, "{dtype}: the mean error is {total:.1} standard errors");
        // Sums over steps and over elements have the spread of independent draws.
        let near = |what: &str, sum: f64, count: usize| {
            let off = (sum - count as f64) / (2.0 * count as f64).sqrt();
            assert!(off.abs() < 4.0, "{dtype}: sums over {what} are {off:.1} standard errors off");
        };
        let scaled = of_element.iter().zip(&squares).map(|(e, s)| e * e / (s * steps as f64));
        near("steps", scaled.sum(), n);
        near("elements", of_step.iter().map(|e| e * e / expected).sum(), steps);
    }
    Ok(())
}

#[test]
fn values_of_bfloat16_and_the_ends_of_its_range_are_kept() -> Result<()> {
    let largest = f64::from(f32::from_bits(0x7f7f_0000));
    let kept = [0.0, 1.0, -1.5, 255.0, 2f64.powi(-100), largest, -largest];
    for states in rounded(DType::F32, &kept, 20)? {
        assert_eq!(states.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), kept.map(f64::to_bits));
    }
    let infinities = [f64::INFINITY, f64::NEG_INFINITY];
    assert_eq!(rounded(DType::F32, &infinities, 1)?, [infinities]);
    // The nearest value of this one is infinity.
    assert_eq!(rounded(DType::F32, &[f64::from(f32::MAX)], 1)?, [[f64::INFINITY]]);
    for states in rounded(DType::F32, &[f64::NAN, 1.0 - 2f64.powi(-12), 2f64.powi(-140)], 50)? {
        assert!(states[0].is_nan(), "{states:?}");
        assert!(states[1] == 1.0 || states[1] == 1.0 - 2f64.powi(-8), "{states:?}");
        assert!(states[2].abs() <= 2f64.powi(-133), "{states:?}");
    }
    Ok(())
}

/// Squares of a gradient that grows: the mean follows, where rounding to the nearest would stop it.
#[test]
fn a_slow_mean_follows_its_gradient() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let leaf = Leaf::new("x", Tensor::zeros(&rt, [256], DType::F32)?)?;
    let mut optimizer = FlatOptimizer::over(Bf16State(AdamWConfig::default()), [&leaf])?;
    let mut gradients = optimizer.alloc_gradients()?;
    let scales: Vec<f64> = (0..256).map(|i| 1.0 + f64::from(i) / 300.0).collect();
    for _ in 0..1000 {
        gradients.zero();
        gradients.set(&leaf, &Tensor::from_slice(&rt, [256], &scales)?.to_dtype(DType::F32)?)?;
        optimizer.step_from(&gradients)?;
    }
    let state = optimizer.state_dict()?;
    let (_, second) = state.iter().find(|(name, _)| name == "exp_avg_sq.x").expect("the second moment");
    let want = 1.0 - 0.999f64.powi(1000);
    let ratios: Vec<f64> = second.to_f64s()?.iter().zip(&scales).map(|(v, g)| v / (g * g * want)).collect();
    let mean = ratios.iter().sum::<f64>() / 256.0;
    assert!((mean - 1.0).abs() < 0.005, "the mean ratio is {mean}");
    Ok(())
}

/// Differences of states are of exact ones: nearly constant gradients have a small spread.
#[test]
fn states_that_are_subtracted_keep_their_dtype() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let rule = RmsPropConfig { centered: true, momentum: 0.5, ..Default::default() };
    let dtypes = |rule: &dyn Fn() -> Vec<StateSpec>| rule().iter().map(|s| s.dtype).collect::<Vec<_>>();
    assert_eq!(dtypes(&|| UpdateRule::tensors(&Bf16State(rule.clone()))), [None; 3]);
    let half = Some(DType::BF16);
    let schedule_free = Bf16State(ScheduleFreeAdamWConfig::default());
    assert_eq!(dtypes(&|| UpdateRule::tensors(&schedule_free)), [None, half]);
    // The same bits as without, where no state is rounded.
    let trained = |params: &[_], optimizer: &mut dyn Optimizer<Cpu>| {
        train(optimizer, params, 0..4);
        numbers(params)
    };
    let [a, b] = [0, 1].map(|_| leaves(&rt, &[&[33]], DType::F32));
    let mut plain = FlatOptimizer::over(rule.clone(), &a)?;
    let mut wrapped = FlatOptimizer::over(Bf16State(rule), &b)?;
    assert_eq!(trained(&a, &mut plain), trained(&b, &mut wrapped));
    Ok(())
}

/// The same bits, wherever a parameter lies and whatever lies beside it.
#[test]
fn draws_do_not_depend_on_places() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let trained = |order: [usize; 3]| -> Result<Vec<Vec<f64>>> {
        let params = leaves(&rt, &[&[33], &[7, 5], &[2]], DType::BF16);
        let rule = Bf16State(AdamWConfig { lr: 0.01, ..Default::default() });
        let mut optimizer = FlatOptimizer::over(rule, order.map(|i| &params[i]))?;
        train(&mut optimizer, &params, 0..6);
        Ok(numbers(&params))
    };
    assert_eq!(trained([0, 1, 2])?, trained([2, 0, 1])?);
    let bytes = |states: Vec<StateSpec>| states.iter().map(|s| s.dtype.map_or(4, DType::size)).sum::<usize>();
    assert_eq!(bytes(UpdateRule::tensors(&Bf16State(AdamWConfig::default()))), 4);
    Ok(())
}
