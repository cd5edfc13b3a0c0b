//! Arithmetic on integers of several words: a carry comes in, and the row that ends in `out` gives the one that goes on.

use super::rows;

rows! {
    "addc" [u32] (a: u32, b: u32, carry: bool) -> u32 => added(a, b, carry) as u32;
    "addc.out" [u32] (a: u32, b: u32, carry: bool) -> bool => added(a, b, carry) >> 32 != 0;
    "subc" [u32] (a: u32, b: u32, borrow: bool) -> u32 => left(a, b, borrow) as u32;
    "subc.out" [u32] (a: u32, b: u32, borrow: bool) -> bool => left(a, b, borrow) < 0;
    "madc.lo" [u32] (a: u32, b: u32, c: u32, carry: bool) -> u32 => added(a.wrapping_mul(b), c, carry) as u32;
    "madc.lo.out" [u32] (a: u32, b: u32, c: u32, carry: bool) -> bool => added(a.wrapping_mul(b), c, carry) >> 32 != 0;
    "madc.hi" [u32] (a: u32, b: u32, c: u32, carry: bool) -> u32 => added(high(a, b), c, carry) as u32;
    "madc.hi.out" [u32] (a: u32, b: u32, c: u32, carry: bool) -> bool => added(high(a, b), c, carry) >> 32 != 0;
}

fn added(a: u32, b: u32, carry: bool) -> u64 {
    u64::from(a) + u64::from(b) + u64::from(carry)
}

fn left(a: u32, b: u32, borrow: bool) -> i64 {
    i64::from(a) - i64::from(b) - i64::from(borrow)
}

fn high(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}
