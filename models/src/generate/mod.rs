//! Text from a decoder, greedy or sampled: for samples during training, for evaluation and for rollouts. Of many
//! prompts some are in the batch at a time, and the next takes the place of one that ends (continuous batching).

mod options;
mod processors;
mod rollout;
mod row;
mod stop;
mod time_stamps;

use autograd::{Var, no_grad};
use nn::{ModuleExt, parallel::TensorStyle};
use numcore::{
    DType, Error, Result, Runtime, Tensor, Within,
    ops::{PointwiseOps, ViewOps},
};

pub use options::{GenerationOptions, Sampling};
use processors::{Draw, process};
pub use rollout::{Rollout, RolloutBatch, rollouts};
pub(crate) use row::TextRow;
pub use stop::{FinishReason, StopTexts};
pub use time_stamps::TimeStampRules;

use crate::{Decoder, DecoderInputs, KvCache};

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
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The tokens after the prompt, with the stop token if one ended the text.
    pub tokens: Vec<u32>,
    /// The model's log-probability of each token ([`Decoder::logprobs`]), if
    /// [`logprobs`](GenerationOptions::logprobs) is set; of no token otherwise. No option of sampling changes it.
    pub logprobs: Vec<f64>,
    /// The reason why the text ended.
    pub reason: FinishReason,
}

/// Continues prompts, which may differ in length. No gradients are recorded. With
/// [`rows`](GenerationOptions::rows) prompts wait until another text ends. The texts are the
/// same where [`Decoder::logprobs`] has the same bits in any batch; elsewhere rounding may change a draw.
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
        let nothing = |_: &Prompt| Generated { tokens: vec![], logprobs: vec![], reason: FinishReason::Length };
        return Ok(prompts.iter().map(nothing).collect());
    }
    no_grad(|| Batch::new(model, options, stop).run(prompts)).at_caller()
}

/// The texts that are being continued, in order of the prompts as long as none ends.
struct Batch<'a, R: Runtime> {
    model: &'a Decoder<R>,
    options: &'a GenerationOptions,
    stop: Option<&'a StopTexts<'a>>,
    rows: Vec<Row<'a>>,
    /// The keys and values of all tokens of the rows but their last.
    cache: Option<KvCache<R>>,
}

struct Row<'a> {
    /// The index of the prompt.
    at: usize,
    text: TextRow<'a>,
}

/// The rows of a cache whose text goes on.
fn going<'c, R: Runtime>(cache: &'c Option<KvCache<R>>, rows: &[Row<'_>]) -> Vec<(&'c KvCache<R>, usize)> {
    let all = rows.iter().enumerate().filter(|(_, row)| row.text.ended.is_none());
    all.filter_map(|(i, _)| Some((cache.as_ref()?, i))).collect()
}

impl<'a, R: Runtime> Batch<'a, R> {
    fn new(model: &'a Decoder<R>, options: &'a GenerationOptions, stop: Option<&'a StopTexts<'a>>) -> Self {
        Batch { model, options, stop, rows: Vec::new(), cache: None }
    }

    fn run(mut self, prompts: &'a [Prompt]) -> Result<Vec<Generated>> {
        let most = self.options.rows.unwrap_or(prompts.len());
        let mut waiting = prompts.iter().enumerate();
        let mut done: Vec<Option<Generated>> = vec![None; prompts.len()];
        loop {
            let ended = self.rows.iter().filter(|row| row.text.ended.is_some()).count();
            let fits = most - (self.rows.len() - ended);
            // Places are given to others all at once, or, at the end, given up when half of them are empty.
            if self.rows.is_empty() || waiting.len() > 0 && ended > 0 || 2 * ended >= self.rows.len() {
                let next = waiting.by_ref().take(fits).map(|(at, prompt)| Row { at, text: TextRow::new(prompt) });
                for row in self.exchange(next.collect())? {
                    done[row.at] = Some(row.text.done());
                }
                if self.rows.is_empty() && waiting.len() == 0 {
                    return Ok(done.into_iter().flatten().collect());
                }
            }
            if self.rows.iter().any(|row| row.text.ended.is_none()) {
                self.step()?;
            }
        }
    }

    /// Takes the rows whose text has ended out of the batch, and `next` into it, with their first token.
    fn exchange(&mut self, mut next: Vec<Row<'a>>) -> Result<Vec<Row<'a>>> {
        let mut begun = None;
        if !next.is_empty() {
            let (tokens, mut cache) = self.begin(&next);
            self.extend(&mut next, &tokens, &mut cache)?;
            begun = Some(cache);
        }
        let old = std::mem::take(&mut self.rows);
        let cache = match old.is_empty() && next.iter().all(|row| row.text.ended.is_none()) {
            true => begun,
            false => {
                let parts = [going(&self.cache, &old), going(&begun, &next)].concat();
                let longest = parts.iter().map(|(cache, _)| cache.len()).max().unwrap_or(0);
                Some(KvCache::of_rows(&parts, longest.saturating_add(self.options.max_new_tokens))?)
            }
        };
        let (rows, ended): (Vec<_>, Vec<_>) = old.into_iter().chain(next).partition(|row| row.text.ended.is_none());
        (self.rows, self.cache) = (rows, cache);
        Ok(ended)
    }

    /// All tokens of rows, padded on the left, and an empty cache for them.
    fn begin(&self, rows: &[Row<'_>]) -> (Vec<i64>, KvCache<R>) {
        let width = rows.iter().map(|row| row.text.len()).max().unwrap_or(0);
        let padding: Vec<_> = rows.iter().map(|row| width - row.text.len()).collect();
        let padded = |(row, &pad)| std::iter::repeat_n(0, pad).chain(TextRow::text(row));
        let tokens: Vec<_> = rows.iter().map(|row| &row.text).zip(&padding).flat_map(padded).collect();
        // The last token is never read back by the model.
        let capacity = width.saturating_add(self.options.max_new_tokens - 1);
        (tokens, self.model.cache(capacity, padding))
    }

    /// Adds a token to each row. Rows that ended repeat their last.
    fn step(&mut self) -> Result<()> {
        let mut tokens: Vec<_> = self.rows.iter().map(|row| row.text.last()).collect();
        let (mut rows, cache) = (std::mem::take(&mut self.rows), self.cache.take());
        if let Some(mut cache) = cache {
            if self.model.outgrows(&cache, 1).is_some() {
                (tokens, cache) = self.begin(&rows);
            }
            self.extend(&mut rows, &tokens, &mut cache)?;
            for (i, _) in rows.iter().enumerate().filter(|(_, row)| row.text.ended.is_some()) {
                cache.end(i);
            }
            self.cache = Some(cache);
        }
        self.rows = rows;
        Ok(())
    }

    /// The most tokens of a row's text. The token after the last learned position can be chosen, but not read.
    fn most(&self) -> usize {
        let config = self.model.config();
        let learned = config.rope.is_none().then_some(config.context + 1);
        learned.into_iter().chain(self.options.max_length).min().unwrap_or(usize::MAX)
    }

    /// Reads tokens `[B, T]` and chooses the next token of each row that has not ended.
    fn extend(&self, rows: &mut [Row<'a>], tokens: &[i64], cache: &mut KvCache<R>) -> Result<()> {
        let (model, options, stop, most) = (self.model, self.options, self.stop, self.most());
        let rt = model.parts.start()?.tokens.weight.leaf().runtime().clone();
        let read = |tokens: &[i64]| {
            Ok::<_, Error>(Var::new(Tensor::from_slice(&rt, [rows.len(), tokens.len() / rows.len()], tokens)?))
        };
        let states = model.states(&read(tokens)?, DecoderInputs { cache: Some(cache), ..Default::default() })?;
        let last = states.narrow(1, states.dims()[1] - 1, 1)?;
        let mut logits = model.logits(&last)?.value()?.to_dtype(DType::F32)?.to_vec::<f32>()?;
        let vocab = logits.len() / rows.len();
        let texts = rows.iter_mut().map(|row| &mut row.text).zip(logits.chunks_exact_mut(vocab));
        for (text, scores) in texts.filter(|(text, _)| text.ended.is_none()) {
            text.choose(scores, options, stop, most)?;
        }
        if options.logprobs {
            let chosen: Vec<_> = rows.iter().map(|row| row.text.last()).collect();
            let logprobs = model.logprobs(&last, &Var::new(Tensor::from_slice(&rt, [rows.len(), 1], &chosen)?))?;
            let logprobs = logprobs.value()?.to_f64s()?;
            rows.iter_mut().zip(logprobs).for_each(|(row, logprob)| row.text.add_logprob(logprob));
        }
        Ok(())
    }
}
