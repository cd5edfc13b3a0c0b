//! What gradients travel as.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, TensorMut,
    ops::{Input, compute},
    pointwise::Program,
};

use super::PowerSgd;
use crate::comm::{Collectives, Comm, ReduceOp, Work};

/// What gradients are sent as. They are summed in `f32` either way.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Wire {
    /// As they are.
    #[default]
    Own,
    /// As `bf16`: half the bytes of `f32`, its range, three digits.
    Bf16,
    /// As `f16`: half the bytes, four digits; the mean is sent, because a sum may leave its range.
    F16,
    /// As products of thin matrices, with what is lost sent later; what is not compressed travels as it is. Not in canonical order.
    PowerSgd(PowerSgd),
}

impl Wire {
    /// The type it travels as, and what makes it that.
    fn narrow(self) -> Option<(DType, &'static Program)> {
        static BF16: LazyLock<Program> = LazyLock::new(|| Program::new("narrow", |[x], []| [x.cast(DType::BF16)]));
        static F16: LazyLock<Program> = LazyLock::new(|| Program::new("narrow", |[x], []| [x.cast(DType::F16)]));
        match self {
            Wire::Own | Wire::PowerSgd(_) => None,
            Wire::Bf16 => Some((DType::BF16, &BF16)),
            Wire::F16 => Some((DType::F16, &F16)),
        }
    }

    /// Sums `x` over all ranks in place.
    pub(crate) fn all_reduce<R: Runtime>(self, comm: &Comm<R>, x: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        static WIDEN: LazyLock<Program> =
            LazyLock::new(|| Program::new("widen", |[x, own], [n]| [x.cast_like(own) * n]));
        let Some((dtype, narrow_down)) = self.narrow().filter(|(d, _)| d.size() < x.dtype().size()) else {
            return comm.all_reduce(x, ReduceOp::Sum);
        };
        let rt = comm.runtime().clone();
        let mut narrow = TensorMut::alloc(&rt, *x.shape(), dtype)?;
        compute(&rt, narrow_down, &[Input::Memory(&x)], &[], &mut [&mut narrow])?;
        let n = comm.size() as f64;
        let work = comm.all_reduce(narrow, ReduceOp::Avg)?;
        Ok(work.map(move |narrow| {
            let mut x = x;
            compute(&rt, &WIDEN, &[Input::Memory(&narrow), Input::Own(0)], &[n.into()], &mut [&mut x])?;
            Ok(x)
        }))
    }
}
