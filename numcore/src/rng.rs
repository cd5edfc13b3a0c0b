//! Counter-based random numbers (Philox4x32-10; Salmon et al. 2011), independent of the runtime, the sharding and the
//! thread count.

/// The four random words of a counter under a key.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let p0 = u64::from(a) * 0xD251_1F53;
        let p1 = u64::from(c) * 0xCD9E_8D57;
        (a, b, c, d) = ((p1 >> 32) as u32 ^ b ^ k0, p1 as u32, (p0 >> 32) as u32 ^ d ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [a, b, c, d]
}

/// A generator on the host, over one stream of one seed. Its arithmetic is fixed: it uses no `libm` of a platform.
#[derive(Clone, Debug)]
pub struct Philox {
    seed: u64,
    stream: u32,
    position: u64,
    /// The words of the block that contains `position`, once a word of it was drawn.
    words: [u32; 4],
}

/// Two generators are equal if they will draw equal values: words cached from the last draw are ignored.
impl PartialEq for Philox {
    fn eq(&self, other: &Self) -> bool {
        (self.seed, self.stream, self.position) == (other.seed, other.stream, other.position)
    }
}

impl Eq for Philox {}

impl Philox {
    /// A generator at the start of a stream.
    pub fn new(seed: u64, stream: u32) -> Self {
        Philox { seed, stream, position: 0, words: [0; 4] }
    }

    /// The number of words drawn: together with seed and stream, the whole state.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Moves to a position in the stream.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
        self.words = self.block();
    }

    /// Draws the next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        let word = (self.position % 4) as usize;
        if word == 0 {
            self.words = self.block();
        }
        self.position += 1;
        self.words[word]
    }

    fn block(&self) -> [u32; 4] {
        let block = self.position / 4;
        let counter = [block as u32, (block >> 32) as u32, self.stream, 0];
        philox4x32_10(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }

    /// Draws the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) | u64::from(self.next_u32()) << 32
    }

    /// Draws a uniform value in `[0, 1)` from 24 bits of one word, as runtimes do for `f32`.
    pub fn uniform_f32(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * 2f32.powi(-24)
    }

    /// Draws a uniform value in `[0, 1)` from 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * 2f64.powi(-53)
    }

    /// Draws a standard normal value by Box–Muller, from two uniforms per value, so that draws do not depend on each
    /// other.
    pub fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.uniform()));
        radius * libm::cos(std::f64::consts::TAU * self.uniform())
    }

    /// Draws `true` with probability `p`.
    pub fn bernoulli(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// Draws a uniform integer below `n` without bias (Lemire 2019); 0 where `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(n);
            // The first comparison alone decides nearly always, and saves the division.
            if wide as u64 >= n || wide as u64 >= n.wrapping_neg() % n {
                return (wide >> 64) as u64;
            }
        }
    }

    /// Draws a random permutation of `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        self.shuffle(&mut order);
        order
    }

    /// Shuffles a slice (Fisher–Yates).
    pub fn shuffle<X>(&mut self, order: &mut [X]) {
        for i in (1..order.len()).rev() {
            order.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32_10([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn a_stream_goes_on_from_any_place() {
        let mut rng = Philox::new(3, 2);
        let words: Vec<u32> = (0..23).map(|_| rng.next_u32()).collect();
        for from in 0..23 {
            let mut again = Philox::new(3, 2);
            again.seek(from);
            assert!((from as usize..23).all(|i| again.next_u32() == words[i]), "{from}");
            assert_eq!(again, rng);
        }
    }

    #[test]
    fn uniforms_fill_their_range() {
        let mut rng = Philox::new(5, 0);
        let (mut low, mut high, mut hits) = (1f32, 0f32, 0);
        for _ in 0..100_000 {
            let x = rng.uniform_f32();
            (low, high) = (low.min(x), high.max(x));
            hits += u32::from(rng.bernoulli(0.3));
        }
        assert!(low < 1e-4 && high > 1.0 - 1e-4 && high < 1.0, "{low} {high}");
        assert!((29_500..30_500).contains(&hits), "{hits}");
        assert!(!Philox::new(0, 0).bernoulli(0.0) && Philox::new(0, 0).bernoulli(1.0));
    }

    #[test]
    fn draws_below_a_bound_are_even() {
        let mut rng = Philox::new(6, 0);
        let mut counts = [0u32; 7];
        (0..70_000).for_each(|_| counts[rng.below(7) as usize] += 1);
        assert!(counts.iter().all(|c| (9_600..10_400).contains(c)), "{counts:?}");
        assert_eq!([rng.below(1), rng.below(0)], [0, 0]);
        // This bound rejects half of all draws, and the returned values stay below it.
        let bound = (1 << 63) + 1;
        assert!((0..1000).all(|_| rng.below(bound) < bound));
    }

    #[test]
    fn permutation_is_one_and_repeats() {
        let a = Philox::new(7, 1).permutation(1000);
        let mut sorted = a.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000) && a == Philox::new(7, 1).permutation(1000));
        assert_ne!(a, Philox::new(8, 1).permutation(1000));
    }

    #[test]
    fn normal_has_its_moments() {
        let mut rng = Philox::new(1, 0);
        let draws: Vec<f64> = (0..100_000).map(|_| rng.normal()).collect();
        let mean = draws.iter().sum::<f64>() / 1e5;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.015, "{mean} {variance}");
    }
}
