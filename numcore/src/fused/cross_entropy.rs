//! Cross-entropy of each row with integer classes: log-softmax and negative log-likelihood in one pass, so that the
//! `[N, C]` probabilities are never stored.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{Fused, NnOps, as_forward};
use crate::{
    DType, Error, Result, Tensor,
    ops::{Apply, Backprop, Bits, IndexOps, Outs, PointwiseOps, ReduceOps, Saves, Spec, Specs, ViewOps, finite_top},
};

/// Per row, `w_y · (lse − x_y) · (1 − ε) + ε/C · Σ_c w_c · (lse − x_c)` with `lse = ln Σ_c eˣᶜ`; 0 where the class is
/// `ignore_index`.
///
/// Inputs `x: [N, C]`, `target: [N]` (`i64`) and, if `weighted`, `w: [C]`. Outputs the losses `[N]`, and, for each row,
/// its largest logit `top` (0 where that is infinite) and `ln Σ_c exp(x_c − top)`, both `[N]` (`f32` for half-precision
/// inputs). Their sum is `lse`; kept apart, they make the loss and its gradient independent of an offset of the row's
/// logits, which the sum would round to the spacing of `top`.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// The class whose rows do not contribute.
    pub ignore_index: i64,
    /// `ε`: the probability mass that is spread over all classes (Szegedy et al. 2016).
    pub label_smoothing: f64,
    /// Whether class weights are given.
    pub weighted: bool,
}

/// Intermediates of the rows' targets that forward and gradient both need.
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

    /// `Σ_c w_c`: the sum of the class weights.
    fn joint<T: Apply>(&self, x: &T, weight: Option<&T>) -> Result<T> {
        match weight {
            Some(w) => w.sum(&[], false),
            None => Ok(T::constant(Tensor::full(x.runtime(), [], x.spec().dtype, x.spec().shape[1] as f64)?)),
        }
    }
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
        let (x, y) = (ins[0], ins[1]);
        if !x.dtype.is_float() || y.dtype != DType::I64 {
            return Err(Error::dtype("cross_entropy", &[x.dtype, y.dtype], "needs floating logits and i64 classes"));
        }
        if x.shape.rank() != 2 || y.shape.dims() != [x.shape[0]] {
            return Err(Error::shape("cross_entropy", &[x.shape, y.shape], "needs logits [.., C] and classes [..]"));
        }
        if ins.get(2).is_some_and(|w| w.shape.dims() != [x.shape[1]] || w.dtype != x.dtype) {
            let why = format!("class weights must be [{}] of {}", x.shape[1], x.dtype);
            return Err(Error::shape("cross_entropy", &[x.shape, ins[2].shape], why));
        }
        let row = |dtype| Spec { shape: y.shape, dtype };
        Ok(smallvec![row(x.dtype), row(x.dtype.compute()), row(x.dtype.compute())])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (x, weight) = (ins[0], ins.get(2).copied());
        let rows = self.rows(ins[1], weight)?;
        let (shape, row) = (x.spec().shape, ins[1].spec().shape);
        let top = finite_top(x, shape.with(1, 1))?;
        let shifted = x.sub(&top)?;
        let log_sum = shifted.exp()?.sum(&[-1], false)?.log()?;
        let picked = shifted.gather(1, &rows.safe.unsqueeze(1)?)?.squeeze(1)?;
        let mut loss = log_sum.sub(&picked)?;
        if let Some(w) = &rows.weight_of_target {
            loss = loss.mul(w)?;
        }
        if self.label_smoothing != 0.0 {
            let weighted = weight.map_or(Ok(shifted.clone()), |w| shifted.mul(w))?;
            let spread = log_sum.mul(&self.joint(x, weight)?)?.sub(&weighted.sum(&[-1], false)?)?;
            let share = self.label_smoothing / shape[1] as f64;
            loss = loss.mul(1.0 - self.label_smoothing)?.add(&spread.mul(share)?)?;
        }
        Ok(smallvec![loss.where_cond(&rows.valid, 0.0)?, top.reshape(row)?, log_sum])
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        let inputs = Bits::of(if self.weighted { &[0, 1, 2] } else { &[0, 1] });
        (!wants.has(2)).then_some(Saves { inputs, outputs: Bits::of(&[1, 2]) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let (x, y, top, log_sum) = (cx.input(0)?, cx.input(1)?, cx.output(1)?, cx.output(2)?);
        let op = CrossEntropyGrad(self.clone());
        if self.weighted {
            let w = cx.input(2)?;
            return cx.give(0, op.into(), &[&x, &y, &top, &log_sum, &g, &w]);
        }
        cx.give(0, op.into(), &[&x, &y, &top, &log_sum, &g])
    }
}

/// The gradient of [`CrossEntropy`]; inputs `x`, `target`, `top`, `ln Σ exp(x − top)`, the upstream gradient `[N]` and,
/// if weighted, `w`.
#[derive(Clone, Debug)]
pub struct CrossEntropyGrad(
    /// The options of the forward operation.
    pub CrossEntropy,
);

impl Fused for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = 5 + usize::from(self.0.weighted);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let forward: Specs = ins[..2].iter().chain(&ins[5..]).copied().collect();
        let outs = self.0.infer(&forward)?;
        let statistics = [("the largest logit", &ins[2], &outs[1]), ("the log-sum", &ins[3], &outs[2])];
        as_forward(self.name(), statistics.into_iter().chain([("the gradient", &ins[4], &outs[0])]))?;
        Ok(smallvec![ins[0]])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (op, x, g, weight) = (&self.0, ins[0], ins[4], ins.get(5).copied());
        let rows = op.rows(ins[1], weight)?;
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
