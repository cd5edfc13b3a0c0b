//! 8-bit AdamW: bitsandbytes' maps, codes and updates.

use numcore::DType;
use optim::*;
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::common::{close, leaves, numbers, train};

fn reference() -> Value {
    serde_json::from_str(include_str!("../data/authors.json")).unwrap()
}

fn list(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn maps_are_bitsandbytes() {
    for (name, signed) in [("signed", true), ("unsigned", false)] {
        let want: Vec<f32> = list(&reference()["dynamic_map"][name]).iter().map(|x| *x as f32).collect();
        assert_eq!(dynamic_map(signed), want, "{name}");
    }
}

/// A large parameter, the last block of which is short, and a small one, which has moments of 32 bits.
#[test]
fn codes_and_updates_are_bitsandbytes() {
    let (case, cpu) = (&reference()["adamw_8bit"], Cpu::new());
    let params = leaves(&cpu, &[&[64, 70], &[30]], DType::F32);
    let config = AdamW8bitConfig { lr: 0.01, weight_decay: 0.1, ..Default::default() };
    let mut optimizer = AdamW8bit::over(config, &params).unwrap();
    train(&mut optimizer, &params, 0..12);
    let state = optimizer.state_dict().unwrap();
    let of = |name: &str| state.iter().find(|(n, _)| n == name).unwrap().1.to_f64s().unwrap();
    for (name, theirs) in [("exp_avg", "state1"), ("exp_avg_sq", "state2")] {
        let (got, want) = (of(&format!("{name}_codes.p0")), list(&case[theirs]));
        // The rounding of a product may bring a value over the middle of two codes.
        let off: Vec<f64> = want.iter().zip(got.iter().step_by(7)).map(|(a, b)| (a - b).abs()).collect();
        assert!(
            off.iter().filter(|d| **d > 0.0).count() <= 2 && off.iter().all(|d| *d <= 1.0),
            "{name}: {:?}",
            off.iter().filter(|d| **d > 0.0).count()
        );
        let largest = theirs.replace("state", "absmax");
        close(&of(&format!("{name}_absmax.p0")), &list(&case[&*largest]), 1e-6, name);
    }
    assert_eq!(
        state.iter().filter(|(_, t)| t.dtype() == DType::U8).map(|(_, t)| t.shape().numel()).sum::<usize>(),
        2 * 18 * 256
    );
    let sampled: Vec<f64> = numbers(&params)[0].iter().copied().step_by(7).collect();
    close(&sampled, &list(&case["large"]), 1e-5, "the large one");
    close(&numbers(&params)[1], &list(&case["small"]), 1e-5, "the small one");
}

/// A block without gradients keeps moments of 0, and the parameter its values.
#[test]
fn a_block_of_zeros_is_exact() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[4096]], DType::F32);
    let before = numbers(&params);
    let config = AdamW8bitConfig { weight_decay: 0.0, ..Default::default() };
    let mut optimizer = AdamW8bit::over(config, &params).unwrap();
    let mut gradients = optimizer.alloc_gradients().unwrap();
    for _ in 0..3 {
        gradients.zero();
        let mut g = vec![0f32; 4096];
        g[300] = 1.0;
        gradients.set(&params[0], &numcore::Tensor::from_slice(&cpu, [4096], &g).unwrap()).unwrap();
        optimizer.step_from(&gradients).unwrap();
    }
    let changed: Vec<usize> = (0..4096).filter(|&i| numbers(&params)[0][i] != before[0][i]).collect();
    assert_eq!(changed, [300]);
}
