//! The cross-entropy of a linear layer's outputs, whose logits are in memory a few rows at a time. It is a language
//! model's loss without its `[N, V]` logits (Wijmans et al. 2024, "Cut Your Losses"; Liger Kernel's fused linear
//! cross-entropy).

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::{SmallVec, smallvec};

use super::{
    CrossEntropy, CrossEntropyGrad, CrossEntropyOptions, Fused, FusedOp, Reduction, as_forward, cross_entropy::mean_of,
    logit_chunks,
};
use crate::{
    DType, Error, Out, Result, Runtime, Shape, Support, Tensor,
    ops::{
        Apply, Backprop, Bits, MatmulOps, Op, Outs, Pointwise, PointwiseOps, ReduceOps, Saves, Spec, Specs, ViewOps,
    },
    pointwise::Program,
};

/// [`CrossEntropy`] of the logits `x · wᵀ + b`, of which [`chunk`](LinearCrossEntropy::chunk) rows are computed at a
/// time.
///
/// Inputs `x: [N, C]`, `w: [V, C]`, `b: [V]` if `bias`, all of one floating type, and the classes `target: [N]`
/// (`i64`). The first output is the losses `[N]` or, if `summed`, their sum, a scalar. For half-precision operands it
/// is in `f32`, and logits are rounded as a matrix product's are.
///
/// Where a sum is recorded, its gradients are computed with it, chunk by chunk, so that no logits are computed twice.
/// Backward multiplies them by the loss's gradient. They are further outputs, in `f32` for half precision, of which
/// they are rounded once.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy {
    /// The class whose rows do not contribute.
    pub ignore_index: i64,
    /// The probability mass that is spread over all classes.
    pub label_smoothing: f64,
    /// True if there is a bias.
    pub bias: bool,
    /// True if the output is the sum of the rows' losses.
    pub summed: bool,
    /// The rows whose logits are in memory at once, where they do not follow from the runtime's
    /// [`piece`](crate::Capabilities::piece).
    pub chunk: Option<usize>,
    /// Of `x`, `w` and `b`, those whose gradients are computed with the sum: the further outputs, in this order.
    pub gradients: Bits,
}

impl LinearCrossEntropy {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of `w` among the inputs.
    pub const WEIGHT: usize = 1;
    /// Position of `b` among the inputs, if given.
    pub const BIAS: usize = 2;

    /// The rows of a chunk of about so many bytes for logits `[N, V]` of type `dtype`: a power of two.
    pub fn chunk_of(bytes: usize, vocabulary: usize, dtype: DType) -> usize {
        let rows = bytes / (vocabulary * dtype.size()).max(1);
        1 << rows.max(1).ilog2()
    }

    /// Position of the classes among the inputs.
    pub(crate) fn target_at(&self) -> usize {
        LinearCrossEntropy::BIAS + usize::from(self.bias)
    }

    /// Inputs that have gradients, those of `which`.
    pub(super) fn learned(&self, which: Bits) -> impl Iterator<Item = usize> + use<> {
        (0..self.target_at()).filter(move |i| which.has(*i))
    }

    /// The cross-entropy of a chunk's logits.
    pub(super) fn of_logits(&self) -> CrossEntropy {
        CrossEntropy { ignore_index: self.ignore_index, label_smoothing: self.label_smoothing, weighted: false }
    }

    fn logits<T: Apply>(&self, ins: &[&T]) -> Result<T> {
        let bias = self.bias.then(|| ins[LinearCrossEntropy::BIAS]);
        ins[LinearCrossEntropy::X].linear(ins[LinearCrossEntropy::WEIGHT], bias)
    }

    /// The gradients of `self.gradients` from those of the rows' losses, `g: [N]`, by all logits at once, in `dtype`.
    fn composed_gradients<T: Apply>(&self, ins: &[&T], g: &T, dtype: DType) -> Result<Outs<T>> {
        let (logits, target) = (self.logits(ins)?, ins[self.target_at()]);
        let stats = T::apply(self.of_logits().into(), &[&logits, target])?;
        let (top, log_sum) = (&stats[CrossEntropy::TOP], &stats[CrossEntropy::LOG_SUM]);
        let d = T::apply1(CrossEntropyGrad(self.of_logits()), &[&logits, target, top, log_sum, g])?.to_dtype(dtype)?;
        let wide = |i: usize| ins[i].to_dtype(dtype);
        let of = |i| match i {
            LinearCrossEntropy::X => d.matmul(&wide(LinearCrossEntropy::WEIGHT)?),
            LinearCrossEntropy::WEIGHT => d.t()?.matmul(&wide(LinearCrossEntropy::X)?),
            _ => d.sum(&[0]),
        };
        self.learned(self.gradients).map(of).collect()
    }
}

impl Fused for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = self.target_at() + 1;
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (x, w, y) = (ins[LinearCrossEntropy::X], ins[LinearCrossEntropy::WEIGHT], ins[self.target_at()]);
        let floats = &ins[..self.target_at()];
        if !x.dtype.is_float() || floats.iter().any(|s| s.dtype != x.dtype) || y.dtype != DType::I64 {
            let dtypes: Vec<DType> = ins.iter().map(|s| s.dtype).collect();
            let why = "input, weight and bias must have one floating dtype, classes are i64";
            return Err(Error::dtype("linear_cross_entropy", &dtypes, why));
        }
        let wrong = |why: String| {
            let shapes: Vec<Shape> = ins.iter().map(|s| s.shape).collect();
            Err(Error::shape("linear_cross_entropy", &shapes, why))
        };
        if x.shape.rank() != 2 || w.shape.rank() != 2 || y.shape.dims() != [x.shape[0]] {
            return wrong("needs x [.., C], a weight [V, C] and classes [..]".into());
        }
        if x.shape[1] != w.shape[1] {
            return wrong(format!("x has {} features, the weight takes {}", x.shape[1], w.shape[1]));
        }
        if self.bias && ins[LinearCrossEntropy::BIAS].shape.dims() != [w.shape[0]] {
            return wrong(format!("needs a bias [{}]", w.shape[0]));
        }
        let dtype = x.dtype.compute();
        let losses = Spec { shape: if self.summed { Shape::SCALAR } else { y.shape }, dtype };
        let gradients = self.learned(self.gradients).map(|i| Spec { dtype, ..ins[i] });
        Ok(std::iter::once(losses).chain(gradients).collect())
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let target = ins[self.target_at()];
        let losses = T::apply(self.of_logits().into(), &[&self.logits(ins)?, target])?.remove(0);
        if !self.summed {
            return Ok(smallvec![losses]);
        }
        let mut outs: Outs<T> = smallvec![losses.sum_all()?];
        if self.gradients != Bits::NONE {
            let Spec { shape, dtype } = losses.spec();
            let one = T::constant(Tensor::full(losses.runtime(), shape, dtype, 1.0)?);
            outs.extend(self.composed_gradients(ins, &one, dtype)?);
        }
        Ok(outs)
    }

    fn computes_in_f32(&self) -> bool {
        // Products of half-precision matrices already accumulate in `f32`, and losses are computed in it.
        false
    }

    fn run_in_parts<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
        logit_chunks::forward(self, ins, outs)?;
        Ok(Support::Done)
    }

    fn with_gradients(&self, wants: Bits) -> Option<FusedOp> {
        let gradients = Bits(self.learned(wants).fold(0, |bits, i| bits | 1 << i));
        self.summed.then(|| FusedOp::LinearCrossEntropy(LinearCrossEntropy { gradients, ..self.clone() }))
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        let given = 1..=self.learned(self.gradients).count();
        // Inputs are read where the gradient is recorded, or is that of rows.
        let inputs = (0..=self.target_at()).fold(0, |bits, i| bits | 1 << i);
        Some(Saves { inputs: Bits(inputs), outputs: Bits(given.fold(0, |bits, k| bits | 1 << k)) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let mut g = cx.grad()?;
        let wanted: SmallVec<[usize; 3]> = (0..self.target_at()).filter(|&i| cx.wants(i)).collect();
        let all_given = wanted.iter().all(|&i| self.gradients.has(i));
        if self.summed && all_given && !cx.is_recorded() {
            for (k, i) in self.learned(self.gradients).enumerate() {
                let (given, dtype) = (cx.output(1 + k)?, cx.input_spec(i)?.dtype);
                cx.give(i, scaled(dtype), &[&given, &g])?;
            }
            return Ok(());
        }
        let mut ins: SmallVec<[T; 5]> = (0..=self.target_at()).map(|i| cx.input(i)).collect::<Result<_>>()?;
        if self.summed {
            g = g.broadcast_to(ins[self.target_at()].spec().shape)?;
        }
        ins.push(g);
        let gradients = Bits(wanted.iter().fold(0, |bits, i| bits | 1 << i));
        let op = LinearCrossEntropyGrad(LinearCrossEntropy { gradients, summed: false, ..self.clone() });
        let outs = T::apply(op.into(), &ins.iter().collect::<SmallVec<[&T; 5]>>())?;
        wanted.into_iter().zip(&outs).try_for_each(|(i, out)| cx.give_value(i, out))
    }
}

/// The loss that [`NnOps::linear_cross_entropy_with`](super::NnOps::linear_cross_entropy_with) returns.
#[track_caller]
pub(super) fn reduced<T: Apply>(
    x: &T,
    weight: &T,
    bias: Option<&T>,
    target: &T,
    options: CrossEntropyOptions,
) -> Result<T> {
    let (xs, ws, y) = (x.spec().shape, weight.spec(), target.spec().shape);
    let (rows, [features]) = xs.split_last_chunk().map_or((&[][..], [0]), |(rows, last)| (rows, *last));
    if xs.rank() == 0 || y[..] != *rows || ws.shape.rank() != 2 {
        let why = "needs x [.., C], a weight [V, C] and classes [..]";
        return Err(T::explained(Error::shape("linear_cross_entropy", &[xs, ws.shape, y], why), &[x, weight, target]));
    }
    let CrossEntropyOptions { ignore_index, label_smoothing, reduction } = options;
    let op = LinearCrossEntropy {
        ignore_index,
        label_smoothing,
        bias: bias.is_some(),
        summed: reduction != Reduction::None,
        chunk: None,
        gradients: Bits::NONE,
    };
    let (x, classes) = (x.reshape([y.numel(), features])?, target.reshape([y.numel()])?);
    let ins: SmallVec<[&T; 4]> = [&x, weight].into_iter().chain(bias).chain([&classes]).collect();
    let loss = T::apply(op.into(), &ins).map_err(|e| e.of_index("linear_cross_entropy", y))?.remove(0);
    match reduction {
        Reduction::None => loss.reshape(y),
        Reduction::Sum => Ok(loss),
        Reduction::Mean => mean_of(&loss, &classes, None, ignore_index),
    }
}

/// `given · g` as a gradient of type `dtype`, rounded once. A gradient of 0 stays 0 whatever `g` is: the mean over rows
/// that are all ignored has an infinite one.
fn scaled(dtype: DType) -> Op {
    static SCALED: LazyLock<Vec<Program>> = LazyLock::new(|| {
        let of = |dtype: DType| Program::new("scaled_gradient", |[x, g], []| [x.eq(0.0).select(x, x * g).cast(dtype)]);
        DType::ALL.iter().filter(|dtype| dtype.is_float()).map(|&dtype| of(dtype)).collect()
    });
    let at = DType::ALL.iter().filter(|dtype| dtype.is_float()).position(|d| *d == dtype).unwrap_or(0);
    Pointwise::new(&SCALED[at], &[]).into()
}

/// The gradients of [`LinearCrossEntropy`] for losses of rows. Inputs are `x`, `w`, `b` if there is a bias, the classes
/// and the gradient of the losses, `[N]`, in their type. Outputs are those of the op's
/// [`gradients`](LinearCrossEntropy::gradients), in the operands' type; logits are recomputed.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropyGrad(
    /// The options of the forward operation.
    pub LinearCrossEntropy,
);

impl Fused for LinearCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = self.0.target_at() + 2;
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (forward, g) = (&ins[..=self.0.target_at()], &ins[self.0.target_at() + 1]);
        let losses = LinearCrossEntropy { summed: false, gradients: Bits::NONE, ..self.0.clone() }.infer(forward)?[0];
        as_forward(self.name(), [("the gradient", g, &losses)])?;
        Ok(self.0.learned(self.0.gradients).map(|i| ins[i]).collect())
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let dtype = ins[LinearCrossEntropy::X].spec().dtype;
        self.0.composed_gradients(ins, ins[self.0.target_at() + 1], dtype)
    }

    fn computes_in_f32(&self) -> bool {
        false
    }

    fn run_in_parts<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
        logit_chunks::backward(&self.0, ins, outs)?;
        Ok(Support::Done)
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}
