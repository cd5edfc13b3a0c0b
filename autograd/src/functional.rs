//! Derivatives of functions: Jacobian-vector and Hessian-vector products, Jacobians and Hessians.

use std::cell::Cell;

use numcore::{
    Error, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, ViewOps, stack},
};

use crate::{Backward, Var, differentiable_grad, grad, mode::with_grad};

/// The value of `f` at `primals`, and its derivative along `tangents`: the product of the Jacobian with them. It is
/// computed in the forward mode, beside the value, so nothing is saved for a backward pass.
///
/// The value is differentiable as usual, and so is the derivative, by [`grad`](crate::grad). Fused operations run by
/// their decompositions. Several outputs are read with [`Var::with_tangent`] and [`Var::tangent`].
///
/// # Errors
/// An error unless each tangent has its primal's shape and dtype, and inside another `jvp`. Also for a
/// [`Function`](crate::Function) of an input, which has no rule for tangents.
///
/// ```
/// use autograd::{Var, jvp};
/// use numcore::{Tensor, ops::PointwiseOps};
/// use runtime_cpu::Cpu;
///
/// let x = Var::new(Tensor::from_slice(&Cpu::new(), [2], &[1.0f32, 2.0])?);
/// let direction = Var::new(Tensor::from_slice(&Cpu::new(), [2], &[1.0f32, 0.5])?);
/// let (y, along) = jvp(|x| x[0].square(), &[&x], &[&direction])?;
/// assert_eq!(y.value()?.to_f64s()?, [1.0, 4.0]);
/// assert_eq!(along.value()?.to_f64s()?, [2.0, 2.0]);
/// # Ok::<(), numcore::Error>(())
/// ```
#[doc(alias = "forward_ad")]
#[track_caller]
pub fn jvp<R: Runtime>(
    f: impl FnOnce(&[Var<R>]) -> Result<Var<R>>,
    primals: &[&Var<R>],
    tangents: &[&Var<R>],
) -> Result<(Var<R>, Var<R>)> {
    same_count("jvp", primals, tangents)?;
    let inputs = primals.iter().zip(tangents).map(|(x, t)| x.with_tangent(t)).collect::<Result<Vec<_>>>()?;
    let out = alone(|| f(&inputs)).at_caller()?;
    let along = match out.tangent() {
        Some(tangent) => tangent,
        None => zeros_like(&out)?,
    };
    Ok((out.primal(), along))
}

/// The product of the Hessian of `f` at `inputs` with `vectors`, for each input. The result of `f` has one element.
///
/// The tangent of [`jvp`] is differentiated in the reverse mode, for about four times the cost of `f`.
///
/// # Errors
/// The errors of [`jvp`], and an error unless the result of `f` has one element.
#[doc(alias("hessian_vector_product", "vhp"))]
#[track_caller]
pub fn hvp<R: Runtime>(
    f: impl FnOnce(&[Var<R>]) -> Result<Var<R>>,
    inputs: &[&Var<R>],
    vectors: &[&Var<R>],
) -> Result<Vec<Var<R>>> {
    let inputs = inputs.iter().map(|x| differentiable(x)).collect::<Result<Vec<_>>>()?;
    let inputs: Vec<&Var<R>> = inputs.iter().collect();
    let (out, along) = with_grad(|| jvp(f, &inputs, vectors))?;
    scalar("hvp", &out)?;
    let products = if along.requires_grad() { grad(&[&along], &inputs)? } else { vec![None; inputs.len()] };
    let products = products.into_iter().zip(&inputs);
    products.map(|(product, x)| product.map_or_else(|| zeros_like(x), Ok)).collect::<Result<_>>().at_caller()
}

/// The Jacobian of `f` at `x: [X..]`: `[Y.., X..]` for the result `[Y..]` of `f`.
///
/// It takes a backward pass for each element of the result, or a [`jvp`] for each element of `x` if `x` has fewer. Then
/// `f` runs again for each, so it must be a function of its input alone.
///
/// # Errors
/// The errors of [`jvp`], and an error if `[Y.., X..]` has too many axes.
///
/// ```
/// use autograd::{Var, jacobian};
/// use numcore::{Tensor, ops::PointwiseOps};
/// use runtime_cpu::Cpu;
///
/// let x = Var::new(Tensor::from_slice(&Cpu::new(), [2], &[1.0f32, 3.0])?);
/// assert_eq!(jacobian(|x| x.square(), &x)?.value()?.to_f64s()?, [2.0, 0.0, 0.0, 6.0]);
/// # Ok::<(), numcore::Error>(())
/// ```
#[doc(alias("jacrev", "jacfwd"))]
#[track_caller]
pub fn jacobian<R: Runtime>(f: impl Fn(&Var<R>) -> Result<Var<R>>, x: &Var<R>) -> Result<Var<R>> {
    let x = differentiable(x)?;
    let y = with_grad(|| f(&x)).at_caller()?;
    let (from, to) = (x.spec(), y.spec());
    let shape = Shape::new(&[&to.shape[..], &from.shape[..]].concat()).at_caller()?;
    if !y.requires_grad() || shape.numel() == 0 {
        return Tensor::zeros(x.runtime(), shape, from.dtype).map(Var::new);
    }
    let unit = |like: &Var<R>, i: usize| {
        let mut at = (0..like.spec().shape.numel()).map(|k| f64::from(u8::from(k == i)));
        let values = || at.next().unwrap_or(0.0);
        Tensor::from_f64_fn(like.runtime(), like.spec().shape, like.spec().dtype, values).map(Var::new)
    };
    let (rows, columns) = (to.shape.numel(), from.shape.numel());
    if rows <= columns {
        let row = |i| {
            let gradient = Backward::from(&y, &unit(&y, i)?)?.retain_graph().grads(&[&x])?.swap_remove(0);
            gradient.map_or_else(|| zeros_like(&x), Ok)
        };
        return joined(rows, row, 0)?.reshape(shape);
    }
    let column = |j| {
        let (_, along) = jvp(|x| f(&x[0]), &[&x], &[&unit(&x, j)?])?;
        along.reshape([rows])
    };
    joined(columns, column, 1)?.reshape(shape)
}

/// The Hessian of `f` at `x: [X..]`: `[X.., X..]`, by a backward pass of the gradient for each element of `x`. The
/// result of `f` has one element.
///
/// # Errors
/// An error unless the result of `f` has one element, or if `[X.., X..]` has too many axes.
#[track_caller]
pub fn hessian<R: Runtime>(f: impl Fn(&Var<R>) -> Result<Var<R>>, x: &Var<R>) -> Result<Var<R>> {
    let gradient = |x: &Var<R>| {
        let y = f(x)?;
        scalar("hessian", &y)?;
        let gradient = if y.requires_grad() { differentiable_grad(&[&y], &[x])?.swap_remove(0) } else { None };
        gradient.map_or_else(|| zeros_like(x), Ok)
    };
    jacobian(gradient, x)
}

/// The results of `part` for `0..count`, stacked along a new axis.
#[track_caller]
fn joined<R: Runtime>(count: usize, part: impl FnMut(usize) -> Result<Var<R>>, axis: isize) -> Result<Var<R>> {
    let parts = (0..count).map(part).collect::<Result<Vec<_>>>().at_caller()?;
    stack(&parts.iter().collect::<Vec<_>>(), axis)
}

/// `x` itself if gradients flow through it; otherwise a leaf of its value.
#[track_caller]
fn differentiable<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    if x.tangent().is_some() {
        let why = "the input has a tangent, which gradients would lose; for second derivatives use `hvp` or `hessian`";
        return Err(Error::usage("derivative", why)).at_caller();
    }
    if x.requires_grad() { Ok(x.clone()) } else { Var::leaf("x", x.value()?) }
}

fn zeros_like<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    let spec = x.spec();
    Tensor::zeros(x.runtime(), spec.shape, spec.dtype).map(Var::new)
}

#[track_caller]
fn scalar<R: Runtime>(op: &'static str, out: &Var<R>) -> Result<()> {
    let shape = out.spec().shape;
    if shape.numel() == 1 {
        return Ok(());
    }
    Err(Error::shape(op, &[shape], "only a result of one element has a Hessian; reduce it")).at_caller()
}

#[track_caller]
fn same_count<R: Runtime>(op: &'static str, inputs: &[&Var<R>], along: &[&Var<R>]) -> Result<()> {
    if inputs.len() == along.len() {
        return Ok(());
    }
    Err(Error::range(op, "number of tangents", along.len(), inputs.len())).at_caller()
}

/// Runs `f`, in which no other `jvp` may run: the tangents of both would be added up.
#[track_caller]
fn alone<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    thread_local! { static ACTIVE: Cell<bool> = const { Cell::new(false) } }
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            ACTIVE.set(false);
        }
    }
    if ACTIVE.replace(true) {
        let why = "runs inside another one; for second derivatives use `hvp`, or differentiate its result with `grad`";
        return Err(Error::usage("jvp", why)).at_caller();
    }
    let _leave = Leave;
    f()
}
