//! Random bits for positions: Philox4x32-10 (Salmon et al. 2011), sixteen counters at once.

use numcore::rng::philox4x32_10;

/// The lower 32 bits of a lane.
const LOW: u64 = u32::MAX as u64;
/// The number of counters computed together.
const LANES: usize = 16;
/// The number of words of sixteen counters.
const WORDS: usize = 4 * LANES;

/// Word `i % 4` of counter `(i / 4, stream, 0)` under `seed`, for each position `i`.
#[inline(always)]
pub(super) fn random_bits(to: &mut [u32], positions: &[i64], seed: u64, stream: u32) {
    let n = to.len();
    let (Some(&first), Some(&last)) = (positions.first(), positions.last()) else { return };
    if last - first != n as i64 - 1 || n < WORDS {
        return one_by_one(to, positions, seed, stream);
    }
    let head = (first.wrapping_neg() & 3) as usize;
    let (front, rest) = to.split_at_mut(head);
    one_by_one(front, &positions[..head], seed, stream);
    let (blocks, tail) = rest.as_chunks_mut::<WORDS>();
    let counter = (first as u64 + head as u64) / 4;
    for (b, block) in blocks.iter_mut().enumerate() {
        *block = sixteen(counter + (b * LANES) as u64, seed, stream);
    }
    let from = n - tail.len();
    one_by_one(tail, &positions[from..], seed, stream);
}

#[inline(always)]
fn one_by_one(to: &mut [u32], positions: &[i64], seed: u64, stream: u32) {
    let (mut of, mut words) = (u64::MAX, [0; 4]);
    for (to, &i) in to.iter_mut().zip(positions) {
        let i = i as u64;
        if i / 4 != of {
            of = i / 4;
            words = philox4x32_10([of as u32, (of >> 32) as u32, stream, 0], [seed as u32, (seed >> 32) as u32]);
        }
        *to = words[(i % 4) as usize];
    }
}

/// The words of sixteen consecutive counters. Every word is in the lower 32 bits of a 64-bit lane, where a
/// multiplication leaves it; the upper bits are ignored.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "four arrays in step")]
fn sixteen(counter: u64, seed: u64, stream: u32) -> [u32; WORDS] {
    let counters: [u64; LANES] = std::array::from_fn(|i| counter + i as u64);
    let mut x = [counters, counters.map(|c| c >> 32), [u64::from(stream); LANES], [0; LANES]];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let [k0, k1] = key.map(u64::from);
        for i in 0..LANES {
            let (a, c) = ((x[0][i] & LOW) * 0xD251_1F53, (x[2][i] & LOW) * 0xCD9E_8D57);
            x[0][i] = (c >> 32) ^ x[1][i] ^ k0;
            x[2][i] = (a >> 32) ^ x[3][i] ^ k1;
            x[1][i] = c;
            x[3][i] = a;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    let mut words = [0; WORDS];
    for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *four = [x[0][i] as u32, x[1][i] as u32, x[2][i] as u32, x[3][i] as u32];
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_at_once_are_what_one_by_one_are() {
        for first in [0i64, 3, 17, (1 << 34) - 9] {
            let positions: Vec<i64> = (first..first + 300).collect();
            let (mut fast, mut slow) = (vec![0; 300], vec![0; 300]);
            random_bits(&mut fast, &positions, 0xdead_beef_1234_5678, 9);
            one_by_one(&mut slow, &positions, 0xdead_beef_1234_5678, 9);
            assert_eq!(fast, slow);
        }
    }
}
