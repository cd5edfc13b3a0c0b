//! Whisper against transformers: logits, gradients, greedy text, files.

use autograd::{Var, no_grad};
use models::{GenerationOptions, Pretrained, Prompt, SpeechPrompt, TimeStampRules, Whisper, WhisperConfig};
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

/// The fields of `reference.json` that say what transformers was asked for.
fn asked(case: &serde_json::Value, of_file: &SpeechPrompt) -> (SpeechPrompt, GenerationOptions) {
    let text = |name: &str| case.get(name).and_then(|value| value.as_str()).map(str::to_owned);
    let options = GenerationOptions::of_folder(reference("speech")).unwrap();
    let stamps = TimeStampRules { first: 32, end: 24, latest_begin: Some(4) };
    let speech = SpeechPrompt { language: text("language"), task: text("task"), ..of_file.clone() };
    let repetition_penalty = case.get("repetition_penalty").and_then(|penalty| penalty.as_f64()).unwrap_or(1.0);
    let time_stamps = case.get("return_timestamps").map(|_| stamps);
    let options = GenerationOptions { repetition_penalty, time_stamps, ..options };
    (speech, options)
}

/// Prompts by language and task, detected languages, suppressed tokens and time stamps.
#[test]
fn texts_of_speech_are_those_of_transformers() {
    let (model, facts) = (whisper(DType::F32), facts("speech"));
    let memory = model.encode(&Reference::read("speech").var("sounds")).unwrap();
    let of_file = SpeechPrompt::of_folder(reference("speech")).unwrap();
    assert_eq!((of_file.forced.as_slice(), of_file.no_time_stamps), (&[None, Some(29)][..], Some(31)));
    for case in facts["cases"].as_array().unwrap() {
        let (speech, options) = asked(case, &of_file);
        assert_eq!((options.max_length, options.begin_suppress_tokens.as_slice()), (Some(16), &[7, 24][..]));
        let prompts = model.prompts(&memory, &speech, &options).unwrap();
        let texts = model.decoder.generate(&memory, &prompts, &options, None).unwrap();
        let whole = prompts.iter().zip(&texts).map(|(prompt, text)| [&prompt.tokens[..], &text.tokens].concat());
        let due: Vec<Vec<u32>> = serde_json::from_value(case["texts"].clone()).unwrap();
        assert_eq!(whole.collect::<Vec<_>>(), due, "{case}");
    }
    let detected = SpeechPrompt { forced: Vec::new(), no_time_stamps: None, ..of_file.clone() };
    let plain = GenerationOptions::default();
    let detected = model.prompts(&memory, &detected, &plain).unwrap();
    let due: Vec<u32> = serde_json::from_value(facts["languages"].clone()).unwrap();
    assert!(detected.iter().map(|prompt| &prompt.tokens[..]).eq(due.iter().map(|&language| [25, language])));
    for (wrong, due) in [
        (SpeechPrompt { language: Some("it".into()), ..of_file.clone() }, "`<|it|>` is none of this model's: <|de|>, "),
        (SpeechPrompt { task: Some("sing".into()), ..of_file.clone() }, "`sing` is none of this model's: transcribe"),
    ] {
        let error = model.prompts(&memory, &wrong, &plain).unwrap_err().to_string();
        assert!(error.contains(due), "{error}");
    }
    // Time stamps of other tokens, and of a model without.
    let (_, timed) = asked(&json!({"return_timestamps": true}), &of_file);
    for (none, due) in
        [(Some(30), "is 30, but the time stamps of `GenerationOptions` begin at 32"), (None, "is absent")]
    {
        let wrong = SpeechPrompt { no_time_stamps: none, ..of_file.clone() };
        let error = model.prompts(&memory, &wrong, &timed).unwrap_err().to_string();
        assert!(error.contains(&format!("`no_time_stamps` {due}")), "{error}");
    }
}

#[test]
fn scores_after_rules_of_time_stamps_are_those_of_transformers() {
    let (due, facts) = (Reference::read("speech"), facts("speech"));
    let [scores, processed] = ["scores", "processed"].map(|name| due.tensor(name).to_vec::<f32>().unwrap());
    let of_file = SpeechPrompt::of_folder(reference("speech")).unwrap();
    let (_, options) = asked(&json!({"return_timestamps": true}), &of_file);
    let texts: Vec<Vec<u32>> = serde_json::from_value(facts["texts"].clone()).unwrap();
    for (i, text) in texts.iter().enumerate() {
        let mut own = scores[43 * i..43 * (i + 1)].to_vec();
        options.process(&mut own, &[25, 26, 29], text).unwrap();
        assert_eq!(own, processed[43 * i..43 * (i + 1)], "{text:?}");
    }
}

/// A file that asks for time stamps, and one of a model of English alone.
#[test]
fn files_of_generation_are_read_as_transformers_reads_them() {
    let read = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let (folder, path) = (Scratch::new(), reference("speech").join("generation_config.json"));
        let mut fields: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        change(fields.as_object_mut().unwrap());
        std::fs::write(folder.0.join("generation_config.json"), fields.to_string()).unwrap();
        let outer = json!({"decoder_start_token_id": 21, "forced_decoder_ids": [[1, 22]]});
        std::fs::write(folder.0.join("config.json"), outer.to_string()).unwrap();
        (GenerationOptions::of_folder(&folder.0), SpeechPrompt::of_folder(&folder.0))
    };
    let (options, _) = read(&|fields| drop(fields.insert("return_timestamps".into(), true.into())));
    let due = Some(TimeStampRules { first: 32, end: 24, latest_begin: Some(4) });
    assert_eq!(options.unwrap().time_stamps, due);
    let (_, speech) = read(&|fields| {
        fields.remove("decoder_start_token_id");
        fields.remove("forced_decoder_ids");
        fields.insert("is_multilingual".into(), false.into());
    });
    let speech = speech.unwrap();
    assert_eq!((speech.start, speech.forced.as_slice(), speech.languages.len()), (21, &[Some(22)][..], 0));
    for (field, value, due) in [
        ("forced_decoder_ids", json!([[2, 5]]), "is no list of tokens at places 1, 2"),
        ("lang_to_id", json!({"<|en|>": -1}), "`<|en|>` is -1, not a count"),
        ("no_timestamps_token_id", json!(1u64 << 40), "which is no token"),
    ] {
        let error = read(&|fields| drop(fields.insert(field.into(), value.clone()))).1.unwrap_err().to_string();
        assert!(error.contains(due), "{field}: {error}");
    }
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
