//! Programs whose values are summed.

use super::{Expr, Program};
use crate::DType;

/// A program that is summed, in two forms: as written, and with `f16` and `bf16` upcast to `f32` first. Squares and
/// exponentials exceed the range and precision of half-precision dtypes.
#[derive(Clone, Debug)]
pub struct Widened([Program; 2]);

/// The form of a [`Widened`] program that is built.
#[derive(Clone, Copy, Debug)]
pub struct Widening(bool);

impl Widening {
    /// The operand, upcast to `f32` in the form for half precision.
    pub fn of(self, x: Expr<'_>) -> Expr<'_> {
        if self.0 { x.cast(DType::F32) } else { x }
    }
}

impl Widened {
    /// Builds both forms of a program, which passes its operands through [`Widening::of`].
    pub fn new(program: impl Fn(Widening) -> Program) -> Self {
        Widened([false, true].map(|wide| program(Widening(wide))))
    }

    /// The form for operands of this dtype.
    pub fn of(&self, dtype: DType) -> &Program {
        &self.0[usize::from(dtype.is_half())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_alone_is_upcast() {
        let twice = Widened::new(|wide| Program::new("twice", |[x], []| [wide.of(x) + wide.of(x)]));
        let out = |dtype| twice.of(dtype).resolve(&[dtype], &[]).unwrap().dtypes[twice.of(dtype).outputs()[0] as usize];
        assert_eq!(
            [DType::F16, DType::BF16, DType::F32, DType::F64].map(out),
            [DType::F32, DType::F32, DType::F32, DType::F64]
        );
    }
}
