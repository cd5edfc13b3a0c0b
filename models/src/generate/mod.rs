//! Text from a decoder, greedy or sampled, for samples during training and evaluation. It is no server: a batch begins
//! and ends together.

mod options;
mod processors;
mod stop;

use autograd::{Var, no_grad};
use nn::{ModuleExt, parallel::TensorStyle};
use numcore::{
    DType, Error, Result, Runtime, Tensor, Within,
    ops::{PointwiseOps, ViewOps},
};

pub use options::{GenerationOptions, Sampling};
use processors::{Draw, process};
pub use stop::{FinishReason, StopTexts};

use crate::{Decoder, DecoderInputs};

/// A prompt: the tokens that are to be continued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The tokens of the prompt.
    pub tokens: Vec<u32>,
    /// The stream of random numbers that its continuation is drawn from. Prompts of one stream get the same random
    /// numbers, in any batch and row. Give each prompt its own stream where samples should be independent.
    pub stream: u64,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Prompt { tokens, stream: 0 }
    }
}

/// The continuation of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The tokens after the prompt, with the stop token if one ended the text.
    pub tokens: Vec<u32>,
    /// The reason why the text ended.
    pub reason: FinishReason,
}

/// Continues prompts, which may differ in length. No gradients are recorded.
///
/// # Errors
/// Fails if a prompt is empty, leaves no room within `max_length`, or is longer than learned positions reach. Fails too
/// if an option is out of range, a logit is NaN or +∞, or `decode` fails. A model whose experts are shared out among
/// ranks is an error: ranks have prompts of their own, and would end at different tokens.
#[track_caller]
pub fn generate<R: Runtime>(
    model: &Decoder<R>,
    prompts: &[Prompt],
    options: &GenerationOptions,
    stop: Option<&StopTexts<'_>>,
) -> Result<Vec<Generated>> {
    options.check().at_caller()?;
    let shared_out = |p: &nn::Param<R>| p.placed().is_some_and(|placed| placed.style() == TensorStyle::Experts);
    if let Some((name, _)) = model.named_parameters().into_iter().find(|(_, p)| shared_out(p)) {
        let why = "is of experts that are shared out among ranks, all of which every token needs: generate with a whole model, into which a \
                   checkpoint's parameters are loaded";
        return Err(Error::state(name, why)).at_caller();
    }
    if let Some(at) = prompts.iter().position(|prompt| prompt.tokens.is_empty()) {
        let allowed = format!("at least 1: begin prompt {at} with the token that begins a text");
        return Err(Error::range("generate", "length of the prompt", 0usize, allowed)).at_caller();
    }
    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    if let Some(most) = options.max_length.filter(|&most| longest >= most) {
        let why = format!("a prompt has {longest} tokens, and `max_length` of {most} leaves no room");
        return Err(Error::config("generate", "max_length", why)).at_caller();
    }
    if prompts.is_empty() || options.max_new_tokens == 0 {
        let nothing = |_: &Prompt| Generated { tokens: Vec::new(), reason: FinishReason::Length };
        return Ok(prompts.iter().map(nothing).collect());
    }
    no_grad(|| Batch::new(model, prompts, options, stop)?.run()).at_caller()
}

/// The rows that are being continued.
struct Batch<'a, R: Runtime> {
    model: &'a Decoder<R>,
    options: &'a GenerationOptions,
    stop: Option<&'a StopTexts<'a>>,
    rows: Vec<Row<'a>>,
    width: usize,
}

struct Row<'a> {
    prompt: &'a Prompt,
    new: Vec<u32>,
    ended: Option<FinishReason>,
}

impl<'a, R: Runtime> Batch<'a, R> {
    fn new(
        model: &'a Decoder<R>,
        prompts: &'a [Prompt],
        options: &'a GenerationOptions,
        stop: Option<&'a StopTexts<'a>>,
    ) -> Result<Self> {
        let row = |prompt: &'a Prompt| Row { prompt, new: Vec::new(), ended: None };
        let width = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
        Ok(Batch { model, options, stop, rows: prompts.iter().map(row).collect(), width })
    }

    fn run(mut self) -> Result<Vec<Generated>> {
        let padding = self.rows.iter().map(|row| self.width - row.prompt.tokens.len()).collect();
        // The last token is never read back by the model.
        let capacity = self.width.saturating_add(self.options.max_new_tokens - 1);
        let mut cache = self.model.cache(capacity, padding);
        let mut tokens = self.prompts()?;
        for step in 0..self.options.max_new_tokens {
            let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
            let states = self.model.states(&tokens, inputs)?;
            let last = states.narrow(1, states.dims()[1] - 1, 1)?;
            let logits = self.model.logits(&last)?.value()?.to_dtype(DType::F32)?.to_vec::<f32>()?;
            self.extend(step, logits)?;
            for (i, _) in self.rows.iter().enumerate().filter(|(_, row)| row.ended.is_some()) {
                cache.end(i);
            }
            if self.rows.iter().all(|row| row.ended.is_some()) {
                break;
            }
            tokens = self.last_tokens()?;
        }
        let generated = |row: Row<'_>| Generated { tokens: row.new, reason: row.ended.unwrap_or(FinishReason::Length) };
        Ok(self.rows.into_iter().map(generated).collect())
    }

    /// The prompts `[B, T]`, padded on the left.
    fn prompts(&self) -> Result<Var<R>> {
        let padded = |row: &Row<'_>| {
            let pad = std::iter::repeat_n(0, self.width - row.prompt.tokens.len());
            pad.chain(row.prompt.tokens.iter().map(|&token| i64::from(token))).collect::<Vec<_>>()
        };
        self.tokens(&self.rows.iter().flat_map(padded).collect::<Vec<_>>())
    }

    /// The newest token of each row, `[B, 1]`; rows that ended repeat their last.
    fn last_tokens(&self) -> Result<Var<R>> {
        let last = |row: &Row<'_>| i64::from(row.new.last().copied().unwrap_or(0));
        self.tokens(&self.rows.iter().map(last).collect::<Vec<_>>())
    }

    fn tokens(&self, tokens: &[i64]) -> Result<Var<R>> {
        let rows = self.rows.len();
        let rt = self.model.parts.start()?.tokens.weight.leaf().runtime().clone();
        Ok(Var::new(Tensor::from_slice(&rt, [rows, tokens.len() / rows], tokens)?))
    }

    /// The most tokens of a row's text. The token after the last learned position can be chosen, but not read.
    fn most(&self) -> usize {
        let config = self.model.config();
        let learned = config.rope.is_none().then_some(config.context + 1);
        learned.into_iter().chain(self.options.max_length).min().unwrap_or(usize::MAX)
    }

    /// Chooses the next token of each row that has not ended, by logits `[B, V]`.
    fn extend(&mut self, step: usize, mut logits: Vec<f32>) -> Result<()> {
        let vocab = logits.len() / self.rows.len();
        let (options, stop, most) = (self.options, self.stop, self.most());
        for (row, scores) in self.rows.iter_mut().zip(logits.chunks_exact_mut(vocab)) {
            if row.ended.is_some() {
                continue;
            }
            process(scores, &[&row.prompt.tokens, &row.new], options).within(format_args!("new token {step}"))?;
            let draw = Draw { seed: options.seed, stream: row.prompt.stream, step: step as u64 };
            let token = draw.choose(scores, options.sampling.is_some())?;
            row.new.push(token);
            row.ended = match options.eos_token_ids.contains(&token) {
                true => Some(FinishReason::End),
                false => stop.map_or(Ok(None), |stop| stop.reached(&row.new))?,
            };
            let len = row.prompt.tokens.len() + row.new.len();
            row.ended = row.ended.or((len >= most).then_some(FinishReason::Length));
        }
        Ok(())
    }
}
