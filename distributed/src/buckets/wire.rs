//! What gradients travel as.

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
    fn dtype(self) -> Option<DType> {
        match self {
            Wire::Own | Wire::PowerSgd(_) => None,
            Wire::Bf16 => Some(DType::BF16),
            Wire::F16 => Some(DType::F16),
        }
    }

    /// Sums `x` over all ranks in place.
    pub(crate) fn all_reduce<R: Runtime>(self, comm: &Comm<R>, x: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        let Some(dtype) = self.dtype().filter(|d| d.size() < x.dtype().size()) else {
            return comm.all_reduce(x, ReduceOp::Sum);
        };
        let rt = comm.runtime().clone();
        let mut narrow = TensorMut::alloc(&rt, *x.shape(), dtype)?;
        let cast = Program::build("narrow", 1, 0, |_, x, _| vec![x[0].cast(dtype)]);
        compute(&rt, &cast, &[Input::Memory(&x)], &[], &mut [&mut narrow])?;
        let (n, own) = (comm.size() as f64, x.dtype());
        let work = comm.all_reduce(narrow, ReduceOp::Avg)?;
        Ok(work.map(move |narrow| {
            let mut x = x;
            let widen = Program::build("widen", 1, 1, |_, x, s| vec![x[0].cast(own) * s[0]]);
            compute(&rt, &widen, &[Input::Memory(&narrow)], &[n.into()], &mut [&mut x])?;
            Ok(x)
        }))
    }
}
