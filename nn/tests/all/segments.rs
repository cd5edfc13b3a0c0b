//! Attention within packed documents, by a place whose sequences are whole.

use autograd::Var;
use nn::parallel::{AttendedTokens, ContextSlot, same_segment};
use numcore::{
    DType, Result, Tensor,
    fused::{NnOps, SdpaOptions},
    ops::PointwiseOps,
};
use runtime_cpu::Cpu;

const T: usize = 6;

fn value(rt: &Cpu, tokens: usize, seed: u64) -> Var<Cpu> {
    Var::new(Tensor::normal(rt, [2, 2, tokens, 4], DType::F64, 0.0, 1.0, seed).unwrap())
}

fn segments(rt: &Cpu) -> Var<Cpu> {
    Var::new(Tensor::from_slice(rt, [2, T], &[0i64, 0, 1, 1, 1, 2, 0, 1, 1, 1, 1, 1]).unwrap())
}

fn attention(rt: &Cpu, mask: Option<&Var<Cpu>>, keys: usize) -> Result<Vec<f64>> {
    let [q, k, v] = [value(rt, T, 1), value(rt, keys, 2), value(rt, keys, 3)];
    let options = SdpaOptions { mask, causal: true, ..SdpaOptions::default() };
    let (segments, slot) = (segments(rt), ContextSlot::attends());
    let tokens = AttendedTokens { segments: Some(&segments), ..Default::default() };
    slot.attention([&q, &k, &v], options, &tokens)?.value()?.to_vec::<f64>()
}

#[test]
fn segments_and_masks_of_both_kinds_hide_keys_together() {
    let rt = Cpu::with_threads(1);
    let of = segments(&rt);
    let same = same_segment(&of, &of).unwrap();
    let added = Tensor::normal(&rt, [1, 1, T, T], DType::F64, 0.0, 1.0, 9).unwrap();
    let kept = Var::new(added.lt(1.0).unwrap());
    let due = |mask: &Var<Cpu>| {
        let [q, k, v] = [1, 2, 3].map(|seed| value(&rt, T, seed));
        let options = SdpaOptions { mask: Some(mask), causal: true, ..SdpaOptions::default() };
        q.attention_with(&k, &v, options).unwrap().value().unwrap().to_vec::<f64>().unwrap()
    };
    assert_eq!(attention(&rt, None, T).unwrap(), due(&same));
    assert_eq!(attention(&rt, Some(&kept), T).unwrap(), due(&same.logical_and(&kept).unwrap()));
    let both = Var::new(added.clone()).masked_fill(&same.logical_not().unwrap(), f64::NEG_INFINITY).unwrap();
    assert_eq!(attention(&rt, Some(&Var::new(added)), T).unwrap(), due(&both));
}

#[test]
fn segments_beside_keys_of_a_cache_are_refused() {
    let error = attention(&Cpu::with_threads(1), None, T + 2).unwrap_err().to_string();
    assert!(error.contains("segments are of all queries and keys") && error.contains("[2, 6]"), "{error}");
}
