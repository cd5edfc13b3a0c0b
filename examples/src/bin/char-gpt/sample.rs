//! Sampling of text from the model.

use weftgrad::{AnyRuntime, nn::Gpt, prelude::*, rng::Philox};
use weftgrad_examples::text::Corpus;

use crate::command::{Sampling, Settings};

/// Samples characters after a line break, each from the softmax of the likeliest logits.
pub(crate) fn text(
    model: &Gpt<AnyRuntime>,
    rt: &AnyRuntime,
    settings: &Settings,
    corpus: &Corpus,
    sampling: Sampling,
) -> Result<String> {
    let mut rng = Philox::new(settings.seed, 9);
    let mut tokens = vec![corpus.characters.token('\n').unwrap_or(0)];
    for _ in 0..sampling.length {
        let seen = &tokens[tokens.len().saturating_sub(settings.context)..];
        let logits = no_grad(|| next(model, rt, seen))?;
        tokens.push(draw(&logits, sampling, rng.uniform()) as u32);
    }
    corpus.characters.decode(&tokens[1..])
}

/// The logits of the character after `seen`.
fn next(model: &Gpt<AnyRuntime>, rt: &AnyRuntime, seen: &[u32]) -> Result<Vec<f64>> {
    let seen: Vec<i64> = seen.iter().map(|&token| token.into()).collect();
    let x = Var::new(Tensor::from_slice(rt, [1, seen.len()], &seen)?);
    let logits = model.forward(&x)?;
    logits.select(0, 0)?.select(0, seen.len() - 1)?.value()?.to_f64s()
}

/// The class, among the likeliest, at which the running sum of probabilities passes `u`.
fn draw(logits: &[f64], sampling: Sampling, u: f64) -> usize {
    let mut likeliest: Vec<usize> = (0..logits.len()).collect();
    likeliest.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    likeliest.truncate(if sampling.temperature > 0.0 { sampling.top_k } else { 1 });
    let best = likeliest[0];
    let weight = |&class: &usize| ((logits[class] - logits[best]) / sampling.temperature).exp();
    let mut left = u * likeliest.iter().map(weight).sum::<f64>();
    let passed = likeliest.iter().copied().find(|class| {
        left -= weight(class);
        left < 0.0
    });
    passed.unwrap_or(best)
}
