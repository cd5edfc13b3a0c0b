//! Greedy text and processors against transformers; sampling that does not depend on the batch.

use models::{Decoder, FinishReason, Generated, GenerationOptions, Pretrained, Prompt, Sampling, StopTexts, generate};
use numcore::{Tensor, safetensors};
use runtime_cpu::Cpu;
use serde_json::{Value, json};

use crate::common::*;

fn lists(value: &Value) -> Vec<Vec<u32>> {
    let list = |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().map(list).collect()
}

fn prompts(name: &str) -> Vec<Prompt> {
    lists(&facts(name)["prompts"]).into_iter().map(Prompt::from).collect()
}

fn greedy(new: usize) -> GenerationOptions {
    GenerationOptions { max_new_tokens: new, ..Default::default() }
}

fn tokens(generated: Vec<Generated>) -> Vec<Vec<u32>> {
    generated.into_iter().map(|g| g.tokens).collect()
}

#[test]
fn greedy_text_is_that_of_transformers() {
    let names = ["gpt2", "llama", "llama_yarn", "mistral", "qwen2", "qwen3", "phi3_long"];
    for name in names.into_iter().chain(decoders_with_options()) {
        let due = lists(&facts(name)["greedy"]);
        let model = decoder(name);
        assert_eq!(tokens(generate(&model, &prompts(name), &greedy(12), None).unwrap()), due, "{name}");
        // One by one, and fewer.
        for (prompt, due) in prompts(name).into_iter().zip(&due) {
            let alone = generate(&model, &[prompt], &greedy(7), None).unwrap().remove(0);
            assert_eq!((alone.tokens.as_slice(), alone.reason), (&due[..7], FinishReason::Length), "{name}");
        }
    }
}

#[test]
fn a_text_ends_at_a_token_or_a_text_while_others_go_on() {
    let (model, due) = (decoder("llama"), lists(&facts("llama")["greedy"]));
    let end = due[1][4];
    let options = GenerationOptions { eos_token_ids: vec![end], ..greedy(12) };
    for (generated, due) in generate(&model, &prompts("llama"), &options, None).unwrap().into_iter().zip(&due) {
        let at = due.iter().position(|&token| token == end);
        assert_eq!(generated.tokens, due[..at.map_or(12, |at| at + 1)]);
        assert_eq!(generated.reason, if at.is_some() { FinishReason::End } else { FinishReason::Length });
    }
    let decode = |tokens: &[u32]| Ok(tokens.iter().map(|t| format!("<{t}>")).collect());
    let text = format!("<{}><{}>", due[0][2], due[0][3]);
    let stop = StopTexts { stop_strings: &[&text], decode: &decode };
    let first = generate(&model, &prompts("llama")[..1], &greedy(12), Some(&stop)).unwrap().remove(0);
    assert_eq!((first.tokens.as_slice(), first.reason), (&due[0][..4], FinishReason::Text));
}

#[test]
fn processors_are_those_of_transformers() {
    let path = reference("sampling").join("reference.safetensors");
    let tensors: Vec<(String, Tensor<Cpu>)> = safetensors::load(path, &cpu()).unwrap();
    let get = |name: &str| tensors.iter().find(|(n, _)| n == name).unwrap().1.clone();
    let scores = get("scores").to_vec::<f32>().unwrap();
    let text = get("text").to_vec::<i64>().unwrap();
    for (i, case) in facts("sampling")["cases"].as_array().unwrap().iter().enumerate() {
        let number = |name: &str| case.get(name).and_then(Value::as_f64);
        let options = GenerationOptions {
            sampling: Some(Sampling {
                temperature: number("temperature").unwrap_or(1.0),
                top_k: number("top_k").map(|k| k as usize),
                top_p: number("top_p"),
                min_p: number("min_p"),
                typical_p: number("typical_p"),
            }),
            repetition_penalty: number("repetition_penalty").unwrap_or(1.0),
            ..Default::default()
        };
        let due = get(&format!("processed/{i}")).to_vec::<f32>().unwrap();
        for row in 0..4 {
            let mut own = scores[43 * row..43 * (row + 1)].to_vec();
            let text: Vec<u32> = text[9 * row..9 * (row + 1)].iter().map(|&t| t as u32).collect();
            options.process(&mut own, &text, &[]).unwrap();
            let same = |(a, b): (&f32, &f32)| a == b || (a - b).abs() < 1e-5;
            assert!(own.iter().zip(&due[43 * row..]).all(same), "{case}, row {row}");
        }
    }
}

#[test]
fn what_is_sampled_depends_on_seed_and_stream_alone() {
    let model = decoder("qwen2");
    let prompts = prompts("qwen2");
    let options = |seed| GenerationOptions { sampling: Some(Sampling::default()), seed, ..greedy(10) };
    let prompt = |i: usize, stream| Prompt { stream, ..prompts[i].clone() };
    let sampled = |list: &[Prompt], seed| tokens(generate(&model, list, &options(seed), None).unwrap());
    let alone = sampled(&[prompt(1, 5)], 3).remove(0);
    let batch = sampled(&[prompt(0, 0), prompt(2, 9), prompt(1, 5), prompt(1, 6), prompt(1, 5)], 3);
    assert_eq!((&batch[2], &batch[4]), (&alone, &alone));
    assert_ne!(batch[3], alone);
    assert_ne!(sampled(&[prompt(1, 5)], 4).remove(0), alone);
}

/// Each row goes on to where its own text meets the end of learned positions, whatever the others are.
#[test]
fn a_text_ends_where_learned_positions_do() {
    let model = decoder("gpt2");
    let prompts: Vec<Prompt> = [60, 3, 64].map(|len| vec![1; len].into()).into();
    let alone = |i: usize, new| generate(&model, &prompts[i..i + 1], &greedy(new), None).unwrap().remove(0);
    let batch = generate(&model, &prompts, &greedy(20), None).unwrap();
    let lengths: Vec<_> = batch.iter().map(|g| (g.tokens.len(), g.reason)).collect();
    assert_eq!(lengths, [(5, FinishReason::Length), (20, FinishReason::Length), (1, FinishReason::Length)]);
    for (i, (found, new)) in batch.into_iter().zip([4, 20, 1]).enumerate() {
        assert_eq!(found.tokens[..new], alone(i, new).tokens);
    }
    assert_eq!(alone(1, usize::MAX).tokens.len(), 62);
    // A limit of the whole text is each row's own too.
    let short = GenerationOptions { max_length: Some(62), ..greedy(100) };
    let lengths = |list: &[Prompt]| {
        generate(&model, list, &short, None).map(|all| all.iter().map(|g| g.tokens.len()).collect::<Vec<_>>())
    };
    assert_eq!(lengths(&prompts[..2]).unwrap(), [2, 59]);
    assert!(lengths(&prompts).unwrap_err().to_string().contains("leaves no room"));
}

#[test]
fn options_come_from_the_folder() {
    assert_eq!(GenerationOptions::of_folder(reference("llama")).unwrap().eos_token_ids, [2]);
    let folder = Scratch::copy_of("llama");
    std::fs::write(folder.0.join("generation_config.json"), r#"{"do_sample": true, "eos_token_id": [4, 2]}"#).unwrap();
    let options = GenerationOptions::of_folder(&folder.0).unwrap();
    assert_eq!((options.eos_token_ids.as_slice(), options.sampling.unwrap().top_k), (&[4, 2][..], Some(50)));
    std::fs::remove_file(folder.0.join("generation_config.json")).unwrap();
    // Then the fields of generation in config.json are meant, as transformers 5.24 has it; all others are the model's.
    let folder = folder.with_config(|fields| {
        for (name, value) in [
            ("do_sample", json!(true)),
            ("temperature", json!(0.5)),
            ("top_p", json!(0.9)),
            ("repetition_penalty", json!(1.25)),
            ("eos_token_id", json!(7)),
            ("max_new_tokens", json!(3)),
            ("num_beams", json!(1)),
        ] {
            fields.insert(name.into(), value);
        }
    });
    let sampling = Sampling { temperature: 0.5, top_k: Some(50), top_p: Some(0.9), ..Default::default() };
    let due = GenerationOptions {
        max_new_tokens: 3,
        eos_token_ids: vec![7],
        sampling: Some(sampling),
        repetition_penalty: 1.25,
        ..Default::default()
    };
    assert_eq!(GenerationOptions::of_folder(&folder.0).unwrap(), due);
    Decoder::from_pretrained(&folder.0, &init()).unwrap();
    for (name, value) in [("num_beams", json!(4)), ("stop_strings", json!(["x"])), ("temperature", json!(0.0))] {
        let folder = Scratch::copy_of("llama").with_config(|fields| {
            fields.insert("do_sample".into(), true.into());
            fields.insert(name.into(), value);
        });
        let _ = std::fs::remove_file(folder.0.join("generation_config.json"));
        let error = GenerationOptions::of_folder(&folder.0).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn what_cannot_be_continued_is_an_error() {
    let model = decoder("gpt2");
    let error = |prompt: Vec<u32>, options: &GenerationOptions| {
        generate(&model, &[prompt.into()], options, None).unwrap_err().to_string()
    };
    assert!(error(vec![], &greedy(1)).contains("begin prompt 0 with the token that begins a text"));
    assert!(error(vec![1; 65], &greedy(1)).contains("context of 64"));
    let cold = Sampling { temperature: 0.0, ..Default::default() };
    assert!(error(vec![1], &GenerationOptions { sampling: Some(cold), ..greedy(1) }).contains("temperature"));
    assert!(error(vec![99], &greedy(1)).contains("embed_tokens"));
    // Room for as many is not taken before they come.
    let endless =
        GenerationOptions { eos_token_ids: vec![lists(&facts("llama")["greedy"])[1][4]], ..greedy(usize::MAX) };
    let ended = generate(&decoder("llama"), &prompts("llama")[1..2], &endless, None).unwrap().remove(0);
    assert_eq!((ended.tokens.last(), ended.reason), (endless.eos_token_ids.last(), FinishReason::End));
    assert!(generate(&model, &[], &greedy(3), None).unwrap().is_empty());
    assert!(generate(&model, &[vec![1].into()], &greedy(0), None).unwrap()[0].tokens.is_empty());
}
