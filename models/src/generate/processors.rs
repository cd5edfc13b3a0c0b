//! Processing of logits before a token is chosen, in transformers' order, and the choice.

use numcore::{Error, Result, Within, rng::philox4x32_10};

use super::{GenerationOptions, Sampling};

/// Changes the scores `[V]` of the token that follows `prompt` and `new`, by options that are in range. A token that is
/// left out gets −∞.
pub(super) fn process(scores: &mut [f32], prompt: &[u32], new: &[u32], options: &GenerationOptions) -> Result<()> {
    // Checked before any comparison, in which the place of a NaN would decide what is left out.
    expect_numbers(scores, "the model gave")?;
    penalize(scores, prompt.iter().chain(new), options.repetition_penalty as f32);
    let first = options.begin_suppress_tokens.iter().filter(|_| new.is_empty());
    for &token in options.suppress_tokens.iter().chain(first) {
        scores.get_mut(token as usize).into_iter().for_each(|score| *score = f32::NEG_INFINITY);
    }
    if let Some(rules) = options.time_stamps {
        rules.apply(scores, new);
    }
    let Some(Sampling { temperature, top_k, top_p, min_p, typical_p }) = options.sampling else { return Ok(()) };
    scores.iter_mut().for_each(|score| *score /= temperature as f32);
    expect_numbers(scores, "the temperature is so low that there are")?;
    if let Some(k) = top_k.filter(|&k| k < scores.len()) {
        keep_top_k(scores, k);
    }
    if let Some(p) = top_p {
        keep_top_p(scores, p);
    }
    if let Some(p) = min_p {
        keep_min_p(scores, p);
    }
    if let Some(p) = typical_p {
        keep_typical(scores, p);
    }
    Ok(())
}

/// Checks that there are scores, none of them NaN or +∞, and not all −∞.
fn expect_numbers(scores: &[f32], whence: &str) -> Result<()> {
    let why = match scores.iter().position(|score| score.is_nan() || *score == f32::INFINITY) {
        _ if scores.is_empty() => "there are no logits".into(),
        None if scores.iter().all(|score| *score == f32::NEG_INFINITY) => "no logit is a number".into(),
        None => return Ok(()),
        Some(token) => format!("{whence} a logit of {} for token {token}", scores[token]),
    };
    Err(Error::anomaly("generate", why))
}

/// Applies the repetition penalty to each token of the text, once however often it occurs.
fn penalize<'t>(scores: &mut [f32], text: impl Iterator<Item = &'t u32>, penalty: f32) {
    if penalty == 1.0 {
        return;
    }
    let mut seen = vec![false; scores.len()];
    for &token in text {
        let token = token as usize;
        if token < seen.len() && !std::mem::replace(&mut seen[token], true) {
            let score = &mut scores[token];
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
    }
}

/// Keeps the `k` highest scores, and those equal to the last of them.
fn keep_top_k(scores: &mut [f32], k: usize) {
    let mut sorted = scores.to_vec();
    let (_, &mut least, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    drop_where(scores, |score, _| score < least);
}

/// Keeps the fewest of the likeliest tokens whose probabilities sum to more than `p`, at least one.
fn keep_top_p(scores: &mut [f32], p: f64) {
    let probabilities = softmax(scores);
    let mut order = ascending(scores);
    order.pop();
    let mut sum = 0.0;
    for i in order {
        sum += probabilities[i];
        if sum > 1.0 - p {
            break;
        }
        scores[i] = f32::NEG_INFINITY;
    }
}

fn keep_min_p(scores: &mut [f32], p: f64) {
    let probabilities = softmax(scores);
    let most = probabilities.iter().copied().fold(0.0, f64::max);
    drop_where(scores, |_, i| probabilities[i] < p * most);
}

/// Keeps the tokens whose information differs least from the entropy, up to the one with which their probabilities
/// reach `p` (Meister et al. 2023).
fn keep_typical(scores: &mut [f32], p: f64) {
    let probabilities = softmax(scores);
    let entropy: f64 = probabilities.iter().filter(|&&q| q > 0.0).map(|q| -q * q.ln()).sum();
    let surprise: Vec<f64> = probabilities.iter().map(|q| (-q.ln() - entropy).abs()).collect();
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| surprise[a].total_cmp(&surprise[b]));
    let mut sum = 0.0;
    let before = order.iter().take_while(|&&i| {
        sum += probabilities[i];
        sum < p
    });
    let last = order[before.count().min(scores.len() - 1)];
    let first = order[0];
    drop_where(scores, |_, i| surprise[i] > surprise[last] && i != first);
}

fn drop_where(scores: &mut [f32], out: impl Fn(f32, usize) -> bool) {
    scores.iter_mut().enumerate().filter(|(i, score)| out(**score, *i)).for_each(|(_, s)| *s = f32::NEG_INFINITY);
}

fn ascending(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    order
}

pub(super) fn softmax(scores: &[f32]) -> Vec<f64> {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponents: Vec<f64> = scores.iter().map(|&score| f64::from(score - most).exp()).collect();
    let sum: f64 = exponents.iter().sum();
    exponents.into_iter().map(|x| x / sum).collect()
}

/// The key of a choice: its random number depends on these fields alone, not on the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    pub seed: u64,
    pub stream: u64,
    pub step: u64,
}

impl Draw {
    /// Chooses the likeliest token, the first of equals; or draws one by probability.
    pub(super) fn choose(self, scores: &[f32], sample: bool) -> Result<u32> {
        expect_numbers(scores, "there is").within(format_args!("new token {}", self.step))?;
        let likeliest = || {
            let best = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
            (0..scores.len()).fold(0, best)
        };
        let at = if sample { self.drawn(scores).unwrap_or_else(likeliest) } else { likeliest() };
        u32::try_from(at).map_err(|_| Error::range("generate", "token", at, "a u32"))
    }

    /// The token at which the sum of probabilities passes the random number.
    fn drawn(self, scores: &[f32]) -> Option<usize> {
        let (probabilities, mut sum, u) = (softmax(scores), 0.0, self.uniform());
        probabilities.iter().position(|&p| {
            sum += p;
            sum > u
        })
    }

    fn uniform(self) -> f64 {
        let low = |x: u64| x as u32;
        let counter = [low(self.step), low(self.stream), low(self.stream >> 32), 2];
        let [a, b, ..] = philox4x32_10(counter, [low(self.seed), low(self.seed >> 32)]);
        // A fraction of 53 bits.
        ((u64::from(a) << 21) ^ u64::from(b >> 11)) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_probabilities() {
        let scores = [0.2f32, 0.5, 0.3].map(f32::ln);
        let mut counts = [0; 3];
        for stream in 0..20_000 {
            counts[Draw { seed: 1, stream, step: stream % 7 }.choose(&scores, true).unwrap() as usize] += 1;
        }
        for (count, p) in counts.iter().zip([0.2, 0.5, 0.3]) {
            assert!((f64::from(*count) / 20_000.0 - p).abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn nan_is_found_before_it_is_left_out() {
        let sampling = Sampling { top_k: Some(1), top_p: Some(0.5), ..Default::default() };
        let options = GenerationOptions { sampling: Some(sampling), ..Default::default() };
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            let error = options.process(&mut [1.0, bad, 3.0], &[], &[]).unwrap_err().to_string();
            assert!(error.contains("for token 1"), "{error}");
        }
        assert!(options.process(&mut [], &[], &[]).unwrap_err().to_string().contains("no logits"));
        assert!(options.process(&mut [f32::NEG_INFINITY], &[], &[]).is_err());
        options.process(&mut [1.0, f32::NEG_INFINITY], &[], &[]).unwrap();
    }

    #[test]
    fn options_out_of_range_are_found_without_a_model() {
        let of = |sampling| GenerationOptions { sampling: Some(sampling), ..Default::default() };
        let error = |sampling: Sampling| of(sampling).process(&mut [1.0, 30.0], &[], &[]).unwrap_err().to_string();
        assert!(error(Sampling { top_k: Some(0), ..Default::default() }).contains("0 likeliest"));
        for temperature in [0.0, 1e-46, 1e-40, 1e39, f64::NAN] {
            assert!(error(Sampling { temperature, ..Default::default() }).contains("temperature of"), "{temperature}");
        }
        assert!(error(Sampling { temperature: 1.2e-38, ..Default::default() }).contains("so low"));
        let mut none = [];
        let typical = Sampling { typical_p: Some(0.5), ..Default::default() };
        assert!(of(typical).process(&mut none, &[], &[]).is_err());
    }

    #[test]
    fn what_cannot_be_chosen_from_is_an_error() {
        let draw = Draw { seed: 0, stream: 0, step: 4 };
        assert!(draw.choose(&[0.0, f32::NAN], false).is_err());
        assert!(draw.choose(&[f32::NEG_INFINITY; 2], true).unwrap_err().to_string().contains("token 4"));
        assert_eq!(draw.choose(&[1.0, 2.0, 2.0], false).unwrap(), 1);
    }
}
