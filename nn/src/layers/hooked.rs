//! Forward hooks.

use std::fmt;

use autograd::Var;
use numcore::{Result, Runtime, Within};

use crate::{Forward, Module};

type ForwardHook<R> = dyn Fn(&Var<R>, Var<R>) -> Result<Var<R>> + Send + Sync;

/// A layer with a forward hook: a function of its input and its output, which returns the output to go on with.
///
/// Parameters have the layer's names, so checkpoints do not tell it from the layer. Where the layer is recomputed in
/// the backward pass, its operations and the hook's are repeated, and the hook is not called. To read the outputs of a
/// model whose layers are not at hand, use [`ModuleExt::module_outputs`](crate::ModuleExt::module_outputs).
///
/// ```
/// use nn::{Forward, Hooked, Init, Linear};
/// use numcore::{DType, Tensor, ops::PointwiseOps};
/// # use autograd::Var;
/// # use runtime_cpu::Cpu;
/// # let cpu = Cpu::new();
/// let layer = Linear::new(&Init::new(&cpu, 0), 4, 3)?;
/// let clamped = Hooked::new(layer, |_input, output| output.clamp(-0.1, 0.1));
/// let y = clamped.forward(&Var::new(Tensor::ones(&cpu, [2, 4], DType::F32)?))?;
/// assert!(y.value()?.to_f64s()?.iter().all(|y| y.abs() <= 0.1 + 1e-6));
/// # Ok::<(), numcore::Error>(())
/// ```
#[doc(alias("register_forward_hook", "register_forward_pre_hook"))]
#[derive(Module)]
pub struct Hooked<R: Runtime, L: Module<R>> {
    #[module(flatten)]
    layer: L,
    #[module(skip)]
    hook: Box<ForwardHook<R>>,
}

impl<R: Runtime, L: Module<R>> Hooked<R, L> {
    /// Calls `hook` after each forward pass of `layer`.
    pub fn new(layer: L, hook: impl Fn(&Var<R>, Var<R>) -> Result<Var<R>> + Send + Sync + 'static) -> Self {
        Hooked { layer, hook: Box::new(hook) }
    }

    /// The layer without its hook.
    pub fn into_layer(self) -> L {
        self.layer
    }
}

impl<R: Runtime, L: Forward<R>> Forward<R> for Hooked<R, L> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.layer.forward(x).and_then(|y| (self.hook)(x, y)).at_caller()
    }
}

impl<R: Runtime, L: Module<R> + fmt::Debug> fmt::Debug for Hooked<R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").field("layer", &self.layer).finish_non_exhaustive()
    }
}
