//! Random generators keyed by their purpose, never by the thread or rank that draws from them.

use numcore::{
    Error, Result, Within,
    rng::{Philox, philox4x32_10},
};

/// The last word of this file's Philox counters. Other files' counters end in other words.
const DOMAIN: u32 = 0x4558_0000;

/// The generator of one example in one epoch, or in one [reading](crate::order::Order::readings) of the example.
/// [`Loader::augment`](crate::Loader::augment) draws from it.
///
/// ```
/// let mut one = data::random::keyed(7, 0, 41);
/// let mut again = data::random::keyed(7, 0, 41);
/// let mut next_epoch = data::random::keyed(7, 1, 41);
/// let first = one.next_u64();
/// assert!(first == again.next_u64() && first != next_epoch.next_u64());
/// ```
pub fn keyed(seed: u64, epoch: u64, example: u64) -> Philox {
    let words = |x: u64| [x as u32, (x >> 32) as u32];
    let ([e0, e1], [i0, i1]) = (words(epoch), words(example));
    // An epoch beyond 2¹⁶ · 2³² shares its last word with the domain; no training reaches it.
    let [a, b, c, _] = philox4x32_10([i0, i1, e0, DOMAIN ^ e1], words(seed));
    Philox::new(u64::from(a) | u64::from(b) << 32, c)
}

/// Draws from the beta distribution of positive parameters, as a ratio of gamma variates; see
/// [`mixup`](crate::mix::mixup).
///
/// ```
/// let mut rng = data::random::keyed(7, 0, 41);
/// assert!((0.0..=1.0).contains(&data::random::beta(0.2, 0.2, &mut rng)?));
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// Fails if a parameter is not finite, or below 1e-300.
#[track_caller]
pub fn beta(a: f64, b: f64, rng: &mut Philox) -> Result<f64> {
    if let Some(shape) = [a, b].into_iter().find(|shape| !(1e-300..f64::INFINITY).contains(shape)) {
        return Err(Error::range("beta", "parameter", shape, "finite and at least 1e-300")).at_caller();
    }
    // The logarithms of variates for small parameters are finite where the variates are 0.
    let (a, b) = (log_gamma_variate(a, rng), log_gamma_variate(b, rng));
    Ok(1.0 / (1.0 + libm::exp(b - a)))
}

/// The logarithm of a draw from the gamma distribution (Marsaglia & Tsang 2000).
fn log_gamma_variate(shape: f64, rng: &mut Philox) -> f64 {
    let small = if shape < 1.0 { libm::log(1.0 - rng.uniform()) / shape } else { 0.0 };
    let d = if shape < 1.0 { shape + 1.0 } else { shape } - 1.0 / 3.0;
    loop {
        let x = rng.normal();
        let v = 1.0 + x / (9.0 * d).sqrt();
        let log = 3.0 * libm::log(v.max(f64::MIN_POSITIVE));
        if v > 0.0 && libm::log(1.0 - rng.uniform()) < 0.5 * x * x + d - d * v * v * v + d * log {
            return libm::log(d) + log + small;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_key_counts() {
        let first = |seed, epoch, example| keyed(seed, epoch, example).next_u64();
        let keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1 << 40, 2, 3), (1, 1 << 40, 3), (1, 2, 1 << 40)];
        let mut seen: Vec<u64> = keys.iter().map(|&(s, e, i)| first(s, e, i)).collect();
        assert_eq!(seen[0], first(1, 2, 3));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), keys.len());
    }
}
