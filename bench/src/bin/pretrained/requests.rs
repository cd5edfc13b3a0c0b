//! The requests, and the state that is kept between them.

use std::{fs, path::PathBuf, time::Instant};

use weftgrad::{
    Cpu, Error, Result, Runtime, Tensor, Var,
    models::{Decoder, GenerationOptions, Lora, Pretrained, Prompt, QuantizeConfig, generate, quantize},
    nn::{Forward, Init, ModuleExt, loss::cross_entropy},
    ops::{ReduceOps, ViewOps},
    optim::{AdamW, AdamWConfig, Optimizer},
};

/// A folder's model, and the state derived from it.
pub(crate) struct Server {
    folder: PathBuf,
    cpu: Cpu,
    model: Option<Decoder<Cpu>>,
    trained: Option<Trained>,
    numbers: Option<Tensor<Cpu>>,
}

/// A model under an adapter that is trained.
struct Trained {
    kind: String,
    model: Decoder<Cpu>,
    optimizer: AdamW<Cpu>,
    _lora: Lora<Cpu>,
}

/// Token `i` of a text that both frameworks generate.
fn token(i: usize, vocab: usize) -> i64 {
    ((i * 7919 + 13) % vocab) as i64
}

impl Server {
    /// Creates a server; nothing is read yet.
    pub(crate) fn new(folder: PathBuf, cpu: Cpu) -> Self {
        Server { folder, cpu, model: None, trained: None, numbers: None }
    }

    /// Answers a request, in one line.
    pub(crate) fn answer(&mut self, words: &[&str]) -> Result<String> {
        let number = |at: usize| {
            let word = words.get(at).and_then(|word| word.parse::<usize>().ok());
            word.ok_or_else(|| Error::argument("pretrained", format!("{words:?} lacks a number")))
        };
        match words.first().copied() {
            Some("load") => self.load(),
            Some("decode") => self.decode(number(1)?, number(2)?),
            Some(kind @ ("lora" | "lora4bit")) => self.step(kind, number(1)?, number(2)?),
            Some("read") => self.read(number(1)?),
            Some("rss") => Ok(format!("{} {}", resident_kib(), self.cpu.memory().total.peak / 1024)),
            _ => Err(Error::argument("pretrained", format!("{words:?} is no request"))),
        }
    }

    fn load(&mut self) -> Result<String> {
        (self.model, self.trained) = (None, None);
        let start = Instant::now();
        let model = Decoder::from_pretrained(&self.folder, &Init::new(&self.cpu, 0))?;
        let spent = start.elapsed().as_nanos();
        let count: usize = model.parameters().iter().map(|p| p.shape().numel()).sum();
        self.model = Some(model);
        Ok(format!("{spent} {count}"))
    }

    fn decode(&mut self, prompt: usize, new: usize) -> Result<String> {
        if self.model.is_none() {
            self.load()?;
        }
        let Some(model) = &self.model else { return Err(Error::argument("pretrained", "there is no model")) };
        let tokens = (0..prompt).map(|i| token(i, model.config().vocab) as u32).collect();
        let options = GenerationOptions { max_new_tokens: new, ..GenerationOptions::default() };
        let start = Instant::now();
        let found = generate(model, &[Prompt { tokens, stream: 0 }], &options, None)?;
        let spent = start.elapsed().as_nanos() / new as u128;
        let words: Vec<String> = found[0].tokens.iter().map(u32::to_string).collect();
        Ok(format!("{spent} {}", words.join(",")))
    }

    fn step(&mut self, kind: &str, rows: usize, tokens: usize) -> Result<String> {
        if self.trained.as_ref().is_none_or(|trained| trained.kind != kind) {
            self.trained = None;
            self.trained = Some(self.trained(kind)?);
        }
        let Some(trained) = &mut self.trained else { return Err(Error::argument("pretrained", "there is no adapter")) };
        let vocab = trained.model.config().vocab;
        let text: Vec<i64> = (0..rows * (tokens + 1)).map(|i| token(i, vocab)).collect();
        let text = Var::new(Tensor::from_slice(&self.cpu, [rows, tokens + 1], &text)?);
        let (inputs, targets) = (text.narrow(1, 0, tokens)?, text.narrow(1, 1, tokens)?);
        let start = Instant::now();
        let loss = cross_entropy(&trained.model.forward(&inputs)?, &targets)?;
        trained.optimizer.backward(&loss)?;
        trained.optimizer.step()?;
        let loss = loss.item()?;
        Ok(format!("{} {loss}", start.elapsed().as_nanos()))
    }

    fn trained(&mut self, kind: &str) -> Result<Trained> {
        self.model = None;
        let init = Init::new(&self.cpu, 0);
        let model = if kind == "lora4bit" {
            let model = Decoder::from_pretrained(&self.folder, &init.clone().lazily())?;
            quantize(&model, &QuantizeConfig::default())?;
            model
        } else {
            Decoder::from_pretrained(&self.folder, &init)?
        };
        let lora = Lora::load(&model, &init, self.folder.join("adapter"))?;
        let optimizer = AdamW::new(&lora, AdamWConfig { lr: 1e-3, weight_decay: 0.0, ..Default::default() })?;
        Ok(Trained { kind: kind.to_owned(), model, optimizer, _lora: lora })
    }

    fn read(&mut self, count: usize) -> Result<String> {
        if self.numbers.as_ref().is_none_or(|numbers| numbers.shape().numel() != count) {
            self.numbers = Some(Tensor::ones(&self.cpu, [count], weftgrad::DType::F32)?);
        }
        let Some(numbers) = &self.numbers else { return Err(Error::argument("pretrained", "there are no numbers")) };
        let start = Instant::now();
        let sum = numbers.sum(&[0])?.item()?;
        Ok(format!("{} {sum}", start.elapsed().as_nanos()))
    }
}

/// The most memory that this process ever had resident, in KiB, as the kernel counts it.
fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}
