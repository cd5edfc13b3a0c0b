//! Comparison of computed with expected values.

use std::fmt;

use numcore::{DType, Result, Runtime, Tensor};

use super::HostValue;

/// The difference of a computed value from the expected one.
#[derive(Clone, Debug)]
pub struct Mismatch {
    what: String,
    why: String,
    error: f64,
    tolerance: f64,
}

impl Mismatch {
    /// A mismatch of values that could not be compared at all.
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Mismatch { what: what.into(), why: why.into(), error: f64::INFINITY, tolerance: 0.0 }
    }

    /// The largest error, relative to the expected value where that is above 1.
    pub fn error(&self) -> f64 {
        self.error
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tolerance == 0.0 && self.error.is_infinite() {
            return write!(f, "{}, {}", self.what, self.why);
        }
        write!(f, "{}, max error {:.3e}, tolerance {:.1e} ({})", self.what, self.error, self.tolerance, self.why)
    }
}

/// Compares a tensor with the expected value. Returns `None` if `got` has the shape and kind of `want` and every
/// element is within `|got − want| ≤ tol · max(1, |want|)`. Integers and `bool` must be equal; NaN equals NaN.
pub fn compare<R: Runtime>(what: &str, got: &Tensor<R>, want: &HostValue, tol: f64) -> Result<Option<Mismatch>> {
    if got.dims() != want.shape.dims() {
        return Ok(Some(Mismatch::new(what, format!("its shape is {}, expected {}", got.shape(), want.shape))));
    }
    if !same_kind(got.dtype(), want.dtype) {
        return Ok(Some(Mismatch::new(what, format!("its dtype is {}, expected {}", got.dtype(), want.dtype))));
    }
    let tol = if want.dtype.is_float() { tol } else { 0.0 };
    Ok(compare_values(what, &got.to_f64s()?, &want.to_f64s(), tol))
}

/// The worst mismatch of host values, by the tolerance of [`compare`].
pub fn compare_values(what: &str, got: &[f64], want: &[f64], tolerance: f64) -> Option<Mismatch> {
    if got.len() != want.len() {
        return Some(Mismatch::new(what, format!("{} values, expected {}", got.len(), want.len())));
    }
    let errors = got.iter().zip(want).map(|(&g, &w)| error(g, w));
    // `total_cmp` puts NaN last: a value that is NaN where it must not be is the worst.
    let (at, worst) = errors.enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    if worst <= tolerance {
        return None;
    }
    let why = format!("element {at} is {:?}, expected {:?}", got[at], want[at]);
    Some(Mismatch { what: what.into(), why, error: worst, tolerance: tolerance.max(f64::MIN_POSITIVE) })
}

/// The worst mismatch of host values; errors are relative to the largest expected value (if it is above 1).
pub fn compare_at_scale(what: &str, got: &[f64], want: &[f64], tolerance: f64) -> Option<Mismatch> {
    let largest = want.iter().filter(|w| w.is_finite()).fold(1.0f64, |m, w| m.max(w.abs()));
    let scaled = |values: &[f64]| values.iter().map(|v| v / largest).collect::<Vec<_>>();
    compare_values(what, &scaled(got), &scaled(want), tolerance)
}

fn error(got: f64, want: f64) -> f64 {
    if got == want || got.is_nan() && want.is_nan() {
        return 0.0;
    }
    let difference = (got - want).abs() / want.abs().max(1.0);
    // A finite value where an infinite one is expected: no quotient measures the error.
    if want.is_infinite() || difference.is_nan() { f64::NAN } else { difference }
}

/// Tells whether two types are comparable: floats must be of one type; integers of any width compare by value.
fn same_kind(a: DType, b: DType) -> bool {
    a == b || a.is_int() && b.is_int()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_relative_above_one() {
        assert!(compare_values("x", &[1000.0, 0.5], &[1000.009, 0.500009], 1e-5).is_none());
        let m = compare_values("x", &[0.0, 0.5], &[0.0, 0.52], 1e-5).unwrap();
        assert!((m.error() - 0.02).abs() < 1e-12 && m.to_string().contains("element 1"));
    }

    #[test]
    fn special_values_must_be_the_same() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert!(compare_values("x", &[nan, inf, -inf], &[nan, inf, -inf], 1e-5).is_none());
        for (got, want) in [(nan, 1.0), (1.0, nan), (1.0, inf), (inf, 1.0), (-inf, inf)] {
            assert!(compare_values("x", &[0.0, got], &[0.0, want], 1e-5).is_some(), "{got} for {want}");
        }
        assert!(compare_values("x", &[], &[], 0.0).is_none() && compare_values("x", &[1.0], &[], 0.0).is_some());
    }
}
