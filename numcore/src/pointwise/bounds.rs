//! Bounds of a program's whole and truth values, from bounds of its inputs: interval arithmetic, without reading data.

use super::{Binary, Const, Inst, Program, Typed, Unary, reference::whole_rem};
use crate::DType;

/// The smallest and the largest value that a whole number may have; truth values are 0 and 1. `None` if nothing is
/// known, as of every real number.
pub type Bounds = Option<(i64, i64)>;

const TRUTH: (i64, i64) = (0, 1);

impl Program {
    /// The bounds of the outputs, given those of the inputs. Every value that the program may compute is within them.
    pub fn bounds(&self, inputs: &[Bounds]) -> Vec<Bounds> {
        let of = self.bounds_of_values(inputs);
        self.outputs().iter().map(|&o| of[o as usize]).collect()
    }

    /// The typing in which `i32` replaces `i64`, if every whole number that the program computes fits, given bounds of
    /// the inputs. Values are the same, and devices without 64-bit integers compute them faster.
    pub fn in_32_bits(&self, typed: &Typed, inputs: &[Bounds]) -> Option<Typed> {
        let fits = |bounds: Bounds| bounds.is_some_and(|(low, high)| low >= i32::MIN.into() && high <= i32::MAX.into());
        let of = self.bounds_of_values(inputs);
        let all = typed.dtypes.iter().zip(of).all(|(&dtype, bounds)| dtype != DType::I64 || fits(bounds));
        let narrow = |&dtype: &DType| if dtype == DType::I64 { DType::I32 } else { dtype };
        all.then(|| Typed { dtypes: typed.dtypes.iter().map(narrow).collect() })
    }

    fn bounds_of_values(&self, inputs: &[Bounds]) -> Vec<Bounds> {
        let mut of: Vec<Bounds> = Vec::with_capacity(self.insts().len());
        for inst in self.insts() {
            let bounds = match *inst {
                Inst::Input(i) => inputs.get(i as usize).copied().flatten(),
                Inst::Const(Const::Int(value)) => Some((value, value)),
                Inst::Const(Const::Bool(value)) => Some((value.into(), value.into())),
                Inst::Unary(op, a) => unary(op, of[a as usize]),
                Inst::Binary(op, a, b) => binary(op, of[a as usize], of[b as usize]),
                Inst::Select(c, a, b) => match (of[c as usize], of[a as usize], of[b as usize]) {
                    (Some((1, 1)), a, _) => a,
                    (Some((0, 0)), _, b) => b,
                    (_, Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
                    _ => None,
                },
                Inst::Cast(DType::I64, a) => of[a as usize],
                Inst::Cast(DType::Bool, a) => Some(of[a as usize].map_or(TRUTH, truth)),
                _ => None,
            };
            of.push(bounds);
        }
        of
    }
}

/// The truth of a number that is not 0, as far as bounds tell.
fn truth((low, high): (i64, i64)) -> (i64, i64) {
    compared(low > 0 || high < 0, (low, high) == (0, 0))
}

fn unary(op: Unary, a: Bounds) -> Bounds {
    match (op, a) {
        (Unary::Not, Some((low, high))) => Some((1 - high, 1 - low)),
        (Unary::Not, None) => Some(TRUTH),
        (Unary::Neg, Some((low, high))) => Some((high.checked_neg()?, low.checked_neg()?)),
        (Unary::Abs, Some((low, high))) if low >= 0 => Some((low, high)),
        (Unary::Abs, Some((low, high))) => Some((0.max(-high.min(0)), high.max(low.checked_neg()?))),
        _ => None,
    }
}

fn binary(op: Binary, a: Bounds, b: Bounds) -> Bounds {
    let known = a.zip(b);
    match op {
        Binary::And if a == Some((0, 0)) || b == Some((0, 0)) => Some((0, 0)),
        Binary::And => known.filter(are_truths).map(|(a, b)| (a.0 & b.0, a.1 & b.1)),
        Binary::Or => known.filter(are_truths).map(|(a, b)| (a.0 | b.0, a.1 | b.1)),
        Binary::Lt => Some(known.map_or(TRUTH, |(a, b)| compared(a.1 < b.0, a.0 >= b.1))),
        Binary::Le => Some(known.map_or(TRUTH, |(a, b)| compared(a.1 <= b.0, a.0 > b.1))),
        Binary::Eq => Some(known.map_or(TRUTH, |(a, b)| equal(a, b))),
        Binary::Ne => unary(Unary::Not, Some(known.map_or(TRUTH, |(a, b)| equal(a, b)))),
        Binary::Add => known.and_then(|(a, b)| Some((a.0.checked_add(b.0)?, a.1.checked_add(b.1)?))),
        Binary::Sub => known.and_then(|(a, b)| Some((a.0.checked_sub(b.1)?, a.1.checked_sub(b.0)?))),
        Binary::Mul => known.and_then(|(a, b)| {
            let ends = [a.0.checked_mul(b.0)?, a.0.checked_mul(b.1)?, a.1.checked_mul(b.0)?, a.1.checked_mul(b.1)?];
            Some((*ends.iter().min()?, *ends.iter().max()?))
        }),
        Binary::Max => known.map(|(a, b)| (a.0.max(b.0), a.1.max(b.1))),
        Binary::Min => known.map(|(a, b)| (a.0.min(b.0), a.1.min(b.1))),
        Binary::Div => known.and_then(|(a, b)| (b.0 == b.1 && b.0 > 0).then(|| (a.0 / b.0, a.1 / b.0))),
        Binary::Rem => known.and_then(|(a, b)| {
            let by = (b.0 == b.1 && b.0 > 0).then_some(b.0)?;
            let same = a.0.div_euclid(by) == a.1.div_euclid(by);
            Some(if same { (whole_rem(a.0, by), whole_rem(a.1, by)) } else { (0, by - 1) })
        }),
        _ => None,
    }
}

/// Tells whether both are truth values, whose bits are their truth.
fn are_truths((a, b): &((i64, i64), (i64, i64))) -> bool {
    a.0 >= 0 && a.1 <= 1 && b.0 >= 0 && b.1 <= 1
}

fn compared(always: bool, never: bool) -> (i64, i64) {
    (always.into(), (!never).into())
}

fn equal(a: (i64, i64), b: (i64, i64)) -> (i64, i64) {
    compared(a.0 == a.1 && a == b, a.1 < b.0 || b.1 < a.0)
}
