//! Positions that depend on the length of a text (LongRoPE).

use autograd::no_grad;
use models::{
    ConfigFields, Decoder, DecoderConfig, DecoderInputs, FinishReason, Generated, GenerationOptions, JsonObject,
    Pretrained, Prompt, Rollout, RolloutBatch, RopeScaling, generate,
};
use nn::Forward;
use numcore::{
    DType, Error, Tensor,
    ops::{ViewOps, cat},
};
use runtime_cpu::Cpu;
use serde_json::json;

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

/// Texts pass the first context at different tokens, while others end and begin.
#[test]
fn texts_in_any_batch_are_those_alone() {
    let (model, facts) = (decoder("phi3_long"), facts("phi3_long"));
    let lists = |name: &str| serde_json::from_value::<Vec<Vec<u32>>>(facts[name].clone()).unwrap();
    let (prompts, due) = (lists("prompts"), lists("greedy"));
    let prompts: Vec<Prompt> = prompts.iter().chain(&prompts).map(|tokens| tokens.clone().into()).collect();
    for rows in [1, 2, 4] {
        let options = GenerationOptions { max_new_tokens: 12, rows: Some(rows), logprobs: true, ..Default::default() };
        let found = generate(&model, &prompts, &options, None).unwrap();
        for (found, due) in found.iter().zip(due.iter().chain(&due)) {
            assert_eq!((&found.tokens, found.logprobs.len()), (due, 12), "{rows}");
        }
    }
}

/// Padding on the right, given positions of its own, does not make a row long.
#[test]
fn padding_on_the_right_does_not_count_by_its_positions() {
    let (model, ids) = (exact(), Reference::read("phi3_long").tensor("ids"));
    let due = model.forward(&V::new(ids.narrow(1, 0, 9).unwrap())).unwrap().value().unwrap();
    let positions: Vec<i64> = (0..9).chain([0; 5]).collect();
    let positions = V::new(Tensor::from_slice(&cpu(), [14], &positions).unwrap());
    let inputs = DecoderInputs { positions: Some(&positions), ..Default::default() };
    let found = model.forward_with(&V::new(ids.narrow(1, 0, 14).unwrap()), inputs).unwrap().value().unwrap();
    close("padded", &found.narrow(1, 0, 9).unwrap(), &due, 1e-12);
}

/// Each document of a packed row has the factors of its own length.
#[test]
fn packed_texts_are_long_by_themselves() {
    let (model, ids) = (exact(), Reference::read("phi3_long").tensor("ids"));
    let text = |row: usize, len: usize| ids.narrow(0, row, 1).unwrap().narrow(1, 0, len).unwrap();
    let (short, long) = (text(0, 7), text(1, 15));
    let packed = V::new(cat(&[&short, &long], 1).unwrap());
    let list = |list: Vec<i64>| V::new(Tensor::from_slice(&cpu(), [1, 22], &list).unwrap());
    let segments = list([vec![0; 7], vec![1; 15]].concat());
    let restarting = list((0..7).chain(0..15).collect());
    let inputs = DecoderInputs { positions: Some(&restarting), segments: Some(&segments), cache: None };
    let found = model.forward_with(&packed, inputs).unwrap().value().unwrap();
    for (text, at, len) in [(short, 0, 7), (long, 7, 15)] {
        let due = model.forward(&V::new(text)).unwrap().value().unwrap();
        close("packed", &found.narrow(1, at, len).unwrap(), &due, 1e-12);
    }
}

/// A batch in which a text would have other positions than it was sampled with is refused.
#[test]
fn rollouts_have_the_positions_of_their_samples() {
    let (model, long) = (decoder("phi3_long"), FIRST + 1);
    let rollout = |prompt: usize, new: usize| {
        let completion = Generated { tokens: vec![3; new], logprobs: vec![-1.0; new], reason: FinishReason::Length };
        Rollout { prompt: vec![2; prompt].into(), completion, reward: 0.0 }
    };
    for (rollouts, refused) in [
        (vec![rollout(5, 8), rollout(2, 3)], None),
        (vec![rollout(long, 8), rollout(long + 2, 3)], None),
        (vec![rollout(5, 9)], Some(0)),
        (vec![rollout(long, 8), rollout(2, 3)], Some(1)),
    ] {
        match (RolloutBatch::new(&model, &rollouts), refused) {
            (Ok(_), None) => {}
            (found, at) => {
                let error = found.map(drop).unwrap_err().to_string();
                assert!(error.contains(&format!("rollout {} was sampled within", at.unwrap())), "{error}");
            }
        }
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

/// The `config.json` of Phi-3.5-mini and Phi-4-mini, but for the numbers of their divisors.
#[test]
fn published_configurations_are_understood() {
    for (part, heads, kv_heads, more) in [
        (1.0, 32, 32, json!({"sliding_window": 262144, "tie_word_embeddings": false, "vocab_size": 32064})),
        (
            0.75,
            24,
            8,
            json!({"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false, "mlp_bias": false,
            "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": true, "vocab_size": 200064}),
        ),
    ] {
        let pairs = (3072 / heads) as f64 * part / 2.0;
        let divisors = vec![1.5; pairs as usize];
        let mut fields = json!({
            "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map": {"A": "B"},
            "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "model_type": "phi3", "num_attention_heads": heads, "num_hidden_layers": 32, "num_key_value_heads": kv_heads,
            "original_max_position_embeddings": 4096, "pad_token_id": 3, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": true
        });
        fields["rope_scaling"] = json!({"long_factor": divisors, "short_factor": divisors, "type": "longrope"});
        fields.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        let read =
            |fields: serde_json::Map<_, _>| DecoderConfig::read(&ConfigFields::of(JsonObject::of("file", fields)));
        let config = read(fields.as_object().cloned().unwrap()).unwrap();
        let rope = config.rope.clone().unwrap();
        assert_eq!((rope.part, config.tied), (part, part < 1.0));
        let RopeScaling::LongRope { original, attention, .. } = &rope.scaling else { panic!("{rope:?}") };
        // √(1 + ln 32 / ln 4096)
        assert!(*original == 4096.0 && (attention - 1.190_238_071_4).abs() < 1e-9, "{attention}");
        let again = read(config.to_json()).unwrap();
        assert_eq!(DecoderConfig { fields: config.fields.clone(), ..again }, config);
    }
}
