//! Stochastic rounding to bfloat16 within a program.

use numcore::{DType, pointwise::Expr};

/// Rounds `x` to bfloat16 stochastically, given the seed of the update and the number of the state.
///
/// Next to the nearest value `n` is the neighbor `m` on the side of `x`. A step of the significand is between 2⁻⁸ and
/// 2⁻⁷ of `n`, and below a power of two half of it. So 1.25 · 2⁻⁸ of `n` is nearer to `m` than to any other value.
pub(crate) fn round_stochastic<'b>(x: Expr<'b>, seed: Expr<'b>, state: usize) -> Expr<'b> {
    let nearest = |x: Expr<'b>| x.cast(DType::BF16).cast_like(x);
    let n = nearest(x);
    let rest = x - n;
    let m = nearest(n + rest.sign() * n.abs() * (1.25 / 256.0));
    // In [0, ½], exactly; not a number where `x` is a value of bfloat16.
    let (gap, bits) = (m - n, f64::from(1 << 24));
    let chance = rest / gap * bits;
    let place = (n.abs() / gap.abs() + seed).cast(DType::U32);
    let hash = (place * (0x9e37_79b1 + 2 * state as i64)) ^ chance.cast(DType::U32);
    // The mixer of 32 bits with the least bias found by Wellons' search.
    let hash = (hash ^ (hash >> 16)) * 0x7feb_352d;
    let hash = (hash ^ (hash >> 15)) * 0x846c_a68b;
    let drawn = ((hash ^ (hash >> 16)) >> 8).cast_like(x);
    drawn.lt(chance).select(m, n).cast(DType::BF16)
}
