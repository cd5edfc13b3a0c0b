//! Models with real weights, beside transformers: sentence embeddings of MiniLM, and SmolLM2 from a file of four bits.
//!
//! `conformance/against/real_models.py` fetches nothing: it takes the weights from Python packages, computes with
//! transformers, and writes a folder, which this program reads:
//! `cargo run --release -p weftgrad-models --features text --example real_models -- FOLDER`

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use autograd::{Var, no_grad};
use data::sources::Tokenizer;
use models::{
    Bert, BertInputs, ChatTemplate, Conversation, Decoder, GenerationOptions, Pretrained, SentenceEncoder, generate,
};
use nn::{Forward, Init, loss::cross_entropy};
use numcore::{
    Error, Result, Tensor,
    ops::{ReduceOps, ViewOps},
    safetensors,
};
use optim::{AdamW, AdamWConfig, Optimizer};
use runtime_cpu::Cpu;
use serde_json::Value;

/// Threads on both sides.
const THREADS: usize = 2;

fn main() -> Result<()> {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        return Err(Error::argument("real_models", "which folder has the models and what transformers computed?"));
    };
    let path = folder.join("facts.json");
    let text = fs::read(&path).map_err(|e| Error::io(&path, e))?;
    let facts: Value = serde_json::from_slice(&text).map_err(|e| Error::format("facts.json", e.to_string()))?;
    let cpu = Cpu::with_threads(THREADS);
    println!("{THREADS} threads, beside {}", facts["versions"]);
    minilm(&folder, &facts["minilm"], &cpu)?;
    smollm(&folder, &facts["smollm2"], &cpu)
}

/// Prints a line, and fails unless `holds`.
fn check(what: &str, holds: bool) -> Result<()> {
    println!("{} {what}", if holds { "ok " } else { "NO " });
    if holds { Ok(()) } else { Err(Error::state("real_models", what.to_string())) }
}

/// The result of `work`, and its seconds.
fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    Ok((work()?, start.elapsed().as_secs_f64()))
}

/// A tensor of a file.
fn tensor(path: &Path, name: &str, cpu: &Cpu) -> Result<Tensor<Cpu>> {
    let found = safetensors::load(path, cpu)?.into_iter().find(|(own, _)| own == name);
    found
        .map(|(_, tensor)| tensor)
        .ok_or_else(|| Error::format(path.display().to_string(), format!("it has no {name}")))
}

fn largest_difference(a: &Tensor<Cpu>, b: &Tensor<Cpu>) -> Result<f64> {
    let (a, b) = (a.to_f64s()?, b.to_f64s()?);
    Ok(a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(if a.len() == b.len() { 0.0 } else { f64::NAN }, f64::max))
}

fn text_of<'a>(facts: &'a Value, name: &str) -> &'a str {
    facts[name].as_str().unwrap_or_default()
}

fn tokens_of(facts: &Value, name: &str) -> Vec<u32> {
    facts[name].as_array().into_iter().flatten().filter_map(|x| Some(x.as_u64()? as u32)).collect()
}

fn minilm(folder: &Path, facts: &Value, cpu: &Cpu) -> Result<()> {
    let encoder = SentenceEncoder::from_pretrained(folder.join("minilm"), &Init::new(cpu, 0))?;
    let texts: Vec<&str> = facts["texts"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    encoder.encode(&texts[..64.min(texts.len())])?;
    let (vectors, seconds) = timed(|| encoder.encode(&texts))?;
    let apart = largest_difference(&vectors, &tensor(&folder.join("minilm.safetensors"), "embeddings", cpu)?)?;
    let theirs = facts["seconds"].as_f64().unwrap_or(f64::NAN);
    println!("    MiniLM: {seconds:.2} s, sentence-transformers {theirs:.2} s ({:.2} times)", theirs / seconds);
    check(
        &format!("{} embeddings are within 1e-5 of sentence-transformers': {apart:.1e}", texts.len()),
        apart <= 1e-5,
    )?;
    classifier(folder, &facts["classifier"], cpu)
}

/// Trains MiniLM to tell what sentences are about, in the batches of transformers.
fn classifier(folder: &Path, facts: &Value, cpu: &Cpu) -> Result<()> {
    let model = Bert::from_pretrained(folder.join("minilm-classifier"), &Init::new(cpu, 0))?;
    let all = |name| tensor(&folder.join("minilm-classifier.safetensors"), name, cpu);
    let (ids, mask, labels) = (all("ids")?, all("mask")?, all("labels")?);
    let count = |name: &str| facts[name].as_u64().unwrap_or(0) as usize;
    let (trained, batch, tested) = (count("trained"), count("batch"), ids.dims()[0] - count("trained"));
    let logits = |first, rows| {
        let [ids, mask] = [&ids, &mask].map(|x| x.narrow(0, first, rows).map(Var::new));
        model.forward_with(&ids?, &BertInputs { mask: Some(&mask?), ..BertInputs::default() })
    };
    let mut optimizer = AdamW::new(&model, AdamWConfig { lr: 5e-5, weight_decay: 0.0, ..AdamWConfig::default() })?;
    let mut apart = 0f64;
    for (step, theirs) in facts["losses"].as_array().into_iter().flatten().filter_map(Value::as_f64).enumerate() {
        let first = step * batch % trained;
        let loss = cross_entropy(&logits(first, batch)?, &Var::new(labels.narrow(0, first, batch)?))?;
        optimizer.backward(&loss)?;
        optimizer.step()?;
        apart = apart.max((loss.item()? - theirs).abs());
    }
    let classes = no_grad(|| logits(trained, tested))?.value()?.argmax(1)?.to_f64s()?;
    let due = labels.narrow(0, trained, tested)?.to_f64s()?;
    let right = classes.iter().zip(&due).filter(|(a, b)| a == b).count();
    let [ours, theirs] = [right, count("right")].map(|right| right as f64 / tested as f64);
    check(&format!("losses of its training are within 2e-3 of transformers': {apart:.1e}"), apart <= 2e-3)?;
    check(
        &format!("it classifies {ours:.3} of {tested} sentences, transformers {theirs:.3}"),
        (ours - theirs).abs() <= 0.015 && ours >= 0.8,
    )
}

fn smollm(folder: &Path, facts: &Value, cpu: &Cpu) -> Result<()> {
    let (file, due) = (folder.join("smollm2.gguf"), folder.join("smollm2.safetensors"));
    let (model, seconds) = timed(|| Decoder::from_pretrained(&file, &Init::new(cpu, 0)))?;
    println!(
        "    SmolLM2: read in {seconds:.2} s, transformers {:.2} s",
        facts["seconds_load"].as_f64().unwrap_or(f64::NAN)
    );
    let (tokenizer, template) = (Tokenizer::open(&file)?, ChatTemplate::of_folder(&file)?);
    let text = template.render(&Conversation::new().with("user", text_of(facts, "prompt")), true)?;
    check("the chat template gives transformers' text", text == text_of(facts, "text"))?;
    let prompt = tokenizer.encode(&text)?;
    check("the tokenizer gives transformers' tokens", prompt == tokens_of(facts, "ids"))?;

    let ids: Vec<i64> = prompt.iter().map(|&id| i64::from(id)).collect();
    let ids = Var::new(Tensor::from_slice(cpu, [1, ids.len()], &ids)?);
    let logits = no_grad(|| model.forward(&ids))?.value()?.squeeze(0)?;
    let apart = largest_difference(&logits, &tensor(&due, "logits", cpu)?)?;
    check(&format!("logits are within 2e-4 of transformers': {apart:.1e}"), apart <= 2e-4)?;

    let greedy = tokens_of(facts, "greedy");
    let options = |new| GenerationOptions { max_new_tokens: new, ..GenerationOptions::default() };
    generate(&model, &[prompt.clone().into()], &options(4), None)?;
    let (texts, seconds) = timed(|| generate(&model, &[prompt.into()], &options(greedy.len()), None))?;
    let theirs = facts["seconds"].as_f64().unwrap_or(f64::NAN);
    let llama = facts["seconds_llama"].as_f64().unwrap_or(f64::NAN);
    let rate = |seconds| greedy.len() as f64 / seconds;
    println!(
        "    {:.1} tokens a second, transformers {:.1} ({:.2} times), llama.cpp with products of four bits {:.1}",
        rate(seconds),
        rate(theirs),
        theirs / seconds,
        rate(llama)
    );
    check(&format!("{} greedy tokens are transformers'", greedy.len()), texts[0].tokens == greedy)?;

    let corpus = tensor(&due, "corpus", cpu)?;
    let loss = no_grad(|| -> Result<f64> {
        let next = corpus.narrow(1, 1, corpus.dims()[1] - 1)?;
        let logits = model.forward(&Var::new(corpus.clone()))?.narrow(1, 0, next.dims()[1])?;
        cross_entropy(&logits, &Var::new(next))?.item()
    })?;
    let theirs = facts["loss"].as_f64().unwrap_or(f64::NAN);
    let (ours, theirs) = (loss.exp(), theirs.exp());
    check(
        &format!("perplexity is transformers' to four digits: {ours:.5}, {theirs:.5}"),
        (ours / theirs - 1.0).abs() < 5e-5,
    )
}
