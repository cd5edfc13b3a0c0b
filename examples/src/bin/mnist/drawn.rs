//! Digits drawn by this program, for a run without files: a dot-matrix font at random places, in random ink, on noisy
//! paper.

use weftgrad::{Result, rng::Philox};

use crate::digits::{Digits, SIDE, from_bytes};

/// Five dots wide, seven high; bit 4 is the leftmost.
const FONT: [[u8; 7]; 10] = [
    [0x0e, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0e],
    [0x04, 0x0c, 0x04, 0x04, 0x04, 0x04, 0x0e],
    [0x0e, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1f],
    [0x1f, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0e],
    [0x02, 0x06, 0x0a, 0x12, 0x1f, 0x02, 0x02],
    [0x1f, 0x10, 0x1e, 0x01, 0x01, 0x11, 0x0e],
    [0x06, 0x08, 0x10, 0x1e, 0x11, 0x11, 0x0e],
    [0x1f, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08],
    [0x0e, 0x11, 0x11, 0x0e, 0x11, 0x11, 0x0e],
    [0x0e, 0x11, 0x11, 0x0f, 0x01, 0x02, 0x0c],
];
/// Pixels of a dot.
const DOT: usize = 3;

/// `count` images in a random order of digits.
pub(crate) fn digits(count: usize, seed: u64) -> Result<Digits> {
    let mut random = Philox::new(seed, 0);
    let mut below = |n: usize| random.below(n as u64) as usize;
    let (mut images, mut labels) = (Vec::with_capacity(count * SIDE * SIDE), Vec::with_capacity(count));
    for _ in 0..count {
        let digit = below(10);
        let (left, top, ink) = (below(SIDE - 5 * DOT), below(SIDE - 7 * DOT), 96 + below(160));
        for at in 0..SIDE * SIDE {
            let (x, y) = ((at % SIDE).wrapping_sub(left) / DOT, (at / SIDE).wrapping_sub(top) / DOT);
            let inked = x < 5 && y < 7 && FONT[digit][y] >> (4 - x) & 1 == 1;
            images.push((below(48) + if inked { ink - 48 } else { 0 }) as u8);
        }
        labels.push(digit as u8);
    }
    from_bytes(images, labels)
}
