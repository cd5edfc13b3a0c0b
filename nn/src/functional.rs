//! Calls of a module with other parameters: [`functional_call`].

use autograd::Var;
use numcore::{Error, Result, Runtime, Within, ops::Apply};

use crate::{Module, ModuleExt, replaced::with_replaced};

/// Calls `f` with other values for some parameters of `model`, by name: in this thread, the layers compute with these
/// variables. So a model is a function of its parameters, to be differentiated by them in any mode, as
/// [`jvp`](autograd::jvp) does. Parameters that are not named are the model's own. A shared parameter has the first of
/// its names, and is replaced wherever it is used.
///
/// ```
/// use autograd::{Var, hvp};
/// use nn::{Forward, Init, Linear, ModuleExt, functional_call};
/// use numcore::{Tensor, ops::{PointwiseOps, ReduceOps}};
/// use runtime_cpu::Cpu;
///
/// let cpu = Cpu::new();
/// let model = Linear::new(&Init::new(&cpu, 0), 3, 1)?;
/// let x = Var::new(Tensor::from_slice(&cpu, [2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?);
/// let loss = |weight: &[Var<Cpu>]| {
///     functional_call(&model, &[("weight", weight[0].clone())], || model.forward(&x)?.square()?.sum_all())
/// };
/// // The Hessian of the sum of squares is `2 xᵀ x`.
/// let along = Var::new(Tensor::from_slice(&cpu, [1, 3], &[1.0f32, 0.0, 0.0])?);
/// let product = hvp(loss, &[&model.weight.var()], &[&along])?;
/// assert_eq!(product[0].value()?.to_f64s()?, [34.0, 44.0, 54.0]);
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// An error if `model` has no parameter of a name, or a value has another shape or dtype than the parameter.
#[doc(alias("stateless", "func_call"))]
#[track_caller]
pub fn functional_call<R: Runtime, T>(
    model: &(impl Module<R> + ?Sized),
    parameters: &[(impl AsRef<str>, Var<R>)],
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let own = model.named_parameters();
    let replaced = parameters.iter().map(|(name, value)| {
        let name = name.as_ref();
        let Some((_, parameter)) = own.iter().find(|(n, _)| n == name) else {
            return Err(Error::state(name, "is no parameter of this model"));
        };
        let (is, given) = (parameter.spec(), value.spec());
        if is != given {
            let why = format!("is {} {}, and its value here is {} {}", is.dtype, is.shape, given.dtype, given.shape);
            return Err(Error::state(name, why));
        }
        Ok((parameter.id(), Box::new(value.clone()) as _))
    });
    let replaced = replaced.collect::<Result<Vec<_>>>().at_caller()?;
    with_replaced(replaced, f)
}
