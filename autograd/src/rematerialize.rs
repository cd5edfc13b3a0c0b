//! Rematerialization: values that are not saved, but recomputed by the op calls that read them in backward.

use std::{cell::Cell, sync::Arc};

use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, Spec, ViewOp},
};

use crate::{
    BackwardHook, Var, is_grad_enabled,
    mode::{ForwardContext, Restore, Versions, watching},
    no_grad,
    node::{SavedInput, TapeValue},
    var::saved_input,
};

thread_local! {
    /// What [`with_recomputation`] says; nothing: what the runtime says.
    static RECOMPUTATION: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Runs `f` with the values of [`recomputed`] recomputed in backward, or kept, whatever the runtime would do: `true` needs less memory, `false` less
/// computation. What forward decided holds in backward too, and results have the same bits.
///
/// ```
/// # use autograd::{Var, recomputed, saved_bytes, with_recomputation};
/// # use numcore::{DType, NullRuntime, Tensor, ops::{MatmulOps, PointwiseOps}};
/// # let rt = NullRuntime::new();
/// let x = Var::leaf("x", Tensor::zeros(&rt, [4, 8], DType::F32)?)?;
/// let w = Var::leaf("w", Tensor::zeros(&rt, [8, 8], DType::F32)?)?;
/// let forward = || recomputed(&[&x], |x| x[0].gelu())?.matmul(&w);
/// let bytes = |y: &Var<NullRuntime>| saved_bytes(y).iter().map(|(_, bytes)| bytes).sum::<usize>();
/// let (less, more) = (with_recomputation(true, forward)?, with_recomputation(false, forward)?);
/// assert_eq!(bytes(&more) - bytes(&less), 4 * 8 * 4);
/// # Ok::<(), numcore::Error>(())
/// ```
pub fn with_recomputation<T>(on: bool, f: impl FnOnce() -> T) -> T {
    at_recomputation(Some(on), f)
}

/// What the innermost [`with_recomputation`] says here.
pub(crate) fn recomputation() -> Option<bool> {
    RECOMPUTATION.get()
}

/// Runs `f` with what another place says.
pub(crate) fn at_recomputation<T>(on: Option<bool>, f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&RECOMPUTATION, on);
    f()
}

type MakeValue<R> = dyn Fn(&[Var<R>]) -> Result<Var<R>> + Send + Sync;

/// A value during the forward pass, with its recipe.
pub(crate) struct Rematerialized<R: Runtime> {
    pub(crate) value: Tensor<R>,
    pub(crate) recipe: Arc<RematRecipe<R>>,
}

/// How a value is recomputed.
pub(crate) struct RematRecipe<R: Runtime> {
    make: Arc<MakeValue<R>>,
    inputs: Vec<SavedInput<R>>,
    /// The leaves whose values `make` read.
    read: Versions<R>,
    context: ForwardContext,
    /// Of what `make` gave.
    spec: Spec,
    /// The views through which the recomputed value is read.
    views: Vec<ViewOp>,
}

impl<R: Runtime> Clone for RematRecipe<R> {
    fn clone(&self) -> Self {
        let RematRecipe { make, inputs, read, context, spec, views } = self;
        let (make, inputs, read, views) = (make.clone(), inputs.clone(), read.clone(), views.clone());
        RematRecipe { make, inputs, read, context: *context, spec: *spec, views }
    }
}

impl<R: Runtime> Rematerialized<R> {
    /// A view of the value, `value`.
    pub(crate) fn seen(&self, view: &ViewOp, value: &Tensor<R>) -> TapeValue<R> {
        let views = self.recipe.views.iter().chain([view]).cloned().collect();
        let recipe = Arc::new(RematRecipe { views, ..RematRecipe::clone(&self.recipe) });
        TapeValue::Rematerialized(Arc::new(Rematerialized { value: value.clone(), recipe }))
    }
}

/// The value that `make` computes from `inputs`. Ops that need this value for their gradients do not save it, but
/// recompute it in backward, with the same random seeds. (Activation checkpointing of one value; unlike in
/// [`checkpoint`](crate::checkpoint), what `make` computes is recorded as usual, and can be differentiated twice.)
///
/// Whether it is worth it is the runtime's to say ([`Runtime::recomputes_in_backward`]): on the CPU values are recomputed, on GPUs they are kept.
/// [`with_recomputation`] overrides it.
///
/// It pays off where the value is cheap and its inputs are saved anyway: an activation, whose gradient reads its input;
/// a norm; a copy in another order. `make` must depend only on its inputs and on random seeds.
///
/// ```
/// # use autograd::{Var, recomputed};
/// # use numcore::{DType, NullRuntime, Tensor, ops::{MatmulOps, PointwiseOps}};
/// # let rt = NullRuntime::new();
/// # let (x, w) = (Tensor::zeros(&rt, [4, 8], DType::F32)?, Tensor::zeros(&rt, [8, 8], DType::F32)?);
/// # let (x, w) = (Var::leaf("x", x)?, Var::leaf("w", w)?);
/// let h = x.mul(2.0)?;
/// // The matmul saves `h`, which `gelu` saves too, and not `gelu(h)`.
/// let y = recomputed(&[&h], |h| h[0].gelu())?.matmul(&w)?;
/// # Ok::<(), numcore::Error>(())
/// ```
#[track_caller]
pub fn recomputed<R: Runtime>(
    inputs: &[&Var<R>],
    make: impl Fn(&[Var<R>]) -> Result<Var<R>> + Send + Sync + 'static,
) -> Result<Var<R>> {
    let context = ForwardContext::here();
    let (out, read) = watching(|| make(&inputs.iter().map(|v| (*v).clone()).collect::<Vec<_>>())).at_caller()?;
    if !is_grad_enabled() || out.edge.is_none() {
        return Ok(out);
    }
    let value = out.value()?;
    if !recomputation().unwrap_or_else(|| value.runtime().recomputes_in_backward()) {
        return Ok(out);
    }
    let spec = value.spec();
    let inputs = inputs.iter().map(|v| saved_input(&v.value)).collect();
    let recipe = Arc::new(RematRecipe { make: Arc::new(make), inputs, read, context, spec, views: Vec::new() });
    Ok(Var { value: TapeValue::Rematerialized(Arc::new(Rematerialized { value, recipe })), edge: out.edge })
}

impl<R: Runtime> RematRecipe<R> {
    /// What the value is recomputed from.
    pub(crate) fn inputs(&self) -> &[SavedInput<R>] {
        &self.inputs
    }

    /// Recomputes the value in backward: leaves it reads must be unchanged since forward, and are announced to the
    /// hook.
    pub(crate) fn run(&self, hook: &mut dyn BackwardHook<R>) -> Result<Tensor<R>> {
        self.read.iter().try_for_each(|(leaf, saved)| leaf.unchanged_since(*saved))?;
        let inputs = self.inputs.iter().map(|i| Ok(Var { value: i.fetch(hook)?, edge: None }));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let value = self.context.run(|| no_grad(|| (self.make)(&inputs)))?.value()?;
        let (first, again) = (self.spec, value.spec());
        if first != again {
            let why = format!(
                "gave {} {} in forward and {} {} in backward; it may depend on its inputs and random seeds alone",
                first.dtype, first.shape, again.dtype, again.shape
            );
            return Err(Error::state("the closure of `recomputed`".to_string(), why));
        }
        self.views.iter().try_fold(value, |x, view| Tensor::apply1(view.clone(), &[&x]))
    }
}
