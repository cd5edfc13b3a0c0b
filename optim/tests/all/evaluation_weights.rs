//! Averages that an optimizer keeps itself, put in place of its parameters.

use autograd::Leaf;
use numcore::{DType, Tensor};
use optim::*;
use runtime_cpu::Cpu;

use crate::common::{fill, leaves, numbers, train};

#[test]
fn they_are_of_updated_parameters_of_any_optimizer() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let params = leaves(&Cpu::new(), &[&[5, 3], &[7], &[2, 2]], dtype);
        let free = ScheduleFreeSgd::over(ScheduleFreeSgdConfig::default(), &params[..2]).unwrap();
        let adamw = AdamW::over(AdamWConfig::default(), &params[2..]).unwrap();
        let mut both = Combined::new(vec![Box::new(free), Box::new(adamw)]).unwrap();
        for k in 0..3 {
            let mut gradients = both.alloc_gradients().unwrap();
            fill(&mut gradients, &[params[0].clone(), params[2].clone()], k);
            both.step_from(&gradients).unwrap();
        }
        let own = numbers(&params);
        let state = both.state_dict().unwrap();
        let average = state.iter().find(|(name, _)| name == "0.average.p0").unwrap().1.to_f64s().unwrap();
        drop(state);
        let seen = EvaluationWeights::of(&both).unwrap().during(|| Ok(numbers(&params))).unwrap();
        let digits = if dtype == DType::BF16 { 2f64.powi(-8) } else { 0.0 };
        assert!(seen[0].iter().zip(&average).all(|(a, b)| (a - b).abs() <= digits * b.abs()), "{seen:?} {average:?}");
        assert!(seen[0].iter().zip(&own[0]).any(|(a, b)| (a - b).abs() > 0.01), "the average is not the weight");
        // A parameter without an update has no average yet, and one of AdamW never.
        assert_eq!(seen[1..], own[1..]);
        assert_eq!(numbers(&params), own);

        let held = EvaluationWeights::of(&both).unwrap().exchange().unwrap();
        let mut gradients = both.alloc_gradients().unwrap();
        fill(&mut gradients, &params, 9);
        assert!(both.step_from(&gradients).is_err(), "the averages are in the parameters");
        drop(held.exchange().unwrap());
        both.step_from(&gradients).unwrap();
    }
}

#[test]
fn an_optimizer_without_averages_is_an_error() {
    let params = leaves(&Cpu::new(), &[&[3]], DType::F32);
    let adamw = AdamW::over(AdamWConfig::default(), &params).unwrap();
    let error = EvaluationWeights::of(&adamw).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("schedule-free"), "{error}");
}

/// Of a quadratic with noise the average comes closer to the minimum than the trained weights, without a schedule.
#[test]
fn the_average_is_better_than_the_weights() {
    let rt = Cpu::new();
    let x = Leaf::new("x", Tensor::from_slice(&rt, [1], &[4.0f64]).unwrap()).unwrap();
    let params = [x.clone()];
    let config = ScheduleFreeSgdConfig { lr: 0.5, warmup_steps: 10, ..Default::default() };
    let mut free = ScheduleFreeSgd::over(config, &params).unwrap();
    let mut gradients = free.alloc_gradients().unwrap();
    let (mut of_weights, mut of_averages) = (0.0, 0.0);
    for k in 0..2000usize {
        let noise = crate::common::values(1, k)[0];
        let g = x.value().unwrap().to_f64s().unwrap()[0] + noise;
        gradients.zero();
        gradients.set(&x, &Tensor::from_slice(&rt, [1], &[g]).unwrap()).unwrap();
        free.step_from(&gradients).unwrap();
        if k >= 1000 {
            of_weights += numbers(&params)[0][0].powi(2);
            let averages = EvaluationWeights::of(&free).unwrap();
            of_averages += averages.during(|| Ok(numbers(&params)[0][0].powi(2))).unwrap();
        }
    }
    assert!(of_averages * 10.0 < of_weights, "{of_averages} {of_weights}");
    train(&mut free, &params, 0..1);
}
