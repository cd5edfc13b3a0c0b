//! Reductions of a row in a fixed order: element `i` is accumulated in lane `i % LANES`, and lanes are combined as a
//! tree.

use std::hint::black_box;

use super::Float;
use crate::simd::prefetch;

/// Independent accumulators: enough to hide the latency of an addition in the widest vectors.
pub(super) const LANES: usize = 64;

/// A stream of software prefetches, one cache line for each that is computed. The hardware prefetcher stops at the end
/// of a page, where many rows end, and hardly works for memory that is only written.
#[derive(Clone, Copy)]
pub(super) struct Prefetch<T>(*const T);

impl<T> Prefetch<T> {
    /// Prefetches what follows `row` in memory.
    #[inline(always)]
    pub(super) fn behind(row: &[T]) -> Self {
        Prefetch(row.as_ptr_range().end)
    }

    /// Prefetches `row` itself, which is read or written next.
    #[inline(always)]
    pub(super) fn row(row: &[T]) -> Self {
        Prefetch(row.as_ptr())
    }

    /// Prefetches one chunk of lanes more.
    #[inline(always)]
    fn chunk(&mut self) {
        prefetch(self.0, LANES);
        self.0 = self.0.wrapping_add(LANES);
    }
}

/// Combines `f(x[i])`, starting every lane from `start`.
#[inline(always)]
pub(super) fn fold<T: Float, const N: usize>(
    x: &[T],
    start: T,
    mut prefetches: [Prefetch<T>; N],
    f: impl Fn(T) -> T,
    combine: impl Fn(T, T) -> T,
) -> T {
    let mut lanes = [start; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for c in chunks {
        prefetches.iter_mut().for_each(Prefetch::chunk);
        for l in 0..LANES {
            lanes[l] = combine(lanes[l], f(c[l]));
        }
    }
    for (l, &v) in rest.iter().enumerate() {
        lanes[l] = combine(lanes[l], f(v));
    }
    row_tree(lanes, combine)
}

/// Sums both parts of `f(x[i])`.
#[inline(always)]
pub(super) fn sums1<T: Float, const N: usize>(
    x: &[T],
    mut prefetches: [Prefetch<T>; N],
    f: impl Fn(T) -> (T, T),
) -> (T, T) {
    let (mut first, mut second) = ([T::default(); LANES], [T::default(); LANES]);
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut add = |l: usize, x: T| {
        let (a, b) = f(x);
        first[l] = first[l] + a;
        second[l] = second[l] + b;
    };
    for c in chunks {
        prefetches.iter_mut().for_each(Prefetch::chunk);
        (0..LANES).for_each(|l| add(l, c[l]));
    }
    rest.iter().enumerate().for_each(|(l, &x)| add(l, x));
    (row_tree(first, |a, b| a + b), row_tree(second, |a, b| a + b))
}

/// Sums both parts of `f(x[i], y[i], z[i])`.
#[inline(always)]
pub(super) fn sums3<T: Float>(
    x: &[T],
    y: &[T],
    z: &[T],
    mut prefetches: Prefetch<T>,
    f: impl Fn(T, T, T) -> (T, T),
) -> (T, T) {
    let (mut first, mut second) = ([T::default(); LANES], [T::default(); LANES]);
    let ((cx, rx), (cy, ry), (cz, rz)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>(), z.as_chunks::<LANES>());
    let mut add = |l: usize, x: T, y: T, z: T| {
        let (a, b) = f(x, y, z);
        first[l] = first[l] + a;
        second[l] = second[l] + b;
    };
    for ((x, y), z) in cx.iter().zip(cy).zip(cz) {
        prefetches.chunk();
        (0..LANES).for_each(|l| add(l, x[l], y[l], z[l]));
    }
    for (l, ((&x, &y), &z)) in rx.iter().zip(ry).zip(rz).enumerate() {
        add(l, x, y, z);
    }
    (row_tree(first, |a, b| a + b), row_tree(second, |a, b| a + b))
}

/// The sum of `f(x[i], y[i])` over a row.
#[inline(always)]
pub(super) fn sum2<T: Float, const N: usize>(
    x: &[T],
    y: &[T],
    mut prefetches: [Prefetch<T>; N],
    f: impl Fn(T, T) -> T,
) -> T {
    let mut lanes = [T::default(); LANES];
    let (cx, cy) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let (rx, ry) = (cx.remainder(), cy.remainder());
    for (a, b) in cx.zip(cy) {
        prefetches.iter_mut().for_each(Prefetch::chunk);
        for l in 0..LANES {
            lanes[l] = lanes[l] + f(a[l], b[l]);
        }
    }
    for (l, (&a, &b)) in rx.iter().zip(ry).enumerate() {
        lanes[l] = lanes[l] + f(a, b);
    }
    row_tree(lanes, |a, b| a + b)
}

/// Writes `y[i] = f(x[i])` and sums it.
#[inline(always)]
pub(super) fn map_sum<T: Float>(x: &[T], y: &mut [T], mut prefetches: Prefetch<T>, f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::default(); LANES];
    let ((cx, rx), (cy, ry)) = (x.as_chunks::<LANES>(), y.as_chunks_mut::<LANES>());
    for (x, y) in cx.iter().zip(cy) {
        prefetches.chunk();
        for l in 0..LANES {
            y[l] = f(x[l]);
            lanes[l] = lanes[l] + y[l];
        }
    }
    for (l, (y, &x)) in ry.iter_mut().zip(rx).enumerate() {
        *y = f(x);
        lanes[l] = lanes[l] + *y;
    }
    row_tree(lanes, |a, b| a + b)
}

/// The sum of `f(x[i])` over a row.
#[inline(always)]
pub(super) fn sum1<T: Float, const N: usize>(x: &[T], prefetches: [Prefetch<T>; N], f: impl Fn(T) -> T) -> T {
    fold(x, T::default(), prefetches, f, |a, b| a + b)
}

/// Calls `f` with every element of three rows, of which the first two have others behind them, and of three that are
/// written.
#[inline(always)]
pub(super) fn each<T: Float>(
    x: &[T],
    y: &[T],
    z: &[T],
    a: &mut [T],
    b: &mut [T],
    c: &mut [T],
    f: impl Fn(T, T, T, &mut T, &mut T, &mut T),
) {
    let ((cx, rx), (cy, ry), (cz, rz)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>(), z.as_chunks::<LANES>());
    let ((ca, ra), (cb, rb), (cc, rc)) =
        (a.as_chunks_mut::<LANES>(), b.as_chunks_mut::<LANES>(), c.as_chunks_mut::<LANES>());
    let mut prefetches = [Prefetch::behind(x), Prefetch::behind(y)];
    for (((((x, y), z), a), b), c) in cx.iter().zip(cy).zip(cz).zip(ca).zip(cb).zip(cc) {
        prefetches.iter_mut().for_each(Prefetch::chunk);
        (0..LANES).for_each(|l| f(x[l], y[l], z[l], &mut a[l], &mut b[l], &mut c[l]));
    }
    for (((((&x, &y), &z), a), b), c) in rx.iter().zip(ry).zip(rz).zip(ra).zip(rb).zip(rc) {
        f(x, y, z, a, b, c);
    }
}

/// Writes `z[i] = f(x[i], y[i])`, of rows that have others behind them.
#[inline(always)]
pub(super) fn map2<T: Float>(x: &[T], y: &[T], z: &mut [T], f: impl Fn(T, T) -> T) {
    let mut prefetches = [Prefetch::behind(x), Prefetch::behind(y)];
    let ((cx, rx), (cy, ry), (cz, rz)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>(), z.as_chunks_mut::<LANES>());
    for ((x, y), z) in cx.iter().zip(cy).zip(cz) {
        prefetches.iter_mut().for_each(Prefetch::chunk);
        (0..LANES).for_each(|l| z[l] = f(x[l], y[l]));
    }
    for ((&x, &y), z) in rx.iter().zip(ry).zip(rz) {
        *z = f(x, y);
    }
}

#[inline(always)]
pub(super) fn sum<T: Float>(x: &[T]) -> T {
    sum1(x, [], |v| v)
}

/// The largest element; `−∞` if there is none. NaN is passed over, which is one instruction instead of four.
#[inline(always)]
pub(super) fn max<T: Float>(x: &[T]) -> T {
    fold(x, T::from_f64(f64::NEG_INFINITY), [], |v| v, larger)
}

/// The largest of `x` and `start`, for a length that is a multiple of [`LANES`].
#[inline(always)]
pub(super) fn greatest<T: Float>(start: T, x: &[T]) -> T {
    let mut lanes = [start; LANES];
    for c in x.chunks_exact(LANES) {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], c[l]);
        }
    }
    tree(lanes, larger)
}

/// The larger of two values; the first if the second is NaN.
#[inline(always)]
fn larger<T: Float>(a: T, b: T) -> T {
    if b > a { b } else { a }
}

/// Writes `y[i] = f(y[i])` of values from 0 to 1 and sums it, for a length that is a multiple of [`LANES`].
///
/// Each value is rounded to a sum of two multiples of fixed powers of two, whose sums are exact (as in Demmel and
/// Nguyen, *Fast reproducible floating-point summation*, 2013). So the order of a row's values, and zeros among them,
/// change no bit. An `f32` keeps its part above 2⁻³³, an `f64` that above 2⁻⁶⁷.
#[inline(always)]
pub(super) fn update_exact_sum<T: Float>(y: &mut [T], f: impl Fn(T) -> T) -> T {
    // Both sums of so many values fit the digits of their type.
    const BLOCK: usize = 256;
    const WIDE: usize = LANES / 2;
    // The constant `1.5 · 2^p` rounds to a multiple of `2^(p − 23)` in `f32`, and of `2^(p − 52)` in `f64`.
    let single = size_of::<T>() == 4;
    let coarse = T::from_f64(if single { 1.5 * 128.0 } else { 1.5 * f64::from(1u32 << 19) });
    let fine = T::from_f64(if single { 1.5 / 1024.0 } else { 1.5 / 32768.0 });
    let mut total = [0.0; 2];
    for block in y.chunks_mut(BLOCK) {
        let (mut high, mut low) = ([T::default(); WIDE], [T::default(); WIDE]);
        for c in block.chunks_exact_mut(WIDE) {
            for l in 0..WIDE {
                c[l] = f(c[l]);
                let rounded = (c[l] + coarse) - coarse;
                high[l] = high[l] + rounded;
                low[l] = low[l] + (((c[l] - rounded) + fine) - fine);
            }
        }
        total[0] += tree(high, |a, b| a + b).to_f64();
        total[1] += tree(low, |a, b| a + b).to_f64();
    }
    T::from_f64(total[0] + total[1])
}

/// [`tree`] of a row's lanes, which its end leaves in memory.
#[inline(always)]
fn row_tree<T: Float>(lanes: [T; LANES], combine: impl Fn(T, T) -> T) -> T {
    const N: usize = LANES / 4;
    let quarter = |l: usize| combine(combine(lanes[l], lanes[l + 2 * N]), combine(lanes[l + N], lanes[l + 3 * N]));
    // Kept apart from what follows: in one, the compiler takes lanes by twos from the start, a quarter of softmax's
    // time.
    tree(black_box(std::array::from_fn::<T, N, _>(quarter)), combine)
}

/// Combines lane `l` with lane `l + N / 2`, and so on.
#[inline(always)]
fn tree<T: Float, const N: usize>(mut lanes: [T; N], combine: impl Fn(T, T) -> T) -> T {
    let mut n = N / 2;
    while n > 0 {
        for l in 0..n {
            lanes[l] = combine(lanes[l], lanes[l + n]);
        }
        n /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum as an integer of 2⁻⁸⁰, with its values moved and zeros among them.
    fn check<T: Float>(bound: f64) {
        for n in [0, 64, 256, 1024, 6400] {
            let value = |i: usize| T::from_f64((-1e-3 * (i * 37 % 1009) as f64 - 0.3 * (i % 5) as f64).exp());
            let mut plain: Vec<T> = (0..n).map(value).collect();
            let mut moved: Vec<T> = (0..n + 192).map(|i| if i < 192 { T::default() } else { value(i - 192) }).collect();
            let mut backwards: Vec<T> = (0..n).rev().map(value).collect();
            let units: i128 = plain.iter().map(|x| (x.to_f64() * 2f64.powi(80)) as i128).sum();
            let want = units as f64 / 2f64.powi(80);
            let got = update_exact_sum(&mut plain, |x| x);
            assert!((got.to_f64() - want).abs() <= want * bound, "{n}: {} {want}", got.to_f64());
            moved.rotate_left(77);
            for other in [&mut moved, &mut backwards] {
                assert!(update_exact_sum(other, |x| x) == got, "{n}");
            }
        }
    }

    #[test]
    fn exact_sums_have_no_order() {
        check::<f32>(6e-8);
        check::<f64>(1.2e-16);
    }
}
