//! Maps of nodes and leaves by their address in memory, while they are alive.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

/// A map whose keys are addresses of nodes or leaves. No result depends on its iteration order.
pub(crate) type ByAddress<T> = HashMap<usize, T, BuildHasherDefault<Address>>;

/// A hasher for addresses: one multiplication spreads an address over 64 bits. The standard hasher, which withstands
/// keys chosen by an attacker, takes 20 ns.
#[derive(Default)]
pub(crate) struct Address(u64);

impl Hasher for Address {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0 ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn write_usize(&mut self, x: usize) {
        self.write_u64(x as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
