//! What gradients travel as.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, Tensor, TensorMut,
    ops::{Input, compute},
    pointwise::Program,
};

use super::PowerSgd;
use crate::comm::{Collectives, Comm, ReduceOp, Work};

/// What gradients are sent as. They are summed in `f32` either way.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum GradCompression {
    /// As they are.
    #[default]
    Own,
    /// As `bf16`: half the bytes of `f32`, its range, three digits.
    Bf16,
    /// As `f16`: half the bytes, four digits. Sums over examples or tokens would leave its range (65504), so what is sent is the gradient
    /// of the mean loss, times the loss scale where there is one: a rank's sum times `n / weight`, averaged over the `n` ranks, where
    /// `weight` is what all losses of the step weigh. It is known to all after one more exchange of one number, with which the last
    /// backward pass of a step begins. [`Buckets`](super::Buckets) that were not given the weight of the losses send sums.
    F16,
    /// As products of thin matrices, with what is lost sent later; what is not compressed travels as it is. Not in canonical order.
    PowerSgd(PowerSgd),
}

static BF16: LazyLock<Program> = LazyLock::new(|| Program::new("narrow", |[x], []| [x.cast(DType::BF16)]));
static WIDEN: LazyLock<Program> = LazyLock::new(|| Program::new("widen", |[x, own], [n]| [x.cast_like(own) * n]));
/// A step that weighs nothing is an error after its gradients were sent; until then the gaps between them stay zero.
static MEAN: LazyLock<Program> = LazyLock::new(|| {
    Program::new("narrow_mean", |[x, weight], [n]| {
        let weight = weight.cast_like(x);
        [(x * weight.gt(0.0).select(n / weight, 0.0)).cast(DType::F16)]
    })
});
static SUM: LazyLock<Program> = LazyLock::new(|| {
    Program::new("widen_sum", |[mean, own, weight], []| [mean.cast_like(own) * weight.cast_like(own)])
});

impl GradCompression {
    /// Whether it needs to know what the losses of a step weigh.
    pub(super) fn sends_means(self) -> bool {
        self == GradCompression::F16
    }

    /// Sums `x` over all ranks in place. `weight` is what the losses of all ranks weigh, one element.
    pub(super) fn all_reduce<R: Runtime>(
        self,
        comm: &Comm<R>,
        x: TensorMut<R>,
        weight: impl FnOnce() -> Result<Tensor<R>>,
    ) -> Result<Work<TensorMut<R>>> {
        let dtype = match self {
            GradCompression::Own | GradCompression::PowerSgd(_) => x.dtype(),
            GradCompression::Bf16 => DType::BF16,
            GradCompression::F16 => DType::F16,
        };
        if dtype.size() >= x.dtype().size() {
            return comm.all_reduce(x, ReduceOp::Sum);
        }
        let (rt, n) = (comm.runtime().clone(), comm.size() as f64);
        let mut narrow = TensorMut::alloc(&rt, *x.shape(), dtype)?;
        if !self.sends_means() {
            compute(&rt, &BF16, &[Input::Memory(&x)], &[], &mut [&mut narrow])?;
            return Ok(comm.all_reduce(narrow, ReduceOp::Avg)?.map(move |narrow| {
                let mut x = x;
                compute(&rt, &WIDEN, &[Input::Memory(&narrow), Input::Own(0)], &[n.into()], &mut [&mut x])?;
                Ok(x)
            }));
        }
        let weight = weight()?;
        compute(&rt, &MEAN, &[Input::Memory(&x), Input::Value(&weight)], &[n.into()], &mut [&mut narrow])?;
        Ok(comm.all_reduce(narrow, ReduceOp::Avg)?.map(move |mean| {
            let mut x = x;
            let ins = [Input::Memory(&mean), Input::Own(0), Input::Value(&weight)];
            compute(&rt, &SUM, &ins, &[], &mut [&mut x])?;
            Ok(x)
        }))
    }
}
