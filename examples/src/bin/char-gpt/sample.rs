//! Text the model writes.

use weftgrad::{prelude::*, rng::Philox};
use weftgrad_examples::{Outcome, text::Corpus};

use crate::{command::Sampling, training::Training};

/// Characters after a line break, each drawn from the softmax of the model's likeliest ones.
pub fn text(training: &Training<'_>, corpus: &Corpus, sampling: Sampling) -> Outcome<String> {
    let context = training.settings.model.context;
    let mut rng = Philox::new(training.settings.seed, 9);
    let mut tokens = vec![corpus.token('\n').unwrap_or(0)];
    for _ in 0..sampling.length {
        let seen = &tokens[tokens.len().saturating_sub(context)..];
        let logits = no_grad(|| next(training, seen))?;
        tokens.push(draw(&logits, sampling, rng.uniform()) as i64);
    }
    Ok(tokens[1..].iter().map(|&t| corpus.vocabulary[t as usize]).collect())
}

/// The logits of what follows `seen`.
fn next(training: &Training<'_>, seen: &[i64]) -> weftgrad::Result<Vec<f64>> {
    let x = Var::new(Tensor::from_slice(training.rt, [1, seen.len()], seen)?);
    let logits = training.model.forward(&x)?;
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
