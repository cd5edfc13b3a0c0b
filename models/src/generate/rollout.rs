//! Rollouts: sampled completions with rewards, and the batch that trains on them.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, PointwiseOps},
};

use super::{Generated, GenerationOptions, Prompt, StopTexts, generate};
use crate::Decoder;

/// A sampled completion of a prompt, and its reward.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollout {
    /// The prompt; its stream is the completion's own.
    pub prompt: Prompt,
    /// The completion, with log-probabilities.
    pub completion: Generated,
    /// The reward.
    pub reward: f64,
}

/// Samples `group` completions of each prompt and rewards them. Those of a prompt are consecutive, for
/// [`group_advantages`](nn::loss::group_advantages).
///
/// Completion `i` of a prompt has the stream of random numbers `group · stream + i`: ranks give their prompts streams
/// of their own. Log-probabilities are computed, whatever `options` says, with the bits of training on the CPU: see
/// [`Decoder::logprobs`].
///
/// # Errors
/// Fails if [`generate`] fails, `reward` does, `group` is 0, or `options` does not sample.
#[track_caller]
pub fn rollouts<R: Runtime>(
    model: &Decoder<R>,
    prompts: &[Prompt],
    group: usize,
    options: &GenerationOptions,
    stop: Option<&StopTexts<'_>>,
    mut reward: impl FnMut(&Prompt, &Generated) -> Result<f64>,
) -> Result<Vec<Rollout>> {
    if group == 0 {
        return Err(Error::range("rollouts", "group", group, "at least 1")).at_caller();
    }
    if options.sampling.is_none() {
        let why = "without it all completions of a prompt are one greedy text";
        return Err(Error::config("rollouts", "sampling", why)).at_caller();
    }
    let of = |(prompt, i): (&Prompt, usize)| {
        let stream = prompt.stream.wrapping_mul(group as u64).wrapping_add(i as u64);
        Prompt { stream, ..prompt.clone() }
    };
    let all: Vec<_> = prompts.iter().flat_map(|prompt| (0..group).map(move |i| of((prompt, i)))).collect();
    let options = GenerationOptions { logprobs: true, ..options.clone() };
    let completions = generate(model, &all, &options, stop).at_caller()?;
    let rewarded = |(prompt, completion): (Prompt, Generated)| {
        let reward = reward(&prompt, &completion)?;
        Ok(Rollout { prompt, completion, reward })
    };
    all.into_iter().zip(completions).map(rewarded).collect()
}

/// Rollouts as the rows of a batch, padded on the right: tokens that are read, and tokens that follow them.
#[derive(Clone, Debug)]
pub struct RolloutBatch<R: Runtime> {
    /// The tokens of prompts and completions but their last, `[N, T]` (`i64`).
    pub tokens: Var<R>,
    /// The token after each, `[N, T]` (`i64`): −100 except in completions.
    pub targets: Var<R>,
    /// The log-probabilities of the targets by the model that sampled them, `[N, T]` (`f32`, or the model's `f64`); 0
    /// elsewhere.
    pub old: Var<R>,
    /// True for the targets in completions, `[N, T]` (`bool`).
    pub mask: Var<R>,
}

impl<R: Runtime> RolloutBatch<R> {
    /// The batch of these rollouts for a model of the dtype of the one that sampled them, on its device.
    ///
    /// # Errors
    /// Fails if there are none, a prompt is empty, or a completion has no log-probabilities. Fails too if the batch
    /// would give a text other frequencies of positions than it was sampled with (LongRoPE).
    #[track_caller]
    pub fn new(model: &Decoder<R>, rollouts: &[Rollout]) -> Result<Self> {
        let len = |r: &Rollout| (r.prompt.tokens.len() + r.completion.tokens.len()).saturating_sub(1);
        let width = rollouts.iter().map(len).max().unwrap_or(0);
        if width == 0 || rollouts.iter().any(|r| r.prompt.tokens.is_empty()) {
            return Err(Error::range("RolloutBatch", "length of the prompt", 0usize, "at least 1")).at_caller();
        }
        if let Some(r) = rollouts.iter().find(|r| r.completion.logprobs.len() != r.completion.tokens.len()) {
            let (tokens, logprobs) = (r.completion.tokens.len(), r.completion.logprobs.len());
            let why = format!("a completion of {tokens} tokens has {logprobs} log-probabilities");
            return Err(Error::state("RolloutBatch", why)).at_caller();
        }
        if let Some(most) = model.first_context().filter(|&most| width > most)
            && let Some(at) = rollouts.iter().position(|r| r.prompt.tokens.len() <= most)
        {
            let why = format!(
                "rollout {at} was sampled within the first context of {most} tokens, and a row of {width} has other \
                 positions (`longrope`): set `max_length` to {}, or sample from longer prompts alone",
                most + 1
            );
            return Err(Error::unsupported("RolloutBatch", why)).at_caller();
        }
        let size = rollouts.len() * width;
        let (mut tokens, mut targets, mut old) = (vec![0i64; size], vec![-100i64; size], vec![0f64; size]);
        for (i, r) in rollouts.iter().enumerate() {
            let text: Vec<_> = r.prompt.tokens.iter().chain(&r.completion.tokens).map(|&t| i64::from(t)).collect();
            let (first, end) = (r.prompt.tokens.len(), text.len());
            let at = i * width;
            tokens[at..at + end - 1].copy_from_slice(&text[..end - 1]);
            targets[at + first - 1..at + end - 1].copy_from_slice(&text[first..]);
            old[at + first - 1..at + end - 1].copy_from_slice(&r.completion.logprobs);
        }
        let shape = [rollouts.len(), width];
        let table = model.parts.start().at_caller()?.tokens.weight.var();
        let (rt, dtype) = (table.runtime(), table.dtype().compute());
        let targets = Var::new(Tensor::from_slice(rt, shape, &targets).at_caller()?);
        let mask = targets.ge(0.0).at_caller()?;
        Ok(RolloutBatch {
            tokens: Var::new(Tensor::from_slice(rt, shape, &tokens).at_caller()?),
            targets,
            old: Var::new(Tensor::from_slice(rt, shape, &old).at_caller()?.to_dtype(dtype).at_caller()?),
            mask,
        })
    }
}
