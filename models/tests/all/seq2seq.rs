//! Encoder–decoders against transformers: logits, gradients, greedy text, files.

use autograd::{Var, no_grad};
use models::{FinishReason, GenerationOptions, Pretrained, Prompt, Sampling, T5};
use nn::{ModuleExt, loss::cross_entropy};
use numcore::{
    DType, Tensor,
    fused::NnOps,
    ops::{PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;
use serde_json::json;

use crate::common::*;

const T5S: [&str; 3] = ["t5", "t5_gated", "mt5"];
const ENCODERS: [&str; 2] = ["t5_encoder", "mt5_encoder"];

fn t5(name: &str, dtype: DType) -> T5<Cpu> {
    T5::from_pretrained(reference(name), &init().dtype(dtype)).unwrap()
}

fn logits(model: &T5<Cpu>, due: &Reference) -> V {
    let memory = model.encode(&due.var("ids"), Some(&due.var("mask"))).unwrap();
    model.decoder().unwrap().logits(&due.var("begun"), &memory, None).unwrap()
}

#[test]
fn t5_is_that_of_transformers() {
    for name in T5S {
        let (model, due) = (t5(name, DType::F32), Reference::read(name));
        let exact = logits(&t5(name, DType::F64), &due).value().unwrap();
        close(name, &due.tensor("logits"), &exact, 2e-5);
        let logits = logits(&model, &due);
        close(name, &logits.value().unwrap(), &exact, 2e-5);
        let states = model.states(&due.var("ids"), Some(&due.var("mask"))).unwrap().value().unwrap();
        // Rows of padding are computed too, and nothing sees them.
        for (row, len) in [(0, 17), (1, 11)] {
            let of = |x: &Tensor<Cpu>| x.narrow(0, row, 1).unwrap().narrow(1, 0, len).unwrap();
            close("states", &of(&states), &of(&due.tensor("states")), 2e-5);
        }
        let loss = cross_entropy(&logits, &due.var("target")).unwrap();
        check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
    }
}

/// Padding is on either side of a text.
#[test]
fn encoders_alone_are_those_of_transformers() {
    for name in ENCODERS {
        let (model, due) = (t5(name, DType::F32), Reference::read(name));
        let states = model.states(&due.var("ids"), Some(&due.var("mask"))).unwrap();
        let seen = due.var("mask").to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
        close(name, &states.mul(&seen).unwrap().value().unwrap(), &due.tensor("states"), 2e-5);
        let loss = cross_entropy(&states, &due.var("target")).unwrap();
        check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
        let error = model.encode(&due.var("ids"), None).map(drop).unwrap_err().to_string();
        assert!(error.contains("is an encoder alone, without a decoder"), "{error}");
    }
    // Encoders that are published say that they are encoder-decoders.
    let folder = Scratch::copy_of("t5_encoder")
        .with_config(|fields| drop(fields.insert("is_encoder_decoder".into(), true.into())));
    T5::<Cpu>::from_pretrained(&folder.0, &init()).unwrap();
    let half = Scratch::copy_of("mt5_encoder")
        .with_config(|fields| drop(fields.insert("architectures".into(), json!(["MT5ForConditionalGeneration"]))));
    let error = T5::<Cpu>::from_pretrained(&half.0, &init()).map(drop).unwrap_err().to_string();
    assert!(error.contains("`is_encoder_decoder` is false"), "{error}");
}

fn greedy(new: usize) -> GenerationOptions {
    GenerationOptions { max_new_tokens: new, ..Default::default() }
}

fn lists(name: &str) -> Vec<Vec<u32>> {
    serde_json::from_value(facts(name)["greedy"].clone()).unwrap()
}

#[test]
fn greedy_text_is_that_of_transformers() {
    let prompt = Prompt::from(vec![0]);
    for name in T5S {
        let (model, due, texts) = (t5(name, DType::F32), Reference::read(name), lists(name));
        let memory = model.encode(&due.var("ids"), Some(&due.var("mask"))).unwrap();
        let both =
            model.decoder().unwrap().generate(&memory, &[prompt.clone(), prompt.clone()], &greedy(15), None).unwrap();
        assert!(both.iter().map(|text| &text.tokens).eq(&texts), "{name}: {both:?}");
        // A row without its padding, alone, and with some tokens given.
        let alone = Var::new(due.tensor("ids").narrow(0, 1, 1).unwrap().narrow(1, 0, 11).unwrap());
        let memory = model.encode(&alone, None).unwrap();
        let begun = Prompt::from([vec![0], texts[1][..6].to_vec()].concat());
        let options = GenerationOptions { logprobs: true, ..greedy(9) };
        let rest = model.decoder().unwrap().generate(&memory, &[begun], &options, None).unwrap().remove(0);
        assert_eq!((&rest.tokens[..], rest.reason), (&texts[1][6..], FinishReason::Length), "{name}");
        assert!(rest.logprobs.len() == 9 && rest.logprobs.iter().all(|p| *p < 0.0));
        let ends = GenerationOptions { eos_token_ids: vec![texts[0][3]], ..greedy(15) };
        let memory = model.encode(&due.var("ids"), Some(&due.var("mask"))).unwrap();
        let ended = model.decoder().unwrap().generate(&memory, &[prompt.clone(), prompt.clone()], &ends, None).unwrap();
        let at = texts[0].iter().position(|token| *token == texts[0][3]).unwrap();
        assert_eq!((&ended[0].tokens[..], ended[0].reason), (&texts[0][..=at], FinishReason::End));
    }
}

/// Log-probabilities of logits in `bf16` are not rounded to it.
#[test]
fn log_probabilities_are_wide() {
    let (model, due) = (t5("t5", DType::BF16), Reference::read("t5"));
    let memory = model.encode(&due.var("ids"), Some(&due.var("mask"))).unwrap();
    let options = GenerationOptions { logprobs: true, ..greedy(1) };
    let texts = model.decoder().unwrap().generate(&memory, &[vec![0].into(), vec![0].into()], &options, None).unwrap();
    let begin = Var::new(Tensor::zeros(&cpu(), [2, 1], DType::I64).unwrap());
    let logits = model.decoder().unwrap().logits(&begin, &memory, None).unwrap().to_dtype(DType::F64).unwrap();
    let all = logits.log_softmax(-1).unwrap().value().unwrap().to_f64s().unwrap();
    for (text, all) in texts.iter().zip(all.chunks(43)) {
        let (found, due) = (text.logprobs[0], all[text.tokens[0] as usize]);
        assert!((found - due).abs() < 1e-6, "{found} is not {due}");
    }
}

#[test]
fn a_cache_changes_nothing() {
    for name in T5S {
        let (model, due) = (t5(name, DType::F64), Reference::read(name));
        let (whole, begun) = (logits(&model, &due).value().unwrap(), due.tensor("begun"));
        let memory = model.encode(&due.var("ids"), Some(&due.var("mask"))).unwrap();
        for parts in [vec![9], vec![1; 9], vec![4, 1, 3, 1]] {
            let (mut cache, mut at) = (model.decoder().unwrap().cache(9, 2), 0);
            for len in parts {
                let tokens = Var::new(begun.narrow(1, at, len).unwrap());
                let found = no_grad(|| model.decoder().unwrap().logits(&tokens, &memory, Some(&mut cache))).unwrap();
                close(name, &found.value().unwrap(), &whole.narrow(1, at, len).unwrap(), 1e-12);
                at += len;
            }
        }
    }
}

/// The root mean square of errors of transformers' own logits in `bf16` is 0.0073.
#[test]
fn half_precision_is_near() {
    let due = Reference::read("t5");
    let found = logits(&t5("t5", DType::BF16), &due).value().unwrap();
    assert_eq!(found.dtype(), DType::BF16);
    let (found, due) = (found.to_f64s().unwrap(), due.tensor("logits").to_f64s().unwrap());
    let squares: f64 = found.iter().zip(&due).map(|(a, b)| ((a - b) / b.abs().max(1.0)).powi(2)).sum();
    let error = (squares / due.len() as f64).sqrt();
    assert!(error < 0.01, "{error}");
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    for name in T5S.into_iter().chain(ENCODERS) {
        let (model, scratch) = (t5(name, DType::F32), Scratch::new());
        model.save_pretrained(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
        let again = T5::from_pretrained(&scratch.0, &init()).unwrap().config().clone();
        assert_eq!(models::T5Config { fields: model.config().fields.clone(), ..again }, *model.config());
    }
}

/// Older files have copies of the token embedding, and a bias that nothing reads.
#[test]
fn copies_of_the_token_embedding_are_left_out() {
    let folder = Scratch::copy_of("t5");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    let table = tensors.iter().find(|(name, _)| name == "shared.weight").unwrap().1.clone();
    for name in ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"] {
        tensors.push((name.into(), table.clone()));
    }
    let unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";
    tensors.push((unread.into(), Tensor::zeros(&cpu(), [8, 2], DType::F32).unwrap()));
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let (_, report) = T5::<Cpu>::from_pretrained_partly(&folder.0, &init()).unwrap();
    report.strict().unwrap();
    assert_eq!(report.ignored.len(), 4);
    // The table under the names of its copies alone.
    tensors.retain(|(name, _)| name != "shared.weight" && name != unread);
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let due = Reference::read("t5");
    let model = T5::from_pretrained(&folder.0, &init().dtype(DType::F64)).unwrap();
    close("copies", &due.tensor("logits"), &logits(&model, &due).value().unwrap(), 2e-5);
    let copy = tensors.iter_mut().find(|(name, _)| name == "decoder.embed_tokens.weight").unwrap();
    copy.1 = copy.1.mul(2.0).unwrap();
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let error = T5::<Cpu>::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
    assert!(error.contains("decoder.own_tokens.weight is no copy of"), "{error}");
    // A head of its own, of files before version 5 of transformers.
    let own = Scratch::copy_of("t5_gated").with_config(|fields| {
        fields.remove("scale_decoder_outputs");
        fields.insert("tie_word_embeddings".into(), false.into());
    });
    let due = Reference::read("t5_gated");
    let model = T5::from_pretrained(&own.0, &init().dtype(DType::F64)).unwrap();
    close("own", &due.tensor("logits"), &logits(&model, &due).value().unwrap(), 2e-5);
}

/// The weights tell whether the head is tied, and fields whether it takes smaller states.
#[test]
fn a_head_is_tied_or_scaled_by_itself() {
    let path = reference("t5").join("model.safetensors");
    let tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    let table = tensors.iter().find(|(name, _)| name == "shared.weight").unwrap().1.clone();
    let plain = logits(&t5("t5", DType::F64), &Reference::read("t5")).value().unwrap();
    for (head, scaled) in [(1.0, true), (1.0, false), (2.0, true), (2.0, false)] {
        let folder = Scratch::copy_of("t5")
            .with_config(|fields| drop(fields.insert("scale_decoder_outputs".into(), scaled.into())));
        let mut tensors = tensors.clone();
        if head != 1.0 {
            tensors.push(("lm_head.weight".into(), table.mul(head).unwrap()));
        }
        numcore::safetensors::save(folder.0.join("model.safetensors"), &tensors, &Default::default()).unwrap();
        let due = plain.mul(head * if scaled { 1.0 } else { 12f64.sqrt() }).unwrap();
        // What is saved is loaded again.
        for _ in 0..2 {
            let model = T5::from_pretrained(&folder.0, &init().dtype(DType::F64)).unwrap();
            assert_eq!((model.config().tied, model.config().scaled), (head == 1.0, scaled));
            close("head", &logits(&model, &Reference::read("t5")).value().unwrap(), &due, 1e-12);
            model.save_pretrained(&folder.0).unwrap();
        }
    }
}

#[test]
fn what_is_no_t5_is_an_error() {
    for (field, value, due) in [
        ("feed_forward_proj", json!("gated-mish"), "`feed_forward_proj` is `gated-mish`"),
        ("feed_forward_proj", json!("gated-relu"), "`dense_act_fn` and `is_gated_act` contradict"),
        ("relative_attention_num_buckets", json!(2), "2 buckets up to a distance of 12"),
        ("relative_attention_max_distance", json!(8), "8 buckets up to a distance of 8"),
        ("is_decoder", json!(true), "`is_decoder` is true"),
        ("d_kv", json!(0), "a size is 0"),
        ("use_cross_gate", json!(true), "`use_cross_gate`"),
    ] {
        let folder = Scratch::copy_of("t5").with_config(|fields| drop(fields.insert(field.into(), value)));
        let error = T5::<Cpu>::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
        assert!(error.contains(due), "{field}: {error}");
    }
    let half = t5("t5", DType::F16).encode(&Reference::read("t5").var("ids"), None).map(drop).unwrap_err();
    assert!(half.to_string().contains("largest number of f16"), "{half}");
    let (model, due) = (t5("t5", DType::F32), Reference::read("t5"));
    let memory = model.encode(&due.var("ids"), None).unwrap();
    let generate = |prompts: &[Prompt], options: &GenerationOptions| {
        model.decoder().unwrap().generate(&memory, prompts, options, None).map(drop).unwrap_err().to_string()
    };
    assert!(generate(&[Prompt::from(vec![0])], &greedy(2)).contains("prompts of [1] tokens for 2 rows"));
    assert!(generate(&[vec![0].into(), vec![0, 1].into()], &greedy(2)).contains("of one length"));
    let two = [Prompt::from(vec![0]), Prompt::from(vec![0])];
    let long = GenerationOptions { max_length: Some(1), ..greedy(2) };
    assert!(generate(&two, &long).contains("at most 1 leave no room"));
    let wrong = GenerationOptions { sampling: Some(Sampling { temperature: -1.0, ..Default::default() }), ..greedy(2) };
    assert!(generate(&two, &wrong).contains("temperature"));
    let mut cache = model.decoder().unwrap().cache(1, 2);
    let error = no_grad(|| model.decoder().unwrap().logits(&due.var("begun"), &memory, Some(&mut cache)));
    assert!(error.map(drop).unwrap_err().to_string().contains("room for 1 tokens"));
    let mut padded = models::KvCache::new(model.decoder().unwrap().stack.layers.len(), 9, vec![0, 2]);
    let error = no_grad(|| model.decoder().unwrap().logits(&due.var("begun"), &memory, Some(&mut padded)));
    assert!(error.map(drop).unwrap_err().to_string().contains("a cache with padding or windows"));
    let others = t5("t5", DType::F32).encode(&due.var("ids"), None).unwrap();
    let error = model.decoder().unwrap().logits(&due.var("begun"), &others, None).map(drop).unwrap_err().to_string();
    assert!(error.contains("keys and values of another decoder"), "{error}");
    let rows = Var::new(due.tensor("begun").narrow(0, 0, 1).unwrap());
    let error = model.decoder().unwrap().logits(&rows, &memory, None).map(drop).unwrap_err().to_string();
    assert!(error.contains("1 rows of tokens attend to an encoder's 2"), "{error}");
    assert!(model.named_parameters().iter().all(|(name, _)| !name.contains("head")));
}
