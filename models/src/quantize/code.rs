//! The code words: quantiles of a normal distribution for weights, a dynamic exponent for scales.

/// The 16 words of NF4, in order.
pub(super) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The 256 code words of scales, in order (Dettmers 2016). They are 0, 1, and for each of seven exponents the middles
/// of equal parts of `[0.1, 1]`, with both signs. The exponent `10^(i - 6)`, `i` from 0 to 6, has `2^i` parts.
pub(super) fn dynamic() -> Vec<f32> {
    let mut words = vec![0.0, 1.0];
    for i in 0..7i32 {
        let parts = 1usize << i;
        let edges: Vec<f32> = (0..=parts).map(|part| edge(part, parts)).collect();
        let power = 10f64.powi(i - 6) as f32;
        for pair in edges.windows(2) {
            let word = power * ((pair[0] + pair[1]) / 2.0);
            words.extend([word, -word]);
        }
    }
    words.sort_by(f32::total_cmp);
    words
}

/// The edge of a part of `[0.1, 1]`, counted from the nearer end and rounded once, as in PyTorch's `linspace`.
fn edge(part: usize, parts: usize) -> f32 {
    let step = f64::from((1.0 - 0.1f32) / parts as f32);
    let (first, last) = (part as f64, (parts - part) as f64);
    (if part < parts.div_ceil(2) { f64::from(0.1f32) + step * first } else { 1.0 - step * last }) as f32
}

/// The index of the word nearest to `x` in sorted `words`; the lower of two that are as near.
pub(super) fn nearest(words: &[f32], x: f32) -> u8 {
    let above = words.partition_point(|word| *word < x).min(words.len() - 1);
    let below = above.saturating_sub(1);
    let middle = f64::midpoint(f64::from(words[below]), f64::from(words[above])) as f32;
    (if x > middle { above } else { below }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_nearest_to_itself() {
        let dynamic = dynamic();
        assert_eq!(dynamic.len(), 256);
        for words in [&NF4[..], &dynamic] {
            assert!(words.is_sorted());
            for (i, word) in words.iter().enumerate() {
                assert_eq!(usize::from(nearest(words, *word)), i);
            }
            assert_eq!(usize::from(nearest(words, 9.0)), words.len() - 1);
            assert_eq!(nearest(words, -9.0), 0);
        }
        // A middle rounds to the lower word.
        assert_eq!([0.039_790_15, 0.039_790_154].map(|x| nearest(&NF4, x)), [7, 8]);
    }

    /// The smallest and the largest words, by the formula on paper.
    #[test]
    fn the_words_of_scales() {
        let words = dynamic();
        let middle = words.iter().position(|w| *w == 0.0).unwrap();
        assert_eq!((words[middle + 1], words[255]), (1e-6f64 as f32 * 0.55, 1.0));
        assert!((words[254] - (1.0 - 0.9 / 128.0)).abs() < 1e-6);
        assert_eq!(words[0], -words[254]);
    }
}
