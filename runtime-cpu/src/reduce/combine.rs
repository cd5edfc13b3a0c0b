//! Combines values into one: over a row, over rows, pairwise over a sequence.

use smallvec::SmallVec;

use crate::{
    element::{Lane, Stored},
    machine::Machine,
    operand::Base,
    simd::{multiversion, prefetch},
};

/// A reduction operator: its identity, and how it combines two values.
pub(super) trait Combine<T: Lane>: 'static {
    const FIRST: T;
    fn combine(a: T, b: T) -> T;
}

macro_rules! combine {
    ($($name:ident $first:ident $two:ident;)*) => {$(
        pub(super) struct $name;
        impl<T: Lane> Combine<T> for $name {
            const FIRST: T = T::$first;
            #[inline(always)]
            fn combine(a: T, b: T) -> T {
                a.$two(b)
            }
        }
    )*};
}
combine! { Sum ZERO add; Prod ONE mul; Max LOWEST max; Min HIGHEST min; }

/// Combines a sequence of any length like a balanced tree: level `l` holds `2ˡ` values or none.
pub(super) struct Pairwise<T> {
    levels: SmallVec<[T; 32]>,
    count: usize,
}

impl<T> Default for Pairwise<T> {
    fn default() -> Self {
        Pairwise { levels: SmallVec::new(), count: 0 }
    }
}

impl<T: Lane> Pairwise<T> {
    pub(super) fn push<C: Combine<T>>(&mut self, mut value: T) {
        let full = self.count.trailing_ones();
        for _ in 0..full {
            value = C::combine(self.levels.pop().unwrap_or(C::FIRST), value);
        }
        self.levels.push(value);
        self.count += 1;
    }

    pub(super) fn finish<C: Combine<T>>(self) -> T {
        self.levels.into_iter().rev().reduce(|near, far| C::combine(far, near)).unwrap_or(C::FIRST)
    }
}

/// The first `n` values of a workspace, which grows as needed.
pub(super) fn scratch<T: Lane>(words: &mut Vec<u64>, n: usize) -> &mut [T] {
    words.resize(words.len().max(n), 0);
    // SAFETY: a lane has at most 8 bytes, every bit pattern is one, and the words outlive the slice.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), n) }
}

multiversion! {
    /// Combines all elements of a block.
    pub(super) fn run<T: (Lane), C: (Combine<T>)>(x: &[T]) -> T {
        row_value::<T, C>(x)
    }

    /// Combines each row of a block.
    pub(super) fn rows_of<T: (Lane), C: (Combine<T>)>(x: &[T], columns: usize, to: &mut [T]) {
        for (to, row) in to.iter_mut().zip(x.chunks_exact(columns)) {
            *to = row_value::<T, C>(row);
        }
    }

    pub(super) fn combine<T: (Lane), C: (Combine<T>)>(to: &mut [T], x: &[T]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = C::combine(*to, *x);
        }
    }

    /// Combines rows into the first, in a tree: in each round, the second half of the rows into the first half.
    pub(super) fn fold_rows<T: (Lane), C: (Combine<T>)>(x: &mut [T], rows: usize, columns: usize) {
        let mut rows = rows;
        while rows > 1 {
            let half = rows.div_ceil(2);
            let (to, from) = x[..rows * columns].split_at_mut(half * columns);
            for (to, x) in to.iter_mut().zip(from) {
                *to = C::combine(*to, *x);
            }
            rows = half;
        }
    }

    /// Stores values `stride` elements apart, or accumulates them into the old ones.
    pub(super) fn write<S: (Stored)>(to: Base<S>, stride: isize, values: &[S::Lane], add: bool) {
        if stride == 1 && !add {
            // SAFETY: elements of the output that are this task's alone.
            let to = unsafe { to.slice_mut(0, values.len()) };
            to.iter_mut().zip(values).for_each(|(to, x)| *to = S::store(*x));
            return;
        }
        for (i, &x) in values.iter().enumerate() {
            let i = i as isize * stride;
            // SAFETY: elements of the output that are this task's alone.
            unsafe { to.set(i, S::store(if add { to.get(i).load().add(x) } else { x })) };
        }
    }
}

/// Combines a row in as many lanes as hide the latency of an addition, then the lanes pairwise.
#[inline(always)]
fn row_value<T: Lane, C: Combine<T>>(x: &[T]) -> T {
    const LANES: usize = 64;
    let mut lanes = [C::FIRST; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    let distance = Machine::get().sum_ahead;
    for chunk in chunks {
        if distance > 0 {
            prefetch(chunk.as_ptr().wrapping_byte_add(distance), LANES);
        }
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane = C::combine(*lane, *x));
    }
    if chunks.is_empty() && rest.len() <= 8 {
        return rest.iter().copied().reduce(C::combine).unwrap_or(C::FIRST);
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = C::combine(*lane, *x);
    }
    let mut n = LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] = C::combine(lanes[i], lanes[i + n]);
        }
    }
    lanes[0]
}
