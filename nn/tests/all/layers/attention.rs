//! Attention: masks, causality, groups of queries, rotary positions.

use autograd::Var;
use nn::*;
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ViewOps, cat},
};
use runtime_cpu::Cpu;

use super::{init, message, same, uniform};
use crate::common::{V, cpu, f64s};

/// Hidden keys and absent ones give the same, however they are hidden.
#[test]
fn masks_hide_keys() {
    let attention = MultiHeadAttention::new(&init(), 8, 2).unwrap();
    let x = uniform(&[2, 5, 8], 1);
    let hidden = Var::new(Tensor::from_slice(&cpu(), [2, 5], &[false, false, false, true, true].repeat(2)).unwrap());
    let padded = AttentionOptions { key_padding: Some(&hidden), ..Default::default() };
    let kept = x.narrow(1, 0, 3).unwrap();
    let short = attention.attend(&x, &kept, &kept, AttentionOptions::default()).unwrap();
    same(&attention.attend_self(&x, padded).unwrap(), &short);
    let zero = Var::new(Tensor::zeros(&cpu(), [2, 1, 1, 5], DType::F32).unwrap());
    let both = AttentionOptions { mask: Some(&zero), key_padding: Some(&hidden), ..Default::default() };
    same(&attention.attend(&x, &x, &x, both).unwrap(), &short);
    let mask = zero.masked_fill(&hidden.reshape([2, 1, 1, 5]).unwrap(), f64::NEG_INFINITY).unwrap();
    let added = AttentionOptions { mask: Some(&mask), ..Default::default() };
    same(&attention.attend_self(&x, added).unwrap(), &short);
}

#[test]
fn causal_attention_sees_no_future() {
    let block =
        Block::new(&init(), BlockConfig { width: 8, heads: 2, bias: true, dropout: 0.0, activation: Activation::Gelu })
            .unwrap();
    let (x, other) = (uniform(&[1, 5, 8], 1), uniform(&[1, 2, 8], 2));
    let changed = cat(&[&x.narrow(1, 0, 3).unwrap(), &other], 1).unwrap();
    let first = |x: &V| block.forward(x).unwrap().narrow(1, 0, 3).unwrap();
    assert_eq!(f64s(&first(&x)), f64s(&first(&changed)));
}

#[test]
fn grouped_queries_are_repeated_keys() {
    let config = GroupedQueryConfig {
        width: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        fused: false,
        bias: true,
        output_bias: false,
        head_norm: None,
        window: None,
        scores: Default::default(),
    };
    let grouped = GroupedQueryAttention::new(&init(), config).unwrap();
    let full = GroupedQueryAttention::new(&init(), GroupedQueryConfig { kv_heads: 4, ..config }).unwrap();
    for ((name, a), (_, b)) in grouped.named_parameters().iter().zip(full.named_parameters()) {
        let value = a.value().unwrap();
        let heads = |x: &Tensor<Cpu>| {
            let parts: Vec<_> = [0, 3].map(|at| x.narrow(0, at, 3).unwrap()).into();
            cat(&[&parts[0], &parts[0], &parts[1], &parts[1]], 0).unwrap()
        };
        b.set(if value.shape() == &b.shape() { value } else { heads(&value) })
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let (x, residual) = (uniform(&[2, 5, 8], 6), uniform(&[2, 5, 8], 7));
    let out =
        |layer: &GroupedQueryAttention<Cpu>| layer.attend(layer.project(&x, None).unwrap(), None, &residual).unwrap();
    same(&out(&grouped), &out(&full));
    // The same by one projection, whose rows are those of queries, then of keys, then of values.
    let fused = GroupedQueryAttention::new(&init(), GroupedQueryConfig { fused: true, ..config }).unwrap();
    let [weights, biases] = ["weight", "bias"].map(|part| {
        let named = grouped.named_parameters();
        let of =
            |name: &str| named.iter().find(|(n, _)| *n == format!("{name}_proj.{part}")).unwrap().1.value().unwrap();
        cat(&[&of("q"), &of("k"), &of("v")], 0).unwrap()
    });
    for (name, p) in fused.named_parameters() {
        match &*name {
            "qkv_proj.weight" => p.set(weights.clone()).unwrap(),
            "qkv_proj.bias" => p.set(biases.clone()).unwrap(),
            _ => p.set(grouped.o_proj.weight.value().unwrap()).unwrap(),
        }
    }
    same(&out(&fused), &out(&grouped));
    let together = Some(HeadNorm { together: true, ..HeadNorm::each(1e-6) });
    for (wrong, due) in [
        (GroupedQueryConfig { kv_heads: 3, ..config }, "3 heads of keys do not divide 4"),
        (GroupedQueryConfig { kv_heads: 0, ..config }, "0 heads of keys"),
        (GroupedQueryConfig { fused: true, head_norm: together, ..config }, "need a projection of their own"),
        (GroupedQueryConfig { window: Some(0), ..config }, "window of 0"),
        (GroupedQueryConfig { head_dim: 0, ..config }, "at least 1 wide"),
    ] {
        let error = message(GroupedQueryAttention::new(&init(), wrong));
        assert!(error.contains(due), "{error}");
    }
}

#[test]
fn rotary_tables_are_rope_at_any_positions() {
    use numcore::fused::{NnOps, RopeOptions};
    let x = uniform(&[2, 3, 5, 6], 4);
    let positions = Var::new(Tensor::from_slice(&cpu(), [2, 5], &[3i64, 4, 5, 6, 7, 0, 1, 0, 1, 2]).unwrap());
    let tables = Rotary::new(100.0, 4).tables(&positions, DType::F32).unwrap();
    let options = RopeOptions { base: 100.0, positions: Some(&positions), dim: Some(4), ..Default::default() };
    same(&tables.rotate(&x).unwrap(), &x.rope_with(options).unwrap());
    let range = Var::new(Tensor::arange(&cpu(), 2i64, 1i64, 5, DType::I64).unwrap());
    let tables = Rotary::new(100.0, 6).tables(&range, DType::F32).unwrap();
    same(&tables.rotate(&x).unwrap(), &x.rope(100.0, 2).unwrap());
    assert!(Rotary::new(10.0, 4).tables(&uniform(&[1, 1, 1], 0), DType::F32).is_err());
}
