//! Values with a bound on the rounding errors of a computation in a narrower type.

use super::tree::{One, Tree, Two};

/// A value and a bound on the error of its computed counterpart; functions return `None` where no bound exists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounded {
    pub(super) value: f64,
    pub(super) error: f64,
}

/// The relative error of one op, in units of the type's spacing: functions are accurate to a few of them.
const PER_OP: f64 = 4.0;
/// Magnitudes beyond which `f32` overflows, or loses digits as it nears 0.
const RANGE: std::ops::Range<f64> = 1e-30..1e30;

impl Tree {
    /// The value of the expression with its bound, for a type with this machine epsilon.
    pub(super) fn bounded(&self, x: &[f64], epsilon: f64) -> Option<Bounded> {
        let at = |t: &Tree| t.bounded(x, epsilon);
        match self {
            Tree::Input(i) => Some(Bounded { value: x[*i], error: 0.0 }),
            Tree::Number(v) => Bounded { value: *v, error: 0.0 }.after(0.0, epsilon),
            Tree::One(op, a) => one(*op, at(a)?)?.after(PER_OP, epsilon),
            Tree::Two(op, l, r) => two(*op, at(l)?, at(r)?)?.after(PER_OP, epsilon),
            Tree::Select(four) => {
                let [l, r, then, or] = &**four;
                if less(at(l)?, at(r)?)? { at(then) } else { at(or) }
            }
        }
    }
}

impl Bounded {
    /// Adds the rounding of the op that made the value; `None` where the type's range ends.
    fn after(mut self, per_op: f64, epsilon: f64) -> Option<Bounded> {
        let magnitude = self.value.abs();
        if self.value.is_nan() || magnitude == f64::INFINITY {
            return (self.error == 0.0).then_some(self);
        }
        self.error += per_op.max(1.0) * epsilon * magnitude;
        let inside = magnitude == 0.0 && self.error == 0.0 || RANGE.contains(&(magnitude + self.error));
        (inside && self.error <= 0.05 * magnitude.max(1.0)).then_some(self)
    }

    fn ends(self) -> [f64; 2] {
        [self.value - self.error, self.value + self.error]
    }
}

/// The spread of values around a center; `None` if only some of them are finite, or one is NaN.
fn around(center: f64, others: impl IntoIterator<Item = f64>) -> Option<Bounded> {
    let mut error = 0.0f64;
    for other in others {
        if center.is_finite() && other.is_finite() {
            error = error.max((other - center).abs());
        } else if !(center == other || center.is_nan() && other.is_nan()) {
            return None;
        }
    }
    Some(Bounded { value: center, error })
}

/// The largest angles that are checked; beyond, results depend on the range reduction of a runtime.
const ANGLES: f64 = 1e9;

fn one(op: One, x: Bounded) -> Option<Bounded> {
    if matches!(op.name, "sin" | "cos") && x.value.abs() > ANGLES && x.value.is_finite() {
        return None;
    }
    let out = around((op.value)(x.value), x.ends().map(op.value))?;
    (!op.jumps || out.error == 0.0).then_some(out)
}

fn two(op: Two, a: Bounded, b: Bounded) -> Option<Bounded> {
    // A divisor that may be 0 gives no bound, unless it is exactly 0.
    let unsure = |x: Bounded| x.error > 0.0 && x.value.abs() <= x.error;
    if op.name == "%" && a.error + b.error > 0.0 {
        return None;
    }
    if op.name == "/" && unsure(b) || op.jumps && (unsure(a) || unsure(b)) {
        return None;
    }
    let corners = a.ends().into_iter().flat_map(|l| b.ends().map(|r| (op.value)(l, r)));
    around((op.value)(a.value, b.value), corners)
}

fn less(a: Bounded, b: Bounded) -> Option<bool> {
    let certain = a.error + b.error == 0.0 || (a.value - b.value).abs() > a.error + b.error;
    (certain || a.value.is_nan() || b.value.is_nan()).then_some(a.value < b.value)
}
