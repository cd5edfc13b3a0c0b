//! Rows of halves as rows of what they are computed in: upcast aside before they are read, rounded when they are stored. Rows of
//! floats are read and written where they are.
//!
//! A few rows at a time, so that what lies aside stays in L1: casts of whole operands took an eighth of a training step.

use std::{cell::RefCell, ops::Range};

use super::Number;
use crate::{
    Simd,
    element::Stored,
    gemm::{CacheLine, workspace},
    simd::multiversion,
};

/// Numbers that are upcast at once, about.
const BLOCK: usize = 4096;

thread_local! {
    /// Rows aside; kept, so that a call allocates nothing.
    static ASIDE: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with blocks of these rows, and with room for `N` such blocks that are computed aside; none is needed for floats.
pub(super) fn blocks<S: Number, const N: usize>(
    rows: Range<usize>,
    width: usize,
    mut f: impl FnMut(Range<usize>, [&mut [S::Lane]; N]),
) {
    let most = if S::WIDE { rows.len() } else { (BLOCK / width.max(1)).clamp(1, rows.len().max(1)) };
    let size = if S::WIDE { 0 } else { (most * width).next_multiple_of(size_of::<CacheLine>()) };
    ASIDE.with_borrow_mut(|aside| {
        let aside = workspace::<S::Lane>(aside, N * size);
        for from in rows.clone().step_by(most.max(1)) {
            let mut rest = &mut *aside;
            f(from..rows.end.min(from + most), std::array::from_fn(|_| rest.split_off_mut(..size).unwrap_or_default()));
        }
    });
}

/// Calls `f` with each of these rows, and with room for `N` rows that are computed aside.
pub(super) fn each<S: Number, const N: usize>(
    rows: Range<usize>,
    width: usize,
    mut f: impl FnMut(usize, [&mut [S::Lane]; N]),
) {
    blocks::<S, N>(rows, width, |rows, mut wide| {
        for row in rows {
            f(row, wide.each_mut().map(|x| &mut **x));
        }
    });
}

/// Numbers as they are computed with: themselves, or upcast into `aside`.
pub(super) fn read<'a, S: Number>(simd: Simd, x: &'a [S], aside: &'a mut [S::Lane]) -> &'a [S::Lane] {
    match S::lanes(x) {
        Some(x) => x,
        None => {
            let aside = &mut aside[..x.len()];
            widen(simd, x, aside);
            aside
        }
    }
}

/// Lets `f` write the numbers of `y`: in place, or in `aside`, from where they are rounded.
pub(super) fn write<S: Number, R>(
    simd: Simd,
    y: &mut [S],
    aside: &mut [S::Lane],
    f: impl FnOnce(&mut [S::Lane]) -> R,
) -> R {
    if let Some(y) = S::lanes_mut(y) {
        return f(y);
    }
    let aside = &mut aside[..y.len()];
    let result = f(aside);
    round(simd, aside, y);
    result
}

/// As [`write`]; what `f` finds there are the numbers of `y` if they are `read`.
pub(super) fn update<S: Number, R>(
    simd: Simd,
    y: &mut [S],
    aside: &mut [S::Lane],
    read: bool,
    f: impl FnOnce(&mut [S::Lane]) -> R,
) -> R {
    if read && !S::WIDE {
        widen(simd, y, &mut aside[..y.len()]);
    }
    write(simd, y, aside, f)
}

multiversion! {
    /// Exact.
    pub(super) fn widen<S: (Stored)>(x: &[S], to: &mut [S::Lane]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = x.load();
        }
    }

    /// To the nearest.
    pub(super) fn round<S: (Stored)>(x: &[S::Lane], to: &mut [S]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = S::store(x);
        }
    }
}
