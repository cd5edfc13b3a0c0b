//! Entry points of the backward pass: from one loss or several roots, into gradients, a hook, or a graph of gradients.

use numcore::{Error, ErrorKind, Result, Runtime, Tensor, Within, ops::Apply};

use crate::{
    BackwardHook, Deferred, Gradients, LeafGrad, Var,
    mode::with_grad,
    no_grad,
    sweep::{Sweep, SweepOptions},
};

/// The gradients of `loss`, which must have one element, with respect to every leaf it depends on. The pass frees the
/// values that the graph saved.
///
/// # Errors
/// An error unless `loss` has one element and requires gradients, or if its graph was freed.
#[track_caller]
pub fn backward<R: Runtime>(loss: &Var<R>) -> Result<Gradients<R>> {
    let mut gradients = Gradients::new();
    backward_with_hooks(loss, &mut gradients)?;
    Ok(gradients)
}

/// Runs the backward pass of `loss`, which must have one element. It notifies `hook` as soon as each leaf's gradient is
/// final.
#[track_caller]
pub fn backward_with_hooks<R: Runtime>(loss: &Var<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
    Backward::of(loss)?.run(hook)
}

/// The gradients of the sum of all elements of `outputs` with respect to `inputs`, which are leaves or intermediates.
/// The entry is `None` for an input on which the outputs do not depend. The graph of `outputs` is kept.
///
/// # Errors
/// An error if an output requires no gradients, or an input is a view of a leaf.
#[track_caller]
pub fn grad<R: Runtime>(outputs: &[&Var<R>], inputs: &[&Var<R>]) -> Result<Vec<Option<Var<R>>>> {
    from_ones(outputs)?.grads(inputs)
}

/// The gradients of [`grad`], which can be differentiated again: PyTorch's `create_graph=True`.
///
/// # Errors
/// Fails as [`grad`].
#[doc(alias = "create_graph")]
#[track_caller]
pub fn differentiable_grad<R: Runtime>(outputs: &[&Var<R>], inputs: &[&Var<R>]) -> Result<Vec<Option<Var<R>>>> {
    from_ones(outputs)?.create_graph().grads(inputs)
}

/// A backward pass from the sum of some outputs.
#[track_caller]
fn from_ones<R: Runtime>(outputs: &[&Var<R>]) -> Result<Backward<R>> {
    let mut backward = Backward::new();
    for out in outputs {
        let ones = Tensor::ones(out.runtime(), out.spec().shape, out.spec().dtype)?;
        backward = backward.seed(out, &Var::new(ones))?;
    }
    Ok(backward.retain_graph())
}

/// A backward pass under construction: its roots with their gradients, and the option to keep the graph.
#[must_use = "a backward does nothing until it is run"]
pub struct Backward<R: Runtime> {
    roots: Vec<(Var<R>, Var<R>)>,
    options: SweepOptions,
    /// True if the gradients of [`grads`](Backward::grads) have a graph.
    differentiable: bool,
}

impl<R: Runtime> Backward<R> {
    fn new() -> Self {
        Backward { roots: Vec::new(), options: SweepOptions::default(), differentiable: false }
    }

    /// A backward pass that starts at a loss of one element, whose gradient is 1.
    ///
    /// # Errors
    /// An error unless `loss` has one element and requires gradients.
    #[track_caller]
    pub fn of(loss: &Var<R>) -> Result<Self> {
        let spec = loss.spec();
        if spec.shape.numel() != 1 {
            let why = "only a loss of one element has a gradient; reduce it, or give a seed with `Backward::from`";
            return Err(Error::shape("backward", &[spec.shape], why)).at_caller();
        }
        Self::from(loss, &Var::new(Tensor::ones(loss.runtime(), spec.shape, spec.dtype)?))
    }

    /// A backward pass that starts at a value of any shape, given the gradient of the loss with respect to it.
    ///
    /// # Errors
    /// An error if `gradient` differs from `root` in shape or dtype, or `root` requires no gradients.
    #[track_caller]
    pub fn from(root: &Var<R>, gradient: &Var<R>) -> Result<Self> {
        Self::new().seed(root, gradient)
    }

    /// Adds another root with its gradient. Gradients of all roots are summed in one pass.
    ///
    /// # Errors
    /// An error if `gradient` differs from `root` in shape or dtype, or `root` requires no gradients.
    #[track_caller]
    pub fn seed(mut self, root: &Var<R>, gradient: &Var<R>) -> Result<Self> {
        if root.spec() != gradient.spec() {
            let (is, got) = (root.spec(), gradient.spec());
            let why = format!("the gradient must be {} {} as its root, it is {}", is.dtype, is.shape, got.dtype);
            return Err(Error::shape("backward", &[is.shape, got.shape], why)).at_caller();
        }
        if !root.requires_grad() {
            let why = "nothing it depends on needs gradients (frozen, detached, or computed under `no_grad`)".into();
            return Err(Error::from(ErrorKind::NoGradient { op: "backward", why })).at_caller();
        }
        self.roots.push((root.clone(), gradient.clone()));
        Ok(self)
    }

    /// Keeps the saved values of the graph, so that another backward pass can use them. Without it a pass frees them.
    pub fn retain_graph(mut self) -> Self {
        self.options.retain_graph = true;
        self
    }

    /// Records the backward pass, so that the gradients of [`grads`](Backward::grads) can be differentiated again.
    /// Keeps the graph, as [`retain_graph`](Backward::retain_graph) does.
    pub fn create_graph(mut self) -> Self {
        self.differentiable = true;
        self.retain_graph()
    }

    /// Keeps the gradients of leaves of each of `examples` apart, along a first axis.
    pub(crate) fn by_example(mut self, examples: usize) -> Self {
        self.options.examples = Some(examples);
        self
    }

    /// Runs the backward pass and delivers the gradients of leaves to `hook`.
    ///
    /// # Errors
    /// An error of the hook, of a gradient rule, if the graph was freed, or if a saved leaf changed since forward.
    #[track_caller]
    pub fn run(self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        let mut sweep = Sweep::new(&self.roots, self.options);
        no_grad(|| sweep.start(self.roots, hook)).at_caller()
    }

    /// Runs only the op calls on the paths to `inputs` (of a pipeline stage), and defers all others. The deferred calls
    /// are the weight gradients of a backward split into an input part (I) and a weight part (W).
    #[track_caller]
    pub fn inputs_only(self, inputs: &[&Var<R>], hook: &mut dyn BackwardHook<R>) -> Result<Deferred<R>> {
        let mut sweep = Sweep::new(&self.roots, self.options);
        sweep.restrict(inputs);
        no_grad(|| sweep.start(self.roots, hook)).at_caller()?;
        Ok(Deferred::new(sweep))
    }

    /// The gradients with respect to `inputs` as variables; `None` for an input that the pass does not reach. Inputs
    /// are leaves or intermediates, but no views of leaves.
    ///
    /// # Errors
    /// An error if an input is a view of a leaf or a root has a tangent, and the errors of a backward pass.
    #[track_caller]
    pub fn grads(mut self, inputs: &[&Var<R>]) -> Result<Vec<Option<Var<R>>>> {
        if self.roots.iter().any(|(root, _)| root.tangent().is_some()) {
            let why =
                "a root has a tangent, which the gradients would lose; differentiate the tangent itself, or use `hvp`";
            return Err(Error::usage("grad", why)).at_caller();
        }
        self.options.create_graph = true;
        let mut sweep = Sweep::new(&self.roots, self.options);
        inputs.iter().try_for_each(|v| sweep.want(v)).at_caller()?;
        match self.differentiable {
            true => with_grad(|| sweep.start(self.roots, &mut Ignore)),
            false => no_grad(|| sweep.start(self.roots, &mut Ignore)),
        }
        .at_caller()?;
        Ok(inputs.iter().map(|v| sweep.result(v)).collect())
    }
}

/// A hook that ignores all gradients, for a backward pass whose results are variables.
struct Ignore;

impl<R: Runtime> BackwardHook<R> for Ignore {
    fn on_leaf_grad_ready(&mut self, _: &std::sync::Arc<crate::Leaf<R>>, _: LeafGrad<R>) -> Result<()> {
        Ok(())
    }
}
