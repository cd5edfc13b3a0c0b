//! Staging of half-precision rows: they are upcast into a buffer before they are read, and rounded when they are
//! stored. Rows of `f32` and `f64` are read and written in place.
//!
//! A few rows are staged at a time, so that they stay in L1. (Casts of whole operands took an eighth of a training
//! step.)

use std::{cell::RefCell, ops::Range};

use super::StoredFloat;
use crate::{
    Simd,
    element::Stored,
    gemm::{CacheLine, workspace},
    simd::multiversion,
};

/// Elements that are staged at once, about.
const BLOCK: usize = 4096;

thread_local! {
    /// Staged rows. They stay allocated, so that a call allocates nothing.
    static STAGING: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with blocks of these rows, and with `N` staging buffers of a block's size. They are empty for `f32` and
/// `f64`.
pub(super) fn blocks<S: StoredFloat, const N: usize>(
    rows: Range<usize>,
    width: usize,
    mut f: impl FnMut(Range<usize>, [&mut [S::Lane]; N]),
) {
    let most = if S::IS_LANE { rows.len() } else { (BLOCK / width.max(1)).clamp(1, rows.len().max(1)) };
    let size = if S::IS_LANE { 0 } else { (most * width).next_multiple_of(size_of::<CacheLine>()) };
    STAGING.with_borrow_mut(|staging| {
        let staging = workspace::<S::Lane>(staging, N * size);
        for from in rows.clone().step_by(most.max(1)) {
            let mut rest = &mut *staging;
            f(from..rows.end.min(from + most), std::array::from_fn(|_| rest.split_off_mut(..size).unwrap_or_default()));
        }
    });
}

/// Calls `f` with each of these rows, and with `N` staging buffers of a row's size.
pub(super) fn each<S: StoredFloat, const N: usize>(
    rows: Range<usize>,
    width: usize,
    mut f: impl FnMut(usize, [&mut [S::Lane]; N]),
) {
    blocks::<S, N>(rows, width, |rows, mut staging| {
        for row in rows {
            f(row, staging.each_mut().map(|x| &mut **x));
        }
    });
}

/// The elements in the type they are computed in: in place, or upcast into `staging`.
pub(super) fn read<'a, S: StoredFloat>(simd: Simd, x: &'a [S], staging: &'a mut [S::Lane]) -> &'a [S::Lane] {
    match S::lanes(x) {
        Some(x) => x,
        None => {
            let staging = &mut staging[..x.len()];
            upcast(simd, x, staging);
            staging
        }
    }
}

/// Lets `f` write the elements of `y`: in place, or in `staging`, from which they are rounded.
pub(super) fn write<S: StoredFloat, R>(
    simd: Simd,
    y: &mut [S],
    staging: &mut [S::Lane],
    f: impl FnOnce(&mut [S::Lane]) -> R,
) -> R {
    if let Some(y) = S::lanes_mut(y) {
        return f(y);
    }
    let staging = &mut staging[..y.len()];
    let result = f(staging);
    round(simd, staging, y);
    result
}

/// Writes rows like [`write`], but if `read` is set, `f` gets the old elements of `y`.
pub(super) fn update<S: StoredFloat, R>(
    simd: Simd,
    y: &mut [S],
    staging: &mut [S::Lane],
    read: bool,
    f: impl FnOnce(&mut [S::Lane]) -> R,
) -> R {
    if read && !S::IS_LANE {
        upcast(simd, y, &mut staging[..y.len()]);
    }
    write(simd, y, staging, f)
}

multiversion! {
    /// Upcasts elements, exactly.
    pub(super) fn upcast<S: (Stored)>(x: &[S], to: &mut [S::Lane]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = x.load();
        }
    }

    /// Rounds elements to nearest.
    pub(super) fn round<S: (Stored)>(x: &[S::Lane], to: &mut [S]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = S::store(x);
        }
    }
}
