//! Generates text with a Hugging Face model folder: a continuation, or a chat model's answer, optionally with an
//! adapter.
#![forbid(unsafe_code)]

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use weftgrad::{
    data::sources::Tokenizer,
    models::{
        ChatTemplate, Conversation, Decoder, GenerationOptions, Lora, Pretrained, Prompt, Sampling, StopTexts, generate,
    },
    nn::Init,
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, OnThreads, positive},
};

/// Continue a text, or answer one.
#[derive(Debug, Parser)]
#[command(name = "generate", version)]
struct Options {
    /// The folder of a GPT-2, Llama, Mistral or Qwen.
    folder: PathBuf,
    /// The text to continue or to answer.
    prompt: String,
    /// Take the text as a user's message, and answer it by the model's chat template.
    #[arg(long)]
    chat: bool,
    /// The folder of an adapter, as `finetune` or peft writes it.
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Maximum number of tokens to generate.
    #[arg(long, default_value = "60", value_parser = positive)]
    tokens: usize,
    /// Sampling temperature [default: the folder's, or the likeliest token].
    #[arg(long)]
    temperature: Option<f64>,
    /// Seed of the sampling; each gives another text.
    #[arg(long, default_value = "0")]
    seed: u64,
    /// A text that ends the continuation.
    #[arg(long)]
    stop: Vec<String>,
    #[command(flatten)]
    on: OnThreads,
}

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let init = Init::new(&options.on.open()?, 0);
    let tokenizer = Tokenizer::open(options.folder.join("tokenizer.json"))?;
    let model = Decoder::from_pretrained(&options.folder, &init)?;
    let _adapter = options.adapter.as_ref().map(|folder| Lora::load(&model, &init, folder)).transpose()?;
    model.eval();
    let prompt = match options.chat {
        false => tokenizer.encode_with_special(&options.prompt)?,
        true => {
            let talk = Conversation::new().with("user", &options.prompt);
            tokenizer.encode(&ChatTemplate::of_folder(&options.folder)?.render(&talk, true)?)?
        }
    };
    let own = GenerationOptions::of_folder(&options.folder)?;
    let bold = |temperature| Sampling { temperature, ..own.sampling.unwrap_or_default() };
    let sampling = options.temperature.map(bold).or(own.sampling);
    let settings = GenerationOptions { max_new_tokens: options.tokens, sampling, seed: options.seed, ..own };
    let texts: Vec<&str> = options.stop.iter().map(String::as_str).collect();
    let decode = |tokens: &[u32]| tokenizer.decode(tokens);
    let stop = StopTexts { stop_strings: &texts, decode: &decode };
    let found = generate(&model, &[Prompt::from(prompt)], &settings, Some(&stop))?.remove(0);
    println!("{}", tokenizer.decode(&found.tokens)?);
    Ok(())
}
