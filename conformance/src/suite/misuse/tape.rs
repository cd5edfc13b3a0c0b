//! The tape with functions, closures, residencies and hooks that break their contracts.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use autograd::{
    Backward, BackwardHook, Function, Gradients, Leaf, LeafGrad, Residency, Var, apply_function, checkpoint,
    recomputed, with_recomputation,
};
use numcore::{
    DType, Result, Runtime, Tensor, TensorMut,
    fused::NnOps,
    ops::{Backprop, MatmulOps, Op, PointwiseOps, ReduceOps, Spec, ViewOps},
};

use super::draw::Draw;
use crate::suite::report::Verdict;

/// The shape of every value in this file.
const DUE: [usize; 2] = [6, 6];

pub(super) fn tape<R: Runtime>(rt: &R, draw: &mut Draw) -> Result<Verdict> {
    let due = Spec::new(DUE, DType::F32);
    let given = if draw.once_in(3) { due } else { draw.changed(due) };
    let fits = given == due;
    let x = Var::leaf("x", draw.tensor(rt, due)?)?;
    let (what, outcome) = match draw.below(6) {
        0 => ("a function", function(draw, &x, given)),
        1 => ("`recomputed`", rerun(draw, &x, given, false)),
        2 => ("`checkpoint`", rerun(draw, &x, given, true)),
        3 => ("a residency", residency(rt, draw, given)),
        4 => ("a slot", slot(rt, draw, &x, given)),
        _ => ("a gradient", replaced(draw, &x, given)),
    };
    Ok(match outcome {
        Ok(spec) if fits => Verdict::when(spec == due, || format!("{what}: the gradient is {spec:?}")),
        Ok(_) => Verdict::failed(format!("{what} that gives {given:?} is no error")),
        Err(e) => Verdict::when(!fits, || format!("{what}: {e}")),
    })
}

/// Applies an op whose gradient reads saved values, in one of several ways.
fn read_by<R: Runtime>(draw: &mut Draw, y: &Var<R>) -> Result<Var<R>> {
    match draw.below(8) {
        0 => y.mul(y),
        1 => y.t()?.square(),
        2 => y.narrow(1, 1, 3),
        3 => y.softmax(-1),
        4 => y.matmul(y),
        5 => y.reshape([36])?.exp(),
        6 => y.layer_norm(None, None, 1e-5),
        _ => Ok(y.clone()),
    }
}

fn gradient<R: Runtime>(x: &Var<R>, y: &Var<R>) -> Result<Spec> {
    let gradients = y.sum_all()?.backward()?;
    let gradient = gradients.of(x).ok_or_else(|| numcore::Error::argument("misuse", "no gradient"))?;
    gradient.to_bytes()?;
    Ok(Spec::new(*gradient.shape(), gradient.dtype()))
}

/// The identity, with a gradient of some spec, for some input, given in some way.
struct Wrong<R: Runtime> {
    value: Tensor<R>,
    input: usize,
    all: bool,
    twice: bool,
}

impl<R: Runtime> Function<R> for Wrong<R> {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        Ok(vec![ins[0].clone()])
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let value = Var::new(self.value.clone());
        if self.all {
            return cx.give_all(0, Op::identity(), &[&value]);
        }
        if self.input > 0 {
            // Positions that this call does not have are errors in every accessor.
            let i = self.input;
            let errors = [cx.input(i).is_err(), cx.output(i).is_err(), cx.upstream(i).is_err()];
            assert!(errors == [true; 3] && cx.input_spec(i).is_err() && cx.output_spec(i).is_err() && !cx.wants(i));
        }
        if self.twice {
            cx.give(self.input, Op::identity(), &[&value])?;
        }
        cx.give(self.input, Op::identity(), &[&value])
    }
}

fn function<R: Runtime>(draw: &mut Draw, x: &Var<R>, given: Spec) -> Result<Spec> {
    let rt = x.value()?.runtime().clone();
    let value = draw.tensor(&rt, given)?;
    let input = if draw.once_in(6) { draw.pick(&[1, 5, usize::MAX]) } else { 0 };
    let (all, twice) = (input == 0 && draw.once_in(3), draw.once_in(6));
    let wrong = Wrong { value, input, all, twice: twice && !all };
    let refused = input > 0 || wrong.twice;
    let source = if draw.once_in(2) { x.clone() } else { x.mul(2.0)? };
    let y = apply_function(Arc::new(wrong), &[&source])?.remove(0);
    let outcome = gradient(x, &read_by(draw, &y)?);
    if refused {
        assert!(outcome.is_err(), "a gradient for input {input}, given twice: {twice}");
        return if given == Spec::new(DUE, DType::F32) { Ok(given) } else { outcome };
    }
    outcome
}

/// Twice its input. The second run returns a value of some spec.
struct Changing<R: Runtime> {
    other: Tensor<R>,
    runs: AtomicUsize,
}

impl<R: Runtime> Function<R> for Changing<R> {
    fn name(&self) -> &'static str {
        "changing"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        Ok(vec![if self.runs.fetch_add(1, Ordering::Relaxed) == 0 { ins[0].mul(2.0)? } else { self.other.clone() }])
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        cx.upstream(0)?.map_or(Ok(()), |g| cx.give_value(0, &g.mul(2.0)?))
    }
}

/// Recomputes a function that returns another spec when it runs a second time.
fn rerun<R: Runtime>(draw: &mut Draw, x: &Var<R>, given: Spec, is_checkpoint: bool) -> Result<Spec> {
    let rt = x.value()?.runtime().clone();
    let changing = Arc::new(Changing { other: draw.tensor(&rt, given)?, runs: AtomicUsize::new(0) });
    let h = x.mul(1.0)?;
    let make = || apply_function(changing, &[&h]).map(|mut outs| outs.remove(0));
    // A value that is read in backward.
    let w = draw.tensor(&rt, Spec::new(DUE, DType::F32))?;
    let read = |y: Var<R>| y.mul(&y)?.matmul(&Var::new(w));
    let y = match is_checkpoint {
        true => checkpoint(|| read(make()?))?,
        // Recomputation is forced, also on runtimes that would keep the value.
        false => read(with_recomputation(true, || recomputed(&[&h], |_| make()))?)?,
    };
    gradient(x, &y)
}

struct Fetched<R: Runtime>(Tensor<R>);

impl<R: Runtime> Residency<R> for Fetched<R> {
    fn fetch(&self, _: &Leaf<R>) -> Result<Tensor<R>> {
        Ok(self.0.clone())
    }
}

fn residency<R: Runtime>(rt: &R, draw: &mut Draw, given: Spec) -> Result<Spec> {
    let fetched = Arc::new(Fetched(draw.tensor(rt, given)?));
    let x = Leaf::absent("x", rt, Spec::new(DUE, DType::F32), fetched).var();
    gradient(&x, &read_by(draw, &x)?)
}

/// A hook whose slot is of some spec.
struct Slots<R: Runtime>(Option<TensorMut<R>>, Option<Spec>);

impl<R: Runtime> BackwardHook<R> for Slots<R> {
    fn grad_slot(&mut self, _: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        Ok(self.0.take())
    }

    fn on_leaf_grad_ready(&mut self, _: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        if let LeafGrad::Slot(slot) = grad {
            self.1 = Some(slot.spec());
        }
        Ok(())
    }
}

fn slot<R: Runtime>(rt: &R, draw: &mut Draw, x: &Var<R>, given: Spec) -> Result<Spec> {
    let mut slots = Slots(Some(TensorMut::alloc(rt, given.shape, given.dtype)?), None);
    Backward::of(&read_by(draw, x)?.sum_all()?)?.run(&mut slots)?;
    slots.1.ok_or_else(|| numcore::Error::argument("misuse", "no gradient in the slot"))
}

/// Runs with a gradient, a seed or a value of some spec where one of another is required.
fn replaced<R: Runtime>(draw: &mut Draw, x: &Var<R>, given: Spec) -> Result<Spec> {
    let rt = x.value()?.runtime().clone();
    let value = draw.tensor(&rt, given)?;
    let leaf = x.as_leaf().ok_or_else(|| numcore::Error::argument("misuse", "no leaf"))?;
    match draw.below(3) {
        0 => Gradients::new().set(leaf, value)?,
        1 => leaf.set(value)?,
        _ => Backward::from(&x.mul(2.0)?, &Var::new(value))?.run(&mut Gradients::new())?,
    }
    Ok(given)
}
