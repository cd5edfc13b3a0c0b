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
    /// The choice of the innermost [`with_recomputation`]; `None` leaves it to the runtime.
    static RECOMPUTATION: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Runs `f` with the values of [`recomputed`] recomputed in backward (`true`) or kept (`false`), whatever the runtime's
/// default. Recomputation needs less memory, keeping less computation. The choice in forward holds in backward too, and
/// results have the same bits.
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

/// The choice of the innermost [`with_recomputation`] on this thread.
pub(crate) fn recomputation() -> Option<bool> {
    RECOMPUTATION.get()
}

/// Runs `f` with the choice of an earlier forward pass.
pub(crate) fn at_recomputation<T>(on: Option<bool>, f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&RECOMPUTATION, on);
    f()
}

type MakeValue<R> = dyn Fn(&[Var<R>]) -> Result<Var<R>> + Send + Sync;

/// A rematerialized value during the forward pass, with its recipe.
pub(crate) struct Rematerialized<R: Runtime> {
    pub(crate) value: Tensor<R>,
    pub(crate) recipe: Arc<RematRecipe<R>>,
}

/// The recipe by which backward recomputes a value.
pub(crate) struct RematRecipe<R: Runtime> {
    make: Arc<MakeValue<R>>,
    inputs: Vec<SavedInput<R>>,
    /// The leaves whose values `make` read, with their versions.
    read: Versions<R>,
    context: ForwardContext,
    /// The shape and dtype of the output of `make`.
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
    /// The view `view` of this value, already computed as `value`, with its recipe.
    pub(crate) fn seen(&self, view: &ViewOp, value: &Tensor<R>) -> TapeValue<R> {
        let views = self.recipe.views.iter().chain([view]).cloned().collect();
        let recipe = Arc::new(RematRecipe { views, ..RematRecipe::clone(&self.recipe) });
        TapeValue::Rematerialized(Arc::new(Rematerialized { value: value.clone(), recipe }))
    }
}

/// Computes a value from `inputs` by `make`. Ops that need this value for their gradients do not save it, but recompute
/// it in backward, with the same random seeds. This is activation checkpointing of one value. Unlike in
/// [`checkpoint`](crate::checkpoint), the ops of `make` are recorded as usual, and can be differentiated twice.
///
/// The runtime decides the default ([`Runtime::recomputes_in_backward`]): CPUs recompute values, GPUs keep them.
/// [`with_recomputation`] overrides it.
///
/// Recomputation pays off where the value is cheap and its inputs are saved anyway. Examples are an activation, whose
/// gradient reads its input; a norm; a copy in another order. `make` must depend only on its inputs, on leaves, and on
/// random seeds.
///
/// # Errors
/// An error of `make`. The backward pass fails if a second run gives another shape or dtype, or a leaf changed.
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
    /// The saved inputs of `make`, from which the value is recomputed.
    pub(crate) fn inputs(&self) -> &[SavedInput<R>] {
        &self.inputs
    }

    /// Recomputes the value in backward. The leaves that `make` read must be unchanged since forward. The hook is
    /// notified of leaves among the inputs.
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
