//! Positions that depend on the length of a text (LongRoPE).

use autograd::no_grad;
use models::{Decoder, DecoderInputs, Pretrained};
use nn::Forward;
use numcore::{
    DType, Error, Tensor,
    ops::{ViewOps, cat},
};
use runtime_cpu::Cpu;

use crate::common::*;

/// The first context of `phi3_long`.
const FIRST: usize = 12;

fn exact() -> Decoder<Cpu> {
    Decoder::from_pretrained(reference("phi3_long"), &init().dtype(DType::F64)).unwrap()
}

#[test]
fn texts_up_to_the_first_context_have_the_short_factors() {
    let due = Reference::read("phi3_long");
    let (model, ids) = (exact(), due.tensor("ids"));
    let logits = |len: usize| model.forward(&V::new(ids.narrow(1, 0, len).unwrap())).unwrap().value().unwrap();
    close("short", &due.tensor("short_logits"), &logits(FIRST), 2e-5);
    let begin = logits(FIRST + 1).narrow(1, 0, FIRST).unwrap();
    let (begin, short) = (begin.to_f64s().unwrap(), logits(FIRST).to_f64s().unwrap());
    let gap = begin.iter().zip(&short).map(|(a, b)| (a - b).abs());
    assert!(gap.fold(0.0, f64::max) > 1e-2, "one more token changes all positions");
}

/// Each row has the factors of its own length, in any batch.
#[test]
fn a_row_is_long_by_itself() {
    let (model, ids) = (exact(), Reference::read("phi3_long").tensor("ids"));
    let row = |i: usize, len: usize| ids.narrow(0, i, 1).unwrap().narrow(1, 0, len).unwrap();
    let pad = Tensor::zeros(&cpu(), [1, 8], DType::I64).unwrap();
    let both = cat(&[&cat(&[&pad, &row(0, 10)], 1).unwrap(), &row(1, 18)], 0).unwrap();
    let mut cache = model.cache(18, vec![8, 0]);
    let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
    let found = no_grad(|| model.forward_with(&V::new(both), inputs)).unwrap().value().unwrap();
    for (i, len) in [(0, 10), (1, 18)] {
        let found = found.narrow(0, i, 1).unwrap().narrow(1, 18 - len, len).unwrap();
        close("row", &found, &model.forward(&V::new(row(i, len))).unwrap().value().unwrap(), 1e-12);
    }
}

#[test]
fn a_cache_does_not_pass_the_first_context() {
    let (model, ids) = (exact(), Reference::read("phi3_long").tensor("ids"));
    let whole = |len: usize| model.forward(&V::new(ids.narrow(1, 0, len).unwrap())).unwrap().value().unwrap();
    for parts in [vec![5, 1, 6], vec![13, 1, 9]] {
        let (mut cache, mut at) = (model.cache(40, vec![0, 0]), 0);
        let mut call = |at: usize, len: usize| {
            let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
            no_grad(|| model.forward_with(&V::new(ids.narrow(1, at, len)?), inputs))?.value()
        };
        let is_short = parts.iter().sum::<usize>() == FIRST;
        for len in parts {
            close("part", &call(at, len).unwrap(), &whole(at + len).narrow(1, at, len).unwrap(), 1e-12);
            at += len;
        }
        if is_short {
            let error: Error = call(at, 1).unwrap_err();
            assert!(error.to_string().contains("`row 0 of the cache`: outgrows the first context"), "{error}");
        }
    }
}
