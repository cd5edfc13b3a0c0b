//! Text from a decoder that attends to an encoder.

use autograd::{Var, no_grad};
use numcore::{
    DType, Error, Result, Runtime, Tensor, Within,
    fused::NnOps,
    ops::{IndexOps, PointwiseOps, ViewOps},
};

use super::{StackMemory, TextDecoder};
use crate::generate::{Generated, GenerationOptions, Prompt, StopTexts, TextRow};

impl<R: Runtime> TextDecoder<R> {
    /// Continues prompts, one for each row of `memory`: the tokens that begin its text, as many for each. No gradients
    /// are recorded. Rows whose text has ended are computed on until all have.
    ///
    /// # Errors
    /// Fails if prompts are empty, differ in number of tokens, or are not as many as the rows. Fails too if they leave
    /// no room, an option is out of range, a logit is NaN or +∞, or `decode` fails.
    #[track_caller]
    pub fn generate(
        &self,
        memory: &StackMemory<R>,
        prompts: &[Prompt],
        options: &GenerationOptions,
        stop: Option<&StopTexts<'_>>,
    ) -> Result<Vec<Generated>> {
        options.check().at_caller()?;
        let begin = prompts.first().map_or(0, |prompt| prompt.tokens.len());
        if begin == 0 || prompts.len() != memory.rows || prompts.iter().any(|prompt| prompt.tokens.len() != begin) {
            let lengths: Vec<_> = prompts.iter().map(|prompt| prompt.tokens.len()).collect();
            let why =
                format!("prompts of {lengths:?} tokens for {} rows: give one for each, of one length", memory.rows);
            return Err(Error::state("generate", why)).at_caller();
        }
        // The token after the last learned position can be chosen, but not read.
        let most = self.positions().map(|positions| positions + 1).into_iter().chain(options.max_length).min();
        if let Some(most) = most.filter(|&most| begin >= most) {
            let why = format!("a prompt has {begin} tokens, and at most {most} leave no room");
            return Err(Error::config("generate", "max_length", why)).at_caller();
        }
        let rows = prompts.iter().map(TextRow::new).collect();
        no_grad(|| self.run(memory, rows, options, stop, most.unwrap_or(usize::MAX))).at_caller()
    }

    fn run(
        &self,
        memory: &StackMemory<R>,
        mut rows: Vec<TextRow<'_>>,
        options: &GenerationOptions,
        stop: Option<&StopTexts<'_>>,
        most: usize,
    ) -> Result<Vec<Generated>> {
        let count = rows.len();
        let mut tokens: Vec<i64> = rows.iter().flat_map(TextRow::text).collect();
        let mut cache = self.cache((tokens.len() / count).saturating_add(options.max_new_tokens), count);
        let rt = self.embed_tokens.weight.leaf().runtime().clone();
        while options.max_new_tokens > 0 && rows.iter().any(|row| row.ended.is_none()) {
            let read = Var::new(Tensor::from_slice(&rt, [count, tokens.len() / count], &tokens)?);
            let logits = self.logits(&read, memory, Some(&mut cache))?;
            let last = logits.narrow(1, logits.dims()[1] - 1, 1)?;
            let mut scores = last.value()?.to_dtype(DType::F32)?.to_vec::<f32>()?;
            let vocab = scores.len() / count;
            for (row, scores) in
                rows.iter_mut().zip(scores.chunks_exact_mut(vocab)).filter(|(row, _)| row.ended.is_none())
            {
                row.choose(scores, options, stop, most)?;
            }
            tokens = rows.iter().map(TextRow::last).collect();
            if options.logprobs {
                let chosen = Var::new(Tensor::from_slice(&rt, [count, 1, 1], &tokens)?);
                let wide = last.to_dtype(last.dtype().compute())?;
                let logprobs = wide.log_softmax(-1)?.gather(-1, &chosen)?.value()?.to_f64s()?;
                rows.iter_mut().zip(logprobs).for_each(|(row, logprob)| row.add_logprob(logprob));
            }
        }
        Ok(rows.into_iter().map(TextRow::done).collect())
    }
}
