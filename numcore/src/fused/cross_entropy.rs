//! Cross-entropy of each row with integer classes: log-softmax and negative log-likelihood in one pass, so that the
//! `[N, C]` probabilities are never stored.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{CrossEntropyOptions, Fused, NnOps, Reduction, as_forward};
use crate::{
    DType, Error, Result, Tensor,
    ops::{Apply, Backprop, Bits, IndexOps, Outs, PointwiseOps, ReduceOps, Saves, Spec, Specs, ViewOps, finite_top},
};

/// The loss of each row, `w_y · (lse − x_y) · (1 − ε) + ε/C · Σ_c w_c · (lse − x_c)` with `lse = ln Σ_c eˣᶜ`; 0 where
/// the class is `ignore_index`.
///
/// Inputs are `x: [N, C]`, `target: [N]` (`i64`) and, if `weighted`, `w: [C]`. Outputs are the losses, the rows'
/// largest logits `top` (0 where infinite), and `ln Σ_c exp(x_c − top)`, each `[N]`. All three are `f32` for
/// half-precision logits, which are read as they are. The sum of the last two is `lse`, which rounds to the spacing of
/// `top`. Kept as two terms, they make the loss and its gradient independent of an offset of the row's logits.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// The class whose rows do not contribute.
    pub ignore_index: i64,
    /// `ε`: the probability mass that is spread over all classes (Szegedy et al. 2016).
    pub label_smoothing: f64,
    /// True if class weights are given.
    pub weighted: bool,
}

/// Values of the rows' targets that forward and gradient both need.
struct TargetRows<T> {
    valid: T,
    safe: T,
    weight_of_target: Option<T>,
}

impl CrossEntropy {
    fn rows<T: Apply>(&self, target: &T, weight: Option<&T>) -> Result<TargetRows<T>> {
        let valid = target.ne(self.ignore_index as f64)?;
        let zero = T::constant(Tensor::zeros(target.runtime(), [1], DType::I64)?);
        let safe = target.where_cond(&valid, &zero)?;
        let weight_of_target = weight.map(|w| w.index_select(0, &safe)).transpose()?;
        Ok(TargetRows { valid, safe, weight_of_target })
    }

    /// The sum of the class weights, `Σ_c w_c`; `C` without weights.
    fn joint<T: Apply>(&self, x: &T, weight: Option<&T>) -> Result<T> {
        match weight {
            Some(w) => w.sum_all(),
            None => Ok(T::constant(Tensor::full(x.runtime(), [], x.spec().dtype, x.spec().shape[1] as f64)?)),
        }
    }
}

impl CrossEntropy {
    /// Position of the logits among the inputs.
    pub const LOGITS: usize = 0;
    /// Position of the classes among the inputs.
    pub const TARGETS: usize = 1;
    /// Position of the weights of classes among the inputs, if given.
    pub const WEIGHT: usize = 2;
    /// Position of the losses among the outputs.
    pub const LOSS: usize = 0;
    /// Position of the largest finite logit of each row among the outputs.
    pub const TOP: usize = 1;
    /// Position of `ln Σ exp(x − top)` among the outputs.
    pub const LOG_SUM: usize = 2;
}

impl Fused for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = 2 + usize::from(self.weighted);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (x, y) = (ins[CrossEntropy::LOGITS], ins[CrossEntropy::TARGETS]);
        if !x.dtype.is_float() || y.dtype != DType::I64 {
            return Err(Error::dtype("cross_entropy", &[x.dtype, y.dtype], "needs floating logits and i64 classes"));
        }
        if x.shape.rank() != 2 || y.shape.dims() != [x.shape[0]] {
            return Err(Error::shape("cross_entropy", &[x.shape, y.shape], "needs logits [.., C] and classes [..]"));
        }
        let weight = ins.get(CrossEntropy::WEIGHT);
        if let Some(w) = weight.filter(|w| w.shape.dims() != [x.shape[1]] || w.dtype != x.dtype) {
            let why = format!("class weights must be [{}] of {}", x.shape[1], x.dtype);
            return Err(Error::shape("cross_entropy", &[x.shape, w.shape], why));
        }
        let row = |dtype| Spec { shape: y.shape, dtype };
        Ok(smallvec![row(x.dtype.compute()); 3])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (x, target) = (ins[CrossEntropy::LOGITS], ins[CrossEntropy::TARGETS]);
        let weight = ins.get(CrossEntropy::WEIGHT).copied();
        let rows = self.rows(target, weight)?;
        let (shape, row) = (x.spec().shape, target.spec().shape);
        let top = finite_top(x, shape.with(1, 1))?;
        let shifted = x.sub(&top)?;
        let log_sum = shifted.exp()?.sum(&[-1])?.log()?;
        let picked = shifted.gather(1, &rows.safe.unsqueeze(1)?)?.squeeze(1)?;
        let mut loss = log_sum.sub(&picked)?;
        if let Some(w) = &rows.weight_of_target {
            loss = loss.mul(w)?;
        }
        if self.label_smoothing != 0.0 {
            let weighted = weight.map_or(Ok(shifted.clone()), |w| shifted.mul(w))?;
            let spread = log_sum.mul(&self.joint(x, weight)?)?.sub(&weighted.sum(&[-1])?)?;
            let share = self.label_smoothing / shape[1] as f64;
            loss = loss.mul(1.0 - self.label_smoothing)?.add(&spread.mul(share)?)?;
        }
        Ok(smallvec![loss.where_cond(&rows.valid, 0.0)?, top.reshape(row)?, log_sum])
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        let inputs = Bits::of(if self.weighted { &[0, 1, 2] } else { &[0, 1] });
        let outputs = Bits::of(&[CrossEntropy::TOP, CrossEntropy::LOG_SUM]);
        (!wants.has(CrossEntropy::WEIGHT)).then_some(Saves { inputs, outputs })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let (x, y) = (cx.input(CrossEntropy::LOGITS)?, cx.input(CrossEntropy::TARGETS)?);
        let (top, log_sum) = (cx.output(CrossEntropy::TOP)?, cx.output(CrossEntropy::LOG_SUM)?);
        let op = CrossEntropyGrad(self.clone());
        if self.weighted {
            let w = cx.input(CrossEntropy::WEIGHT)?;
            return cx.give(CrossEntropy::LOGITS, op.into(), &[&x, &y, &top, &log_sum, &g, &w]);
        }
        cx.give(CrossEntropy::LOGITS, op.into(), &[&x, &y, &top, &log_sum, &g])
    }
}

/// The gradient of [`CrossEntropy`]. Inputs are `x`, `target`, `top`, `ln Σ exp(x − top)`, the upstream gradient `[N]`
/// (in the losses' dtype) and, if weighted, `w`.
#[derive(Clone, Debug)]
pub struct CrossEntropyGrad(
    /// The options of the forward operation.
    pub CrossEntropy,
);

impl CrossEntropyGrad {
    /// Position of the logits among the inputs.
    pub const LOGITS: usize = 0;
    /// Position of the classes among the inputs.
    pub const TARGETS: usize = 1;
    /// Position of the largest finite logit of each row among the inputs.
    pub const TOP: usize = 2;
    /// Position of `ln Σ exp(x − top)` among the inputs.
    pub const LOG_SUM: usize = 3;
    /// Position of the upstream gradient among the inputs.
    pub const GRAD: usize = 4;
    /// Position of the weights of classes among the inputs, if given.
    pub const WEIGHT: usize = 5;
}

impl Fused for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = CrossEntropyGrad::WEIGHT + usize::from(self.0.weighted);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let forward: Specs =
            ins[..CrossEntropyGrad::TOP].iter().chain(&ins[CrossEntropyGrad::WEIGHT..]).copied().collect();
        let outs = self.0.infer(&forward)?;
        as_forward(
            self.name(),
            [
                ("the largest logit", &ins[CrossEntropyGrad::TOP], &outs[CrossEntropy::TOP]),
                ("the log-sum", &ins[CrossEntropyGrad::LOG_SUM], &outs[CrossEntropy::LOG_SUM]),
                ("the gradient", &ins[CrossEntropyGrad::GRAD], &outs[CrossEntropy::LOSS]),
            ],
        )?;
        Ok(smallvec![ins[CrossEntropyGrad::LOGITS]])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (op, x, g) = (&self.0, ins[CrossEntropyGrad::LOGITS], ins[CrossEntropyGrad::GRAD]);
        let weight = ins.get(CrossEntropyGrad::WEIGHT).copied();
        let rows = op.rows(ins[CrossEntropyGrad::TARGETS], weight)?;
        let p = x.log_softmax(-1)?.exp()?;
        let classes = x.spec().shape[1];
        let hot = rows.safe.one_hot(classes)?.to_dtype(x.spec().dtype)?;
        let mut d = p.sub(&hot)?;
        if let Some(w) = &rows.weight_of_target {
            d = d.mul(&w.unsqueeze(1)?)?;
        }
        if op.label_smoothing != 0.0 {
            let joint = p.mul(&op.joint(x, weight)?)?;
            let spread = weight.map_or_else(|| joint.sub(1.0), |w| joint.sub(w))?;
            d = d.mul(1.0 - op.label_smoothing)?.add(&spread.mul(op.label_smoothing / classes as f64)?)?;
        }
        let g = g.where_cond(&rows.valid, 0.0)?;
        Ok(smallvec![d.mul(&g.unsqueeze(1)?)?])
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}

/// The loss returned by [`NnOps::cross_entropy_with`].
#[track_caller]
pub(super) fn composed<T: Apply>(
    logits: &T,
    target: &T,
    weight: Option<&T>,
    options: CrossEntropyOptions,
) -> Result<T> {
    let (x, y) = (logits.spec().shape, target.spec().shape);
    let (rows, [c]) = x.split_last_chunk().map_or((&[][..], [0]), |(rows, last)| (rows, *last));
    if x.rank() == 0 || y[..] != *rows {
        let error = Error::shape("cross_entropy", &[x, y], "needs logits [.., C] and classes [..]");
        return Err(T::explained(error, &[logits, target]));
    }
    if x.rank() != 2 {
        let (logits, classes) = (logits.reshape([y.numel(), c])?, target.reshape([y.numel()])?);
        let loss = composed(&logits, &classes, weight, options).map_err(|e| e.of_index("cross_entropy", y))?;
        return if options.reduction == Reduction::None { loss.reshape(y) } else { Ok(loss) };
    }
    let CrossEntropyOptions { ignore_index, label_smoothing, reduction } = options;
    let op = CrossEntropy { ignore_index, label_smoothing, weighted: weight.is_some() };
    let ins: Vec<&T> = [logits, target].into_iter().chain(weight).collect();
    let losses = T::apply(op.into(), &ins)?.remove(0);
    match reduction {
        Reduction::None => Ok(losses),
        Reduction::Sum => losses.sum_all(),
        Reduction::Mean => mean_of(&losses.sum_all()?, target, weight, ignore_index),
    }
}

/// The mean of losses over the targets that are not ignored, or over their weights.
#[track_caller]
pub(super) fn mean_of<T: Apply>(sum: &T, target: &T, weight: Option<&T>, ignore_index: i64) -> Result<T> {
    let valid = target.ne(ignore_index as f64)?;
    let counts = match weight {
        Some(w) => {
            let zero = T::constant(Tensor::zeros(sum.runtime(), [1], DType::I64)?);
            w.index_select(0, &target.where_cond(&valid, &zero)?)?.where_cond(&valid, 0.0)?
        }
        None => valid,
    };
    // Sums of weights leave the range and precision of half-precision dtypes.
    sum.div(&counts.to_dtype(sum.spec().dtype)?.sum_all()?)
}
