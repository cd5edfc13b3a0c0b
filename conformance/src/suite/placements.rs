//! Independence of the layout of inputs and of the destination of gradients. Inputs are strided, flipped, transposed
//! and repeated views of the same values. Gradients are written through views of leaves, and accumulated into slots.

use std::sync::Arc;

use autograd::{BackwardHook, Leaf, LeafGrad, Var};
use numcore::{
    DType, Flat, FlatLayout, Result, Runtime, Tensor, TensorMut,
    ops::{Apply, ReduceOps, ViewOps},
};

use super::{
    case::{OpCase, no_gradient},
    cases,
    close::{Values, agree, forward_backward, near, sweep},
    report::{Section, Verdict},
};
use crate::golden::Placement;

/// Cases compare with themselves in another order of additions.
const TOLERANCE: f64 = 1e-5;

pub(crate) fn views<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("views");
    for case in cases::all::<R>() {
        for placement in Placement::ALL.into_iter().filter(|p| *p != Placement::Dense) {
            section.check(format!("{} {placement:?}", case.name), || {
                let tensors = case.tensors(rt, DType::F32)?;
                Ok(agree(&placed(rt, &case, placement, &tensors)?, &forward_backward(rt, &case, &tensors)?, TOLERANCE))
            });
        }
    }
    section
}

/// The results with inputs in another layout; gradients are in the inputs' order.
fn placed<R: Runtime>(rt: &R, case: &OpCase<R>, placement: Placement, tensors: &[Tensor<R>]) -> Result<Values> {
    let mut vars = Vec::new();
    let mut leaves = Vec::new();
    for (i, (sample, t)) in case.inputs.iter().zip(tensors).enumerate() {
        if sample.is_real() {
            let (var, leaf) = placement.leaf(&format!("in{i}"), t)?;
            vars.push(var);
            leaves.push(leaf);
        } else {
            vars.push(Var::new(placement.of(t)?));
        }
    }
    let mut gradients = autograd::Gradients::new();
    let out = sweep(rt, case, &vars, &mut gradients)?;
    let mut values = vec![out.value()?.to_f64s()?];
    for (i, leaf) in leaves.iter().enumerate() {
        let stored = gradients.of(leaf).ok_or_else(|| no_gradient(i))?;
        values.push(placement.seen(stored)?.to_f64s()?);
    }
    Ok(values)
}

/// Checks inputs repeated along an axis (a stride of 0). They give the results of inputs that store every repetition,
/// and their gradients are sums along the axis.
pub(crate) fn repeated<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("repeated axes");
    for case in cases::all::<R>() {
        for last in [false, true] {
            let axis = if last { "last" } else { "first" };
            section.check(format!("{} {axis} axis", case.name), || {
                let stored = (case.tensors(rt, DType::F32)?.iter())
                    .map(|t| once(t, last)?.broadcast_to(t.dims())?.contiguous())
                    .collect::<Result<Vec<_>>>()?;
                let (want, scales) = summed(rt, &case, last, &stored)?;
                let got = expanded(rt, &case, last, &stored)?;
                let verdicts = got.iter().zip(&want).zip(scales).enumerate();
                Ok(verdicts.fold(Verdict::PASSED, |all, (k, ((got, want), scale))| {
                    all.and(near(&format!("result {k}"), got, want, TOLERANCE * scale))
                }))
            });
        }
    }
    section
}

/// The first element along the first or last axis.
fn once<T: Apply>(x: &T, last: bool) -> Result<T> {
    match x.spec().shape.rank() as isize {
        0 => Ok(x.clone()),
        rank => x.narrow(
            if last { rank - 1 } else { 0 },
            0,
            x.spec().shape[if last { rank as usize - 1 } else { 0 }].min(1),
        ),
    }
}

/// The output, and gradients of the leaves from which the inputs are repeated.
fn expanded<R: Runtime>(rt: &R, case: &OpCase<R>, last: bool, stored: &[Tensor<R>]) -> Result<Values> {
    let (mut vars, mut leaves) = (Vec::new(), Vec::new());
    for (i, (sample, t)) in case.inputs.iter().zip(stored).enumerate() {
        let short = once(t, last)?;
        if sample.is_real() {
            let leaf = Var::leaf(&format!("in{i}"), short)?;
            vars.push(leaf.broadcast_to(t.dims())?);
            leaves.push(leaf);
        } else {
            vars.push(Var::new(short.broadcast_to(t.dims())?));
        }
    }
    let mut gradients = autograd::Gradients::new();
    let mut values = vec![sweep(rt, case, &vars, &mut gradients)?.value()?.to_f64s()?];
    for (i, leaf) in leaves.iter().enumerate() {
        values.push(gradients.of(leaf).ok_or_else(|| no_gradient(i))?.to_f64s()?);
    }
    Ok(values)
}

/// The output, and gradients of stored inputs, summed along the axis; and for each the largest magnitude before the
/// sum, at least 1. (In rows of equal elements gradients of a norm are large, and cancel.)
fn summed<R: Runtime>(rt: &R, case: &OpCase<R>, last: bool, stored: &[Tensor<R>]) -> Result<(Values, Vec<f64>)> {
    let vars = case.vars(stored)?;
    let mut gradients = autograd::Gradients::new();
    let mut values = vec![sweep(rt, case, &vars, &mut gradients)?.value()?.to_f64s()?];
    let mut scales = vec![1.0];
    for (i, leaf) in case.leaves(&vars).into_iter().enumerate() {
        let gradient = gradients.of(leaf).ok_or_else(|| no_gradient(i))?;
        scales.push(gradient.to_f64s()?.iter().fold(1.0, |most: f64, g| most.max(g.abs())));
        let axis = if last { -1 } else { 0 };
        let sum = if gradient.dims().is_empty() || gradient.shape().numel() == 0 {
            gradient.clone()
        } else {
            gradient.sum_keepdim(&[axis])?
        };
        values.push(sum.to_f64s()?);
    }
    Ok((values, scales))
}

/// Checks that two backward passes into the same slots give exactly twice the gradient of one.
pub(crate) fn slots<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("accumulation in slots");
    for case in cases::all::<R>() {
        section.check(&case.name, || {
            let vars = case.vars(&case.tensors(rt, DType::F32)?)?;
            let mut bucket = Bucket::of(rt, &case.leaves(&vars))?;
            sweep(rt, &case, &vars, &mut bucket)?;
            let once = bucket.values()?;
            sweep(rt, &case, &vars, &mut bucket)?;
            let doubled: Values = once.iter().map(|g| g.iter().map(|v| 2.0 * v).collect()).collect();
            let twice = bucket.values()?;
            let dense = forward_backward(rt, &case, &case.tensors(rt, DType::F32)?)?;
            // A GEMM that accumulates into its output may round once more than one followed by an addition.
            Ok(agree(&twice, &doubled, 1e-6).and(agree(&once, &dense[1..].to_vec(), 1e-6)))
        });
    }
    section
}

/// A hook with one range for each leaf.
struct Bucket<R: Runtime> {
    flat: Flat<R>,
    leaves: Vec<Arc<Leaf<R>>>,
}

impl<R: Runtime> Bucket<R> {
    fn of(rt: &R, vars: &[&Var<R>]) -> Result<Self> {
        let leaves: Vec<Arc<Leaf<R>>> = vars.iter().filter_map(|v| v.as_leaf().cloned()).collect();
        let layout = FlatLayout::new(DType::F32, leaves.iter().map(|l| (l.name().to_string(), l.spec().shape)));
        Ok(Bucket { flat: Flat::zeros(rt, layout)?, leaves })
    }

    fn values(&self) -> Result<Values> {
        (0..self.leaves.len()).map(|i| self.flat.tensor(i)?.to_f64s()).collect()
    }
}

impl<R: Runtime> BackwardHook<R> for Bucket<R> {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        let at = self.leaves.iter().position(|l| Arc::ptr_eq(l, leaf));
        at.map(|i| self.flat.lend(i)).transpose()
    }

    fn on_leaf_grad_ready(&mut self, _: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        match grad {
            LeafGrad::Slot(slot) => self.flat.restore(slot),
            LeafGrad::Own(_) => {
                Err(numcore::Error::argument("conformance", "a gradient has memory of its own beside its slot"))
            }
        }
    }
}
