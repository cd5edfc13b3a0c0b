//! Whisper against transformers: logits, gradients, greedy text, files.

use autograd::{Var, no_grad};
use models::{GenerationOptions, Pretrained, Prompt, Whisper, WhisperConfig};
use nn::{ModuleExt, loss::cross_entropy};
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;
use serde_json::json;

use crate::common::*;

fn whisper(dtype: DType) -> Whisper<Cpu> {
    Whisper::from_pretrained(reference("whisper"), &init().dtype(dtype)).unwrap()
}

fn sounds(dtype: DType) -> V {
    Var::new(Reference::read("whisper").tensor("sounds").to_dtype(dtype).unwrap())
}

fn logits(dtype: DType) -> (Whisper<Cpu>, V) {
    let model = whisper(dtype);
    let memory = model.encode(&sounds(dtype)).unwrap();
    let logits = model.decoder.logits(&Reference::read("whisper").var("begun"), &memory, None).unwrap();
    (model, logits)
}

#[test]
fn whisper_is_that_of_transformers() {
    let due = Reference::read("whisper");
    let exact = logits(DType::F64).1.value().unwrap();
    close("whisper", &due.tensor("logits"), &exact, 2e-5);
    let (model, logits) = logits(DType::F32);
    close("whisper", &logits.value().unwrap(), &exact, 2e-5);
    close("states", &model.states(&sounds(DType::F32)).unwrap().value().unwrap(), &due.tensor("states"), 2e-5);
    // The embedding of padding gets a gradient as a part of the head alone, and that of sounds none.
    let loss = cross_entropy(&logits, &due.var("target")).unwrap();
    check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
}

/// The encoder's states stay numbers in `f16`, as in transformers.
#[test]
fn states_do_not_pass_the_largest_half() {
    let model = whisper(DType::F16);
    let biases = model.named_parameters().into_iter().filter(|(name, _)| name.ends_with("mlp.down_proj.bias"));
    for (_, bias) in biases {
        bias.set(Tensor::full(&cpu(), bias.shape(), DType::F16, 60_000.0).unwrap()).unwrap();
    }
    // The last norm would divide by an infinite variance: its input is what was clamped.
    let states = model.states(&sounds(DType::F16)).unwrap().value().unwrap().to_f64s().unwrap();
    assert!(states.iter().all(|state| state.is_finite()));
}

#[test]
fn greedy_text_after_given_tokens_is_that_of_transformers() {
    let (model, due) = (whisper(DType::F32), facts("whisper")["greedy"].clone());
    let due: Vec<Vec<u32>> = serde_json::from_value(due).unwrap();
    let memory = model.encode(&sounds(DType::F32)).unwrap();
    let options = GenerationOptions { max_new_tokens: 11, ..Default::default() };
    let prompts = [vec![1, 7, 5], vec![1, 7, 5]].map(Prompt::from);
    let texts = model.decoder.generate(&memory, &prompts, &options, None).unwrap();
    assert!(texts.iter().map(|text| &text.tokens).eq(&due), "{texts:?}");
    // Learned positions end: the token after the last is chosen, and not read.
    let options = GenerationOptions { max_new_tokens: 99, ..Default::default() };
    let longest = model.decoder.generate(&memory, &prompts, &options, None).unwrap();
    assert!(longest.iter().all(|text| text.tokens.len() == 14));
}

#[test]
fn a_cache_changes_nothing() {
    let (model, whole) = logits(DType::F64);
    let (begun, memory) = (Reference::read("whisper").tensor("begun"), model.encode(&sounds(DType::F64)).unwrap());
    let (mut cache, mut at) = (model.decoder.cache(8, 2), 0);
    for len in [3, 1, 4] {
        let tokens = Var::new(begun.narrow(1, at, len).unwrap());
        let found = no_grad(|| model.decoder.logits(&tokens, &memory, Some(&mut cache))).unwrap();
        close("cache", &found.value().unwrap(), &whole.value().unwrap().narrow(1, at, len).unwrap(), 1e-12);
        at += len;
    }
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    let (model, scratch) = (whisper(DType::F32), Scratch::new());
    model.save_pretrained(&scratch.0).unwrap();
    same_tensors(&weight_files(&reference("whisper")), &weight_files(&scratch.0));
    let again = Whisper::from_pretrained(&scratch.0, &init()).unwrap().config().clone();
    assert_eq!(WhisperConfig { fields: model.config().fields.clone(), ..again }, *model.config());
    // A head of its own is saved and loaded too.
    let own = WhisperConfig { tied: false, ..model.config().clone() };
    let model = Whisper::new(&init(), own).unwrap();
    model.save_pretrained(&scratch.0).unwrap();
    let again = Whisper::from_pretrained(&scratch.0, &init()).unwrap();
    assert!(again.named_parameters().iter().any(|(name, _)| name == "decoder.head.weight"));
}

#[test]
fn what_is_no_whisper_is_an_error() {
    for (field, value, due) in [
        ("scale_embedding", json!(true), "`scale_embedding` is true"),
        ("encoder_attention_heads", json!(5), "`encoder_attention_heads` is 5, which does not divide 12 channels"),
        ("decoder_attention_heads", json!(0), "`decoder_attention_heads` is 0"),
        ("activation_function", json!("mish"), "`activation_function` is `mish`"),
        ("pad_token_id", json!(43), "`pad_token_id` is 43"),
        ("max_source_positions", json!(8), "embed_positions.weight is"),
        ("num_hidden_layers", json!(3), "`num_hidden_layers` is 3, and `encoder_layers` says 2"),
        ("encoder_layers", json!(20_000), "`encoder_layers` is 20000"),
        ("rotary", json!(true), "`rotary`"),
    ] {
        let folder = Scratch::copy_of("whisper").with_config(|fields| drop(fields.insert(field.into(), value)));
        let error = Whisper::<Cpu>::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
        assert!(error.contains(due), "{field}: {error}");
    }
    let model = whisper(DType::F32);
    let short = Var::new(Tensor::zeros(&cpu(), [2, 5, 16], DType::F32).unwrap());
    let error = model.encode(&short).map(drop).unwrap_err().to_string();
    assert!(error.contains("spectrograms must be [B, 5, 18]"), "{error}");
    let memory = model.encode(&sounds(DType::F32)).unwrap();
    let long = Var::new(Tensor::zeros(&cpu(), [2, 17], DType::I64).unwrap());
    let error = model.decoder.logits(&long, &memory, None).map(drop).unwrap_err().to_string();
    assert!(error.contains("17 positions are more than the context of 16"), "{error}");
}
