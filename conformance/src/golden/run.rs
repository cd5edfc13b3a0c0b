//! Runs one case: its op forward and backward, compared with the reference values.

use std::fmt;

use autograd::{Backward, BackwardHook, Gradients, Leaf, LeafGrad, Var};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
};

use crate::caught::caught;

use super::{
    Case, HostValue, Mismatch, Placement,
    call::{Call, OpFn},
    compare, compare_at_scale, compare_values, transforms,
};

/// The options of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The memory layout of inputs and upstream gradients.
    pub placement: Placement,
    /// A type to which floating values are cast first; they are then compared with a tolerance that suits it.
    pub dtype: Option<DType>,
}

/// The outcome of a case.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// A success: every value is within its tolerance.
    Passed,
    /// The values that differ, or the error that ended the case.
    Failed(Vec<String>),
    /// The reason why the case cannot run on this runtime.
    Skipped(String),
}

impl Outcome {
    pub(super) fn of(mismatches: impl IntoIterator<Item = Mismatch>) -> Self {
        let lines: Vec<String> = mismatches.into_iter().map(|m| m.to_string()).collect();
        if lines.is_empty() { Outcome::Passed } else { Outcome::Failed(lines) }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed => f.write_str("passed"),
            Outcome::Failed(lines) => f.write_str(&lines.join("; ")),
            Outcome::Skipped(why) => write!(f, "skipped: {why}"),
        }
    }
}

/// Runs one case on a device. An error on the way, and an unknown op, are failures of the case.
pub fn run_case<R: Runtime>(rt: &R, case: &Case, options: Options) -> Outcome {
    let computes = |d: DType| rt.capabilities().compute.contains(&d.compute());
    if let Some(d) = case.dtypes().find(|d| !computes(*d)) {
        return Outcome::Skipped(format!("{d} is not in capabilities.compute"));
    }
    let run = || match case.group.as_str() {
        "lr" => super::lr::run(case),
        "optim" => super::optim::run(rt, case),
        "train" => super::train::run(rt, case),
        "func_models" => transforms::of_model(rt, case),
        _ => run_op(rt, case, options),
    };
    let outcome = caught(|| run().and_then(|o| case.attrs.all_read().map(|()| o)));
    outcome.unwrap_or_else(|why| Outcome::Failed(vec![why]))
}

fn run_op<R: Runtime>(rt: &R, case: &Case, options: Options) -> Result<Outcome> {
    let op: OpFn<R> = super::ops::find(&case.op)
        .ok_or_else(|| Error::format("golden", format!("`{}` is not an op this runner knows", case.op)))?;
    let run = Run { rt, case, options, tol: tolerance(case, options.dtype)? };
    let inputs = run.inputs()?;
    let values = values_of(&inputs);
    let call = Call::new(case, &values);
    let outs = op(&call)?;
    let mut mismatches = run.outputs(&outs)?;
    if let Some(gradients) = run.backward(&outs)? {
        mismatches.extend(run.gradients(&inputs, &call.stand_ins(), &gradients)?);
    }
    mismatches.extend(run.tangent(op)?);
    if options.dtype.is_none() && case.under("tin").next().is_some() {
        mismatches.extend(transforms::of_op(rt, case, op)?);
    }
    if case.under("v").next().is_some() {
        let inputs = run.inputs()?;
        mismatches.extend(run.second(&op(&Call::new(case, &values_of(&inputs)))?, &inputs)?);
    }
    Ok(Outcome::of(mismatches))
}

/// The tolerance of the case, or a larger one that the precision of `dtype` requires.
fn tolerance(case: &Case, dtype: Option<DType>) -> Result<f64> {
    let own = case.tolerance()?;
    Ok(match dtype {
        // The expected values themselves are only as good as the type in which they were computed.
        Some(d) => own.max(8.0 * d.epsilon()),
        None => own,
    })
}

struct Run<'a, R: Runtime> {
    rt: &'a R,
    case: &'a Case,
    options: Options,
    tol: f64,
}

struct Input<R: Runtime> {
    value: Var<R>,
    leaf: Option<Var<R>>,
}

fn values_of<R: Runtime>(inputs: &[Input<R>]) -> Vec<Var<R>> {
    inputs.iter().map(|input| input.value.clone()).collect()
}

impl<R: Runtime> Run<'_, R> {
    /// A tensor of the case in the requested dtype, row-major.
    fn dense(&self, host: &HostValue) -> Result<Tensor<R>> {
        let t = host.on(self.rt)?;
        match self.options.dtype {
            Some(d) if t.dtype().is_float() => t.to_dtype(d),
            _ => Ok(t),
        }
    }

    fn inputs(&self) -> Result<Vec<Input<R>>> {
        (0..self.case.count("inputs")?).map(|i| self.input(i)).collect()
    }

    fn input(&self, i: usize) -> Result<Input<R>> {
        let t = self.dense(self.case.tensor(&format!("in{i}"))?)?;
        let repeated = |value: Var<R>| match self.case.expanded(i) {
            Some(shape) => value.broadcast_to(shape),
            None => Ok(value),
        };
        if self.case.numbers("grads").contains(&(i as f64)) {
            let (value, leaf) = self.options.placement.leaf(&format!("in{i}"), &t)?;
            return Ok(Input { value: repeated(value)?, leaf: Some(leaf) });
        }
        Ok(Input { value: repeated(Var::new(self.options.placement.of(&t)?))?, leaf: None })
    }

    fn outputs(&self, outs: &[Var<R>]) -> Result<Vec<Mismatch>> {
        let mut found = Vec::new();
        for k in 0..self.case.count("outputs")? {
            let what = format!("out{k}");
            match outs.get(k) {
                Some(out) => found.extend(self.compare(&what, &out.value()?)?),
                None => found.push(Mismatch::new(what, format!("the op has {} outputs", outs.len()))),
            }
        }
        Ok(found)
    }

    /// Runs a backward pass from every output that has an upstream gradient; `None` without one.
    fn backward(&self, outs: &[Var<R>]) -> Result<Option<Gradients<R>>> {
        let Some(backward) = self.seeded(outs)? else { return Ok(None) };
        let mut gradients = Gradients::new();
        backward.run(&mut Once(&mut gradients))?;
        Ok(Some(gradients))
    }

    fn seeded(&self, outs: &[Var<R>]) -> Result<Option<Backward<R>>> {
        let mut backward: Option<Backward<R>> = None;
        for (k, out) in outs.iter().enumerate() {
            let Some(host) = self.case.maybe(&format!("gout{k}")) else { continue };
            let seed = Var::new(self.options.placement.of(&self.dense(host)?.to_dtype(out.dtype())?)?);
            backward = Some(match backward {
                None => Backward::from(out, &seed)?,
                Some(b) => b.seed(out, &seed)?,
            });
        }
        Ok(backward)
    }

    /// Compares second derivatives: the gradients of the sum of all gradients, each times the weights `vN` of the case.
    fn second(&self, outs: &[Var<R>], inputs: &[Input<R>]) -> Result<Vec<Mismatch>> {
        let leaves: Vec<(usize, &Var<R>)> =
            inputs.iter().enumerate().filter_map(|(i, input)| Some((i, input.leaf.as_ref()?))).collect();
        let Some(backward) = self.seeded(outs)? else { return Ok(Vec::new()) };
        let first = backward.create_graph().grads(&leaves.iter().map(|(_, leaf)| *leaf).collect::<Vec<_>>())?;
        let mut again: Option<Backward<R>> = None;
        for ((i, _), gradient) in leaves.iter().zip(first) {
            // A gradient that depends on no leaf has no gradient of its own.
            let Some(gradient) = gradient.filter(Var::requires_grad) else { continue };
            let weight = Var::new(self.options.placement.stored(&self.dense(self.case.tensor(&format!("v{i}"))?)?)?);
            again = Some(match again {
                None => Backward::from(&gradient, &weight)?,
                Some(backward) => backward.seed(&gradient, &weight)?,
            });
        }
        let mut gradients = Gradients::new();
        again.map_or(Ok(()), |again| again.run(&mut Once(&mut gradients)))?;
        let mut found = Vec::new();
        for (i, leaf) in leaves {
            let what = format!("ggin{i}");
            found.extend(match gradients.of(leaf) {
                Some(gradient) => self.compare(&what, &self.options.placement.seen(gradient)?)?,
                None if self.case.tensor(&what)?.to_f64s().iter().all(|value| *value == 0.0) => None,
                None => Some(Mismatch::new(what, "no gradient reached it")),
            });
        }
        Ok(found)
    }

    /// Compares the tangent along one direction in all inputs, times the upstream gradients, with the product of that
    /// direction and the expected gradients.
    fn tangent(&self, op: OpFn<R>) -> Result<Option<Mismatch>> {
        let differentiated = self.case.numbers("grads");
        let mut directions = Vec::new();
        let input = |i: usize| {
            let mut value = Var::new(self.dense(self.case.tensor(&format!("in{i}"))?)?);
            if differentiated.contains(&(i as f64)) {
                let elements = 0..value.dims().iter().product();
                let direction: Vec<f64> = elements.map(|k: usize| ((k * 7 + i * 3) % 11) as f64 / 8.0 - 0.5).collect();
                let mut rest = direction.iter();
                let shape = numcore::ops::Apply::spec(&value).shape;
                let element = || rest.next().copied().unwrap_or(0.0);
                value = value.with_tangent(&Var::new(Tensor::from_f64_fn(self.rt, shape, value.dtype(), element)?))?;
                directions.push((i, direction));
            }
            self.case.expanded(i).map_or(Ok(value.clone()), |shape| value.broadcast_to(shape))
        };
        let inputs = (0..self.case.count("inputs")?).map(input).collect::<Result<Vec<_>>>()?;
        let call = Call::new(self.case, &inputs);
        let outs = op(&call)?;
        let copied = call.stand_ins();
        directions.retain(|(i, _)| copied.iter().all(|(k, _)| k != i));
        let (mut got, mut want, mut size) = (0.0, 0.0, 1.0);
        for (k, out) in outs.iter().enumerate() {
            let (Some(upstream), Some(along)) = (self.case.maybe(&format!("gout{k}")), out.tangent()) else { continue };
            got += dot(&upstream.to_f64s(), &along.value()?.to_f64s()?, &mut size);
        }
        for (i, direction) in &directions {
            want += dot(&self.case.tensor(&format!("gin{i}"))?.to_f64s(), direction, &mut size);
        }
        if !f64::is_finite(want) {
            return Ok(None);
        }
        Ok(compare_values("tangent", &[got / size], &[want / size], self.tol))
    }

    fn gradients(
        &self,
        inputs: &[Input<R>],
        stand_ins: &[(usize, Var<R>)],
        gradients: &Gradients<R>,
    ) -> Result<Vec<Mismatch>> {
        let mut found = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            let (Some(leaf), what) = (&input.leaf, format!("gin{i}")) else { continue };
            let copied = stand_ins.iter().find(|(k, _)| *k == i).map(|(_, leaf)| leaf);
            let gradient = match copied {
                Some(copy) => gradients.of(copy).cloned(),
                None => gradients.of(leaf).map(|g| self.options.placement.seen(g)).transpose()?,
            };
            match gradient {
                Some(g) => found.extend(self.compare(&what, &g)?),
                None => found.push(Mismatch::new(what, "no gradient reached it")),
            }
        }
        Ok(found)
    }

    fn compare(&self, what: &str, got: &Tensor<R>) -> Result<Option<Mismatch>> {
        let want = self.case.tensor(what)?;
        if self.options.dtype.is_some() && want.dtype.is_float() {
            // Rounding of the inputs moves results by an amount that scales with the largest expected value.
            return Ok(compare_at_scale(what, &got.to_f64s()?, &want.to_f64s(), self.tol));
        }
        compare(what, got, want, self.tol)
    }
}

/// Gradients, with a check that a leaf's gradient becomes final only once.
struct Once<'a, R: Runtime>(&'a mut Gradients<R>);

impl<R: Runtime> BackwardHook<R> for Once<'_, R> {
    fn on_leaf_grad_ready(&mut self, leaf: &std::sync::Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        if self.0.get(leaf).is_some() {
            return Err(Error::state(leaf.name().to_string(), "its gradient was called final twice"));
        }
        self.0.on_leaf_grad_ready(leaf, grad)
    }
}

/// The sum of the products of two lists of values; the sum of their sizes is added to `size`.
fn dot(a: &[f64], b: &[f64], size: &mut f64) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| a * b);
    *size += products.clone().map(f64::abs).sum::<f64>();
    products.sum()
}
