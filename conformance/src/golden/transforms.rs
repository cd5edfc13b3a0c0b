//! Transforms of functions against `torch.func`: tangents, products with the Hessian, Jacobians, and the gradients of
//! single examples.

use autograd::{Var, grad, hvp, jacobian, jvp, per_example_gradients};
use nn::{Forward, ModuleExt, functional_call, loss};
use numcore::{
    Error, Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};

use super::{
    Case, Mismatch, Outcome,
    call::{Call, OpFn},
    compare,
    model::model,
};

fn given<R: Runtime>(rt: &R, case: &Case, name: &str) -> Result<Var<R>> {
    case.tensor(name)?.on(rt).map(Var::new)
}

/// Compares a result with a tensor of the case; a value that depends on nothing is zeros.
fn check<R: Runtime>(case: &Case, what: &str, got: Option<Tensor<R>>) -> Result<Option<Mismatch>> {
    let want = case.tensor(what)?;
    match got {
        Some(got) => compare(what, &got, want, case.tolerance()?),
        None if want.to_f64s().iter().all(|value| *value == 0.0) => Ok(None),
        None => Ok(Some(Mismatch::new(what, "depends on nothing"))),
    }
}

/// Compares the tangents `toutN` of an op along `tinN`, and the products `hvpN` with the Hessian of the sum of all
/// outputs times `goutN`. Compares also the Jacobian `jac` of the first output with respect to the first input that has
/// a gradient.
pub(super) fn of_op<R: Runtime>(rt: &R, case: &Case, op: OpFn<R>) -> Result<Vec<Mismatch>> {
    let differentiated: Vec<usize> = case.numbers("grads").into_iter().map(|i| i as usize).collect();
    let inputs = (0..case.count("inputs")?).map(|i| given(rt, case, &format!("in{i}")));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let call = |values: &[Var<R>]| {
        let mut all = inputs.clone();
        differentiated.iter().zip(values).for_each(|(&i, value)| all[i] = value.clone());
        op(&Call::new(case, &all))
    };
    let primals: Vec<&Var<R>> = differentiated.iter().map(|&i| &inputs[i]).collect();
    let tangents = differentiated.iter().map(|i| given(rt, case, &format!("tin{i}"))).collect::<Result<Vec<_>>>()?;
    let mut found = Vec::new();
    let duals = primals.iter().zip(&tangents).map(|(x, along)| x.with_tangent(along)).collect::<Result<Vec<_>>>()?;
    for (k, out) in call(&duals)?.iter().enumerate() {
        let what = format!("tout{k}");
        if case.maybe(&what).is_some() {
            found.extend(check(case, &what, out.tangent().map(|along| along.value()).transpose()?)?);
        }
    }
    let total = |values: &[Var<R>]| {
        let outs = call(values)?;
        let seeded = outs.iter().enumerate().filter(|(k, _)| case.maybe(&format!("gout{k}")).is_some());
        let terms = seeded.map(|(k, out)| out.mul(&given(rt, case, &format!("gout{k}"))?)?.sum_all());
        let sum = terms.reduce(|a, b| a?.add(&b?));
        sum.unwrap_or_else(|| Err(Error::format(case.id.as_str(), "has no `gout0`")))
    };
    let products = hvp(total, &primals, &tangents.iter().collect::<Vec<_>>())?;
    for (i, product) in differentiated.iter().zip(products) {
        found.extend(check(case, &format!("hvp{i}"), Some(product.value()?))?);
    }
    if let (Some(_), [first, rest @ ..]) = (case.maybe("jac"), &primals[..]) {
        let of = |x: &Var<R>| {
            let values: Vec<_> = [x.clone()].into_iter().chain(rest.iter().map(|x| (*x).clone())).collect();
            Ok(call(&values)?.swap_remove(0))
        };
        found.extend(check(case, "jac", Some(jacobian(of, first)?.value()?))?);
    }
    Ok(found)
}

/// Compares a model, a function of its parameters `init/NAME`. It has the tangent `tout` of its output along
/// `tinit/NAME`, and the gradients `vjp/NAME` of the output times `gout`. It also has the products `hvp/NAME` with the
/// Hessian of the mean loss, and the gradients `each/NAME` of the losses of all examples.
pub(super) fn of_model<R: Runtime>(rt: &R, case: &Case) -> Result<Outcome> {
    let model = model(rt, case)?;
    let init = case.under("init/").map(|(name, value)| Ok((name.to_string(), value.on(rt)?)));
    model.load_state_dict(init.collect::<Result<_>>()?)?;
    let (x, y) = (given(rt, case, "x")?, given(rt, case, "y")?);
    let (names, parameters): (Vec<_>, Vec<_>) = model.named_parameters().into_iter().unzip();
    let leaves: Vec<Var<R>> = parameters.iter().map(|parameter| parameter.var()).collect();
    let primals: Vec<&Var<R>> = leaves.iter().collect();
    let tangents = names.iter().map(|name| given(rt, case, &format!("tinit/{name}"))).collect::<Result<Vec<_>>>()?;
    let tangents: Vec<&Var<R>> = tangents.iter().collect();
    let call = |values: &[Var<R>]| {
        let replaced: Vec<_> = names.iter().zip(values.iter().cloned()).collect();
        functional_call(&*model, &replaced, || model.forward(&x))
    };
    let (out, along) = jvp(call, &primals, &tangents)?;
    let mut found = Vec::from_iter(check(case, "out", Some(out.value()?))?);
    found.extend(check(case, "tout", Some(along.value()?))?);
    let seeded = model.forward(&x)?.mul(&given(rt, case, "gout")?)?.sum_all()?;
    let gradients = grad(&[&seeded], &primals)?;
    let products = hvp(|values| losses(&call(values)?, &y)?.mean_all(), &primals, &tangents)?;
    let each = per_example_gradients(&losses(&model.forward(&x)?, &y)?)?;
    for (((name, leaf), gradient), product) in names.iter().zip(&leaves).zip(gradients).zip(products) {
        found.extend(check(case, &format!("vjp/{name}"), gradient.map(|gradient| gradient.value()).transpose()?)?);
        found.extend(check(case, &format!("hvp/{name}"), Some(product.value()?))?);
        found.extend(check(case, &format!("each/{name}"), each.of(leaf).cloned())?);
    }
    Ok(Outcome::of(found))
}

/// The loss of each example, `[B]`: the mean over its elements or tokens.
fn losses<R: Runtime>(out: &Var<R>, target: &Var<R>) -> Result<Var<R>> {
    let each = match target.dtype().is_float() {
        true => loss::mse(out, target, Reduction::None)?,
        false => {
            let options = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
            loss::cross_entropy_with(out, target, options)?
        }
    };
    let examples = each.spec().shape[0];
    each.reshape([examples, each.spec().shape.numel() / examples.max(1)])?.mean(&[1])
}
