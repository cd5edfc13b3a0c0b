//! Random bits for positions: Philox4x32-10 (Salmon et al. 2011), sixteen counters side by side.

use numcore::rng::philox4x32_10;

/// Counters computed together.
const LANES: usize = 16;
/// Words that gives.
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

/// The words of sixteen counters in a row.
#[inline(always)]
fn sixteen(counter: u64, seed: u64, stream: u32) -> [u32; WORDS] {
    let counters: [u64; LANES] = std::array::from_fn(|i| counter + i as u64);
    let mut x = [counters.map(|c| c as u32), counters.map(|c| (c >> 32) as u32), [stream; LANES], [0; LANES]];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let (mut a, mut c) = ([0u64; LANES], [0u64; LANES]);
        for i in 0..LANES {
            a[i] = u64::from(x[0][i]) * 0xD251_1F53;
            c[i] = u64::from(x[2][i]) * 0xCD9E_8D57;
        }
        for i in 0..LANES {
            x[0][i] = (c[i] >> 32) as u32 ^ x[1][i] ^ key[0];
            x[2][i] = (a[i] >> 32) as u32 ^ x[3][i] ^ key[1];
            x[1][i] = c[i] as u32;
            x[3][i] = a[i] as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    std::array::from_fn(|i| x[i % 4][i / 4])
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
