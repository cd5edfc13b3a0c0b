//! Text the model writes.

use weftgrad::{prelude::*, rng::Philox};
use weftgrad_examples::{Outcome, text::Corpus};

use crate::training::Training;

/// `length` characters after a line break, each drawn from the model's softmax at this temperature.
pub fn text(training: &Training<'_>, corpus: &Corpus, length: usize, temperature: f64) -> Outcome<String> {
    let context = training.settings.model.context;
    let mut rng = Philox::new(training.settings.seed, 9);
    let mut tokens = vec![corpus.token('\n').unwrap_or(0)];
    for _ in 0..length {
        let seen = &tokens[tokens.len().saturating_sub(context)..];
        let logits = no_grad(|| next(training, seen))?;
        tokens.push(draw(&logits, temperature, rng.uniform()) as i64);
    }
    Ok(tokens[1..].iter().map(|&t| corpus.vocabulary[t as usize]).collect())
}

/// The logits of what follows `seen`.
fn next(training: &Training<'_>, seen: &[i64]) -> weftgrad::Result<Vec<f64>> {
    let x = Var::new(Tensor::from_slice(training.rt, [1, seen.len()], seen)?);
    let logits = training.model.forward(&x)?;
    logits.select(0, 0)?.select(0, seen.len() - 1)?.value()?.to_f64s()
}

/// The class at which the running sum of probabilities passes `u`.
fn draw(logits: &[f64], temperature: f64, u: f64) -> usize {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
    if temperature <= 0.0 {
        return best;
    }
    let weights: Vec<f64> = logits.iter().map(|l| ((l - logits[best]) / temperature).exp()).collect();
    let mut left = u * weights.iter().sum::<f64>();
    weights
        .iter()
        .position(|w| {
            left -= w;
            left < 0.0
        })
        .unwrap_or(best)
}
