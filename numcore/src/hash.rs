//! The FNV-1a hash, for hashes that must be equal in every process: identities of programs, names of files,
//! fingerprints.

use std::{fmt, hash::Hasher};

const PRIME: u64 = 0x0000_0100_0000_01b3;

/// The 64-bit FNV-1a hash of bytes or of formatted text. Unlike hashes of the standard library, it depends on neither
/// the process nor the library's version. It does not resist chosen input.
#[derive(Clone, Copy, Debug)]
pub struct Fnv1a(u64);

impl Fnv1a {
    /// The hash of no bytes.
    pub const fn new() -> Self {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }

    /// The initial state of one of many independent hashes; `seed` 0 is [`new`](Fnv1a::new).
    pub const fn seeded(seed: u64) -> Self {
        Fnv1a(Self::new().0 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

impl Default for Fnv1a {
    fn default() -> Self {
        Self::new()
    }
}

impl Hasher for Fnv1a {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Writing to a hash cannot fail.
impl fmt::Write for Fnv1a {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.write(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn hashed(text: &str) -> u64 {
        let mut hash = Fnv1a::new();
        hash.write(text.as_bytes());
        hash.finish()
    }

    /// Values of the reference implementation.
    #[test]
    fn known_values() {
        assert_eq!(hashed(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hashed("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hashed("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn text_is_hashed_as_its_bytes_are() {
        let (mut hash, parts) = (Fnv1a::default(), ["foo", "bar"]);
        write!(hash, "{}{}", parts[0], parts[1]).unwrap();
        assert_eq!(hash.finish(), hashed("foobar"));
    }

    #[test]
    fn seeds_are_other_hashes() {
        let of = |seed| Fnv1a::seeded(seed).finish();
        assert_eq!(of(0), Fnv1a::new().finish());
        assert!(of(0) != of(1) && of(1) != of(2));
    }
}
