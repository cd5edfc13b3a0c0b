//! A text that is being continued.

use numcore::{Result, Within};

use super::{Draw, FinishReason, Generated, GenerationOptions, Prompt, StopTexts, process};

/// A prompt and what follows it so far.
pub(crate) struct TextRow<'a> {
    prompt: &'a Prompt,
    new: Vec<u32>,
    logprobs: Vec<f64>,
    pub ended: Option<FinishReason>,
}

impl<'a> TextRow<'a> {
    pub(crate) fn new(prompt: &'a Prompt) -> Self {
        TextRow { prompt, new: Vec::new(), logprobs: Vec::new(), ended: None }
    }

    /// The number of all tokens.
    pub(crate) fn len(&self) -> usize {
        self.prompt.tokens.len() + self.new.len()
    }

    /// All tokens.
    pub(crate) fn text(&self) -> impl Iterator<Item = i64> {
        self.prompt.tokens.iter().chain(&self.new).map(|&token| i64::from(token))
    }

    /// The last new token; 0 before the first.
    pub(crate) fn last(&self) -> i64 {
        i64::from(self.new.last().copied().unwrap_or(0))
    }

    /// Chooses the next token by its scores, of a text of `most` tokens or less.
    pub(crate) fn choose(
        &mut self,
        scores: &mut [f32],
        options: &GenerationOptions,
        stop: Option<&StopTexts<'_>>,
        most: usize,
    ) -> Result<()> {
        let step = self.new.len();
        process(scores, &self.prompt.tokens, &self.new, options).within(format_args!("new token {step}"))?;
        let draw = Draw { seed: options.seed, stream: self.prompt.stream, step: step as u64 };
        let token = draw.choose(scores, options.sampling.is_some())?;
        self.new.push(token);
        self.ended = match options.eos_token_ids.contains(&token) {
            true => Some(FinishReason::End),
            false => stop.map_or(Ok(None), |stop| stop.reached(&self.new))?,
        };
        let full = self.len() >= most || self.new.len() == options.max_new_tokens;
        self.ended = self.ended.or(full.then_some(FinishReason::Length));
        Ok(())
    }

    /// Adds the log-probability of the last token, unless it has one.
    pub(crate) fn add_logprob(&mut self, logprob: f64) {
        if self.logprobs.len() < self.new.len() {
            self.logprobs.push(logprob);
        }
    }

    pub(crate) fn done(self) -> Generated {
        let reason = self.ended.unwrap_or(FinishReason::Length);
        Generated { tokens: self.new, logprobs: self.logprobs, reason }
    }
}
