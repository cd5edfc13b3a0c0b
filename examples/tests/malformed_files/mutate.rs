//! Changes to the bytes of a file, drawn from a seed: like those of a bad disk, a cut transfer or an editor.

/// Random numbers by SplitMix64.
pub struct Draws(u64);

impl Draws {
    pub fn new(seed: u64) -> Self {
        Draws(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }
}

/// Integers at which sizes overflow.
const EXTREMES: [u64; 10] =
    [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX - 7, u64::MAX];

/// Replacements for a number in a text.
const NUMBERS: [&str; 9] = [
    "0",
    "-1",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "99999999999999999999",
    "1e308",
    "nan",
    "\"",
];

/// Makes one to four changes.
pub fn mutate(bytes: &[u8], draws: &mut Draws) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=draws.below(4) {
        change(&mut bytes, draws);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, draws: &mut Draws) {
    let at = draws.below(bytes.len());
    let some = at..(at + 1 + draws.below(16)).min(bytes.len());
    match draws.below(8) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << draws.below(8),
        1 if !bytes.is_empty() => bytes[at] = [0, 0x7f, 0x80, 0xff, b'{', b'"', b'\n', b','][draws.below(8)],
        2 => overwrite(bytes, at, draws),
        3 => bytes.truncate(at),
        4 if !some.is_empty() => drop(bytes.drain(some)),
        5 if !some.is_empty() => {
            let (again, to) = (bytes[some].to_vec(), draws.below(bytes.len()));
            bytes.splice(to..to, again);
        }
        6 => drop(bytes.splice(at..at, (0..1 + draws.below(8)).map(|_| draws.below(256) as u8).collect::<Vec<_>>())),
        _ => another_number(bytes, at, draws),
    }
}

/// Overwrites bytes with an integer of 1, 2, 4 or 8 bytes, in either byte order.
fn overwrite(bytes: &mut [u8], at: usize, draws: &mut Draws) {
    let value = EXTREMES[draws.below(EXTREMES.len())];
    let value = if draws.below(2) == 0 { value.to_le_bytes() } else { value.to_be_bytes() };
    let width = [1, 2, 4, 8][draws.below(4)].min(bytes.len() - at);
    bytes[at..at + width].copy_from_slice(&value[..width]);
}

/// Replaces the next number in digits by another one.
fn another_number(bytes: &mut Vec<u8>, at: usize, draws: &mut Draws) {
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|offset| at + offset) else { return };
    let len = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    bytes.splice(start..start + len, NUMBERS[draws.below(NUMBERS.len())].bytes());
}
