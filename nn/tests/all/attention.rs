//! What may attend to what: the options of multi-head attention against masks that say the same, and activations with
//! parameters.

use autograd::Var;
use nn::{AttentionOptions, Forward, Init, MultiHeadAttention, PRelu};
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ReduceOps},
};
use runtime_cpu::Cpu;

const T: usize = 5;
const S: usize = 7;

fn setup() -> (MultiHeadAttention<Cpu>, Var<Cpu>, Var<Cpu>) {
    let rt = Cpu::with_threads(2);
    let attention = MultiHeadAttention::new(&Init::new(&rt, 3), 8, 2).unwrap();
    let draw = |n, seed| Var::new(Tensor::normal(&rt, [2, n, 8], DType::F32, 0.0, 1.0, seed).unwrap());
    (attention, draw(T, 1), draw(S, 2))
}

fn attend(options: AttentionOptions<'_, Cpu>) -> Vec<f64> {
    let (attention, x, memory) = setup();
    attention.attend(&x, &memory, &memory, options).unwrap().value().unwrap().to_f64s().unwrap()
}

/// Attention with a `bool` mask.
fn masked(sees: impl Fn(usize, usize) -> bool) -> Vec<f64> {
    let rt = Cpu::with_threads(1);
    let allowed: Vec<bool> = (0..T * S).map(|i| sees(i / S, i % S)).collect();
    let mask = Var::new(Tensor::from_slice(&rt, [T, S], &allowed).unwrap());
    attend(AttentionOptions { mask: Some(&mask), ..Default::default() })
}

fn close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let off = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
    assert!(off < 2e-6, "off by {off}");
}

#[test]
fn windows_and_positions_are_masks() {
    close(&attend(AttentionOptions { causal: true, ..Default::default() }), &masked(|t, s| s <= t));
    let lower_right = AttentionOptions { causal: true, lower_right: true, ..Default::default() };
    close(&attend(lower_right), &masked(|t, s| s <= t + S - T));
    let window = AttentionOptions { window: (Some(1), Some(2)), ..Default::default() };
    close(&attend(window), &masked(|t, s| t <= s + 1 && s <= t + 2));
    let both = AttentionOptions { causal: true, window: (Some(2), None), lower_right: true, ..Default::default() };
    close(&attend(both), &masked(|t, s| t + S - T <= s + 2 && s <= t + S - T));
}

#[test]
fn padding_meets_either_kind_of_mask() {
    let rt = Cpu::with_threads(1);
    let padding: Vec<bool> = (0..2 * S).map(|i| i % S > 4).collect();
    let padding = Var::new(Tensor::from_slice(&rt, [2, S], &padding).unwrap());
    let allowed: Vec<bool> = (0..T * S).map(|i| !i.is_multiple_of(3)).collect();
    let allowed = Var::new(Tensor::from_slice(&rt, [T, S], &allowed).unwrap());
    let zero = Var::new(Tensor::zeros(&rt, [T, S], DType::F32).unwrap());
    let added = zero.masked_fill(&allowed.logical_not().unwrap(), f64::NEG_INFINITY).unwrap();
    let want = masked(|t, s| s <= 4 && !(t * S + s).is_multiple_of(3));
    for mask in [&allowed, &added] {
        close(&attend(AttentionOptions { mask: Some(mask), key_padding: Some(&padding), ..Default::default() }), &want);
    }
    close(&attend(AttentionOptions { key_padding: Some(&padding), ..Default::default() }), &masked(|_, s| s <= 4));
}

/// Queries that see nothing find zeros, of which the output projection leaves its bias: 0.
#[test]
fn padding_everywhere_gives_zeros() {
    let rt = Cpu::with_threads(1);
    let padding = Var::new(Tensor::full(&rt, [2, S], DType::Bool, true).unwrap());
    let y = attend(AttentionOptions { key_padding: Some(&padding), ..Default::default() });
    assert!(y.iter().all(|&v| v == 0.0), "{y:?}");
}

#[test]
fn a_scale_and_a_soft_cap_change_scores() {
    let plain = attend(AttentionOptions::default());
    close(&attend(AttentionOptions { scale: Some(0.5), ..Default::default() }), &plain);
    close(&attend(AttentionOptions { softcap: Some(1e4), ..Default::default() }), &plain);
    let capped = attend(AttentionOptions { softcap: Some(1e-6), ..Default::default() });
    // All scores are nearly equal: every query finds the mean of the values, which it finds with a scale of 0.
    close(&capped, &attend(AttentionOptions { scale: Some(0.0), ..Default::default() }));
}

/// `prelu` of every channel: values and the gradient of its weight.
#[test]
fn prelu_learns_its_slopes() {
    let rt = Cpu::with_threads(1);
    let layer = PRelu::new(&Init::new(&rt, 1), 2).unwrap();
    let x = Var::new(Tensor::from_slice(&rt, [1, 2, 2], &[1f32, -2.0, -3.0, 4.0]).unwrap());
    let y = layer.forward(&x).unwrap();
    assert_eq!(y.value().unwrap().to_vec::<f32>().unwrap(), [1.0, -0.5, -0.75, 4.0]);
    let gradients = y.sum_all().unwrap().backward().unwrap();
    let slope = gradients.get(&layer.weight.leaf()).unwrap();
    assert_eq!(slope.to_vec::<f32>().unwrap(), [-2.0, -3.0]);
    let three = Var::new(Tensor::ones(&rt, [1, 3], DType::F32).unwrap());
    let error = layer.forward(&three).unwrap_err().to_string();
    assert!(error.contains("prelu: shapes [1, 3], [2]: 3 channels, not 2"), "{error}");
}
