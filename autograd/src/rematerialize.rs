//! Rematerialization: values that the tape does not save. Backward computes them again, by the op calls that made them.
//!
//! An op call in a scope of recomputation leaves a [`Recipe`]: the call and its inputs, which are recipes in turn. A
//! node that saves an output of the call saves the recipe. When backward first reads the value, it computes the missing
//! inputs, then the call. The value is kept for the nodes that read it later, and is freed with the last of them.
//!
//! A value that leaves its scope is saved as it is, so the chain of recipes ends at the inputs of the scope.

use std::{
    cell::{Cell, RefCell},
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, Op, Outs, Rule, Spec},
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{
    BackwardHook, Function, ObservedOp, Var,
    checkpoint::Keep,
    mode::{ForwardContext, Restore},
    node::{SavedInput, TapeValue},
    var::saved_input,
};

thread_local! {
    /// The choice of the innermost [`with_recomputation`]; `None` leaves it to the runtime.
    static RECOMPUTATION: Cell<Option<bool>> = const { Cell::new(None) };
    /// The active scopes of recomputation, innermost last.
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
    static LAST: Cell<u64> = const { Cell::new(ANY) };
}

/// The scope of values that are recomputed wherever they are read.
const ANY: u64 = 0;

struct Scope {
    number: u64,
    keep: Keep,
}

/// Runs `f` with the values of [`recomputed`] recomputed in backward (`true`) or kept (`false`), whatever the runtime's
/// default. Recomputation needs less memory, keeping less computation. Results have the same bits.
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
    let _restore = Restore::set(&RECOMPUTATION, Some(on));
    f()
}

/// Computes a value from `inputs` by `make`. Ops that need this value for their gradients do not save it, but recompute
/// it in backward, with the same random seeds. This is activation checkpointing of one value, wherever it is read.
///
/// The runtime decides the default ([`Runtime::recomputes_in_backward`]): CPUs recompute values, GPUs keep them.
/// [`with_recomputation`] overrides it.
///
/// Recomputation pays off where the value is cheap and its inputs are saved anyway. Examples are an activation, whose
/// gradient reads its input; a norm; a copy in another order.
///
/// # Errors
/// An error of `make`. The backward pass fails if a leaf changed that an op of `make` read.
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
pub fn recomputed<R: Runtime>(inputs: &[&Var<R>], make: impl FnOnce(&[Var<R>]) -> Result<Var<R>>) -> Result<Var<R>> {
    let inputs: Vec<Var<R>> = inputs.iter().map(|v| (*v).clone()).collect();
    let default = || inputs.first().is_some_and(|input| input.runtime().recomputes_in_backward());
    if !RECOMPUTATION.get().unwrap_or_else(default) {
        return make(&inputs).at_caller();
    }
    let mut out = in_scope(Keep::default(), || make(&inputs)).at_caller()?;
    if let TapeValue::Rematerialized(value) = &out.value {
        // It leaves the scope as a recipe, up to the end of the scopes around it.
        let scope = outermost().unwrap_or(ANY);
        let Rematerialized { value, recipe, output, .. } = &**value;
        let value = Rematerialized { value: value.clone(), recipe: recipe.clone(), output: *output, scope };
        out.value = TapeValue::Rematerialized(Arc::new(value));
    }
    Ok(out)
}

/// The number of the outermost active scope.
fn outermost() -> Option<u64> {
    SCOPES.with_borrow(|scopes| scopes.first().map(|scope| scope.number))
}

/// Runs `f` in a scope of recomputation. Calls of a scope within one that has a ledger are in that ledger too.
pub(crate) fn in_scope<T>(keep: Keep, f: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            SCOPES.with_borrow_mut(Vec::pop);
        }
    }
    let number = LAST.get() + 1;
    LAST.set(number);
    SCOPES.with_borrow_mut(|scopes| {
        let around = scopes.last().and_then(|scope| scope.keep.ledger.clone());
        scopes.push(Scope { number, keep: Keep { ledger: keep.ledger.or(around), ..keep } });
    });
    let _leave = Leave;
    f()
}

/// A recomputed value during the forward pass: output `output` of a recipe.
pub(crate) struct Rematerialized<R: Runtime> {
    pub(crate) value: Tensor<R>,
    recipe: Arc<Recipe<R>>,
    output: u32,
    /// The outermost scope in which it was computed; it is saved as a value outside.
    scope: u64,
}

impl<R: Runtime> Rematerialized<R> {
    fn is_in_scope(&self) -> bool {
        self.scope == ANY || outermost() == Some(self.scope)
    }

    /// The saved form of the value: its recipe within the scope, the value outside.
    pub(crate) fn saved(&self) -> SavedInput<R> {
        match self.is_in_scope() {
            true => SavedInput::Recipe(self.recipe.clone(), self.output),
            false => SavedInput::Own(self.value.clone()),
        }
    }
}

/// A recorded call whose outputs backward computes again.
pub(crate) enum RecipeCall<R: Runtime> {
    Op(Op),
    /// A function, with the state of the thread before it ran, and its outputs' shapes and dtypes.
    Function(Arc<dyn Function<R>>, ForwardContext, SmallVec<[Spec; 1]>),
}

/// The recipe of a call's outputs.
pub(crate) struct Recipe<R: Runtime> {
    call: RecipeCall<R>,
    state: Mutex<RecipeState<R>>,
    /// True if a node saves an output.
    is_saved: AtomicBool,
}

struct RecipeState<R: Runtime> {
    /// The inputs; none once the outputs were recomputed by a pass that frees the graph.
    inputs: Option<SmallVec<[SavedInput<R>; 2]>>,
    /// The outputs, where they were kept or recomputed.
    outputs: Option<Outs<Tensor<R>>>,
}

/// A recipe that was made in forward, and the scope of its outputs.
pub(crate) struct ScopedRecipe<R: Runtime> {
    pub(crate) recipe: Arc<Recipe<R>>,
    scope: u64,
}

impl<R: Runtime> ScopedRecipe<R> {
    /// The recipe of a recorded call; none if its outputs are saved as values.
    pub(crate) fn of(call: impl FnOnce() -> RecipeCall<R>, ins: &[&Var<R>], outs: &[Tensor<R>]) -> Option<Self> {
        let scope = outermost()?;
        let keep = SCOPES.with_borrow(|scopes| scopes.last().map(|scope| scope.keep.clone()))?;
        let call = call();
        let observed = match (&call, &keep) {
            (RecipeCall::Op(op), Keep { calls: Some(_), .. } | Keep { ledger: Some(_), .. }) => {
                Some(ObservedOp::of(op.clone(), ins, outs.iter().map(Apply::spec).collect(), None))
            }
            _ => None,
        };
        let keeps = observed.as_ref().zip(keep.calls.as_ref()).is_some_and(|(call, keeps)| keeps(call));
        if keeps && keep.ledger.is_none() {
            return None;
        }
        let recipe = Recipe::new(call, ins);
        if let Some(ledger) = &keep.ledger {
            ledger.note(&recipe, outs, observed.map_or(0, |call| call.flops()), keeps);
        }
        Some(ScopedRecipe { recipe, scope })
    }

    /// The recipe of a view of a value that is recomputed outside of scopes too.
    pub(crate) fn of_view(op: &Op, input: &Var<R>) -> Option<Self> {
        match (op, &input.value) {
            (Op::View(_) | Op::Split(_), TapeValue::Rematerialized(x)) if x.is_in_scope() => {
                Some(ScopedRecipe { recipe: Recipe::new(RecipeCall::Op(op.clone()), &[input]), scope: x.scope })
            }
            _ => None,
        }
    }

    /// The saved form of output `k` within the scope.
    pub(crate) fn saved(&self, k: usize) -> SavedInput<R> {
        SavedInput::Recipe(self.recipe.clone(), k as u32)
    }

    /// Output `k`, whose value is known, as the value of a variable.
    pub(crate) fn output(&self, k: usize, value: Tensor<R>) -> TapeValue<R> {
        let (recipe, output, scope) = (self.recipe.clone(), k as u32, self.scope);
        TapeValue::Rematerialized(Arc::new(Rematerialized { value, recipe, output, scope }))
    }
}

/// The recipes that a backward pass has followed: if it keeps the graph, it frees their values at its end.
pub(crate) struct Remade<R: Runtime> {
    keeps_graph: bool,
    recipes: Vec<Arc<Recipe<R>>>,
}

impl<R: Runtime> Remade<R> {
    pub(crate) fn new(keeps_graph: bool) -> Self {
        Remade { keeps_graph, recipes: Vec::new() }
    }
}

impl<R: Runtime> Drop for Remade<R> {
    fn drop(&mut self) {
        self.recipes.iter().for_each(|recipe| recipe.state.lock().outputs = None);
    }
}

impl<R: Runtime> Recipe<R> {
    fn new(call: RecipeCall<R>, ins: &[&Var<R>]) -> Arc<Self> {
        let inputs = Some(ins.iter().map(|v| saved_input(&v.value)).collect());
        Arc::new(Recipe {
            call,
            state: Mutex::new(RecipeState { inputs, outputs: None }),
            is_saved: AtomicBool::new(false),
        })
    }

    /// Notes that a node saves an output.
    pub(crate) fn mark_saved(&self) {
        self.is_saved.store(true, Ordering::Relaxed);
    }

    /// Tells whether a node saves an output: backward needs it.
    pub(crate) fn is_saved(&self) -> bool {
        self.is_saved.load(Ordering::Relaxed)
    }

    /// Keeps the outputs: they are not recomputed.
    pub(crate) fn keep(&self, outputs: Outs<Tensor<R>>) {
        *self.state.lock() = RecipeState { inputs: None, outputs: Some(outputs) };
    }

    /// Output `k`, recomputed unless it is known. The hook is notified of leaves among the inputs, whose values must be
    /// those of forward.
    pub(crate) fn output(
        self: &Arc<Self>,
        k: u32,
        remade: &mut Remade<R>,
        hook: &mut dyn BackwardHook<R>,
    ) -> Result<Tensor<R>> {
        // A stack in place of recursion: a scope may hold a chain of any length.
        let mut stack = vec![self.clone()];
        while let Some(recipe) = stack.last().cloned() {
            match recipe.missing_input() {
                Some(input) => stack.push(input),
                None => {
                    recipe.make(remade, hook)?;
                    stack.pop();
                }
            }
        }
        self.known(k)
    }

    fn known(&self, k: u32) -> Result<Tensor<R>> {
        let missing = || Error::internal(self.name(), "a value that backward computes again is missing");
        self.state.lock().outputs.as_ref().and_then(|outputs| outputs.get(k as usize)).cloned().ok_or_else(missing)
    }

    fn name(&self) -> &'static str {
        match &self.call {
            RecipeCall::Op(op) => op.name(),
            RecipeCall::Function(function, ..) => function.name(),
        }
    }

    fn is_known(&self) -> bool {
        self.state.lock().outputs.is_some()
    }

    /// The recipe of an input that has to be computed first.
    fn missing_input(&self) -> Option<Arc<Self>> {
        let state = self.state.lock();
        let inputs = state.inputs.as_ref().filter(|_| state.outputs.is_none())?;
        inputs.iter().find_map(|input| match input {
            SavedInput::Recipe(recipe, _) if !recipe.is_known() => Some(recipe.clone()),
            _ => None,
        })
    }

    /// Computes the outputs from inputs that are known.
    fn make(self: &Arc<Self>, remade: &mut Remade<R>, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        if self.is_known() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let inputs = if remade.keeps_graph { state.inputs.clone() } else { state.inputs.take() };
        drop(state);
        let inputs = inputs.unwrap_or_default();
        let mut values: SmallVec<[Tensor<R>; 4]> = SmallVec::new();
        for input in &inputs {
            values.push(match input {
                SavedInput::Recipe(recipe, k) => recipe.known(*k)?,
                input => input.fetch(remade, hook)?.get()?,
            });
        }
        let outputs = match &self.call {
            RecipeCall::Op(op) => Tensor::compute(op, &values.iter().collect::<SmallVec<[&Tensor<R>; 4]>>())?,
            RecipeCall::Function(function, context, specs) => {
                let outputs = context.run(|| function.forward(&values))?;
                check(function.name(), specs, &outputs)?;
                outputs.into_iter().collect()
            }
        };
        self.state.lock().outputs = Some(outputs);
        if remade.keeps_graph {
            remade.recipes.push(self.clone());
        }
        Ok(())
    }

    /// The inputs and the known outputs that this recipe holds.
    pub(crate) fn holds(&self) -> (SmallVec<[SavedInput<R>; 2]>, Outs<Tensor<R>>) {
        let state = self.state.lock();
        (state.inputs.clone().unwrap_or_default(), state.outputs.clone().unwrap_or_default())
    }
}

/// Checks that the outputs of a function's second run have the shapes and dtypes of the first run's.
fn check<R: Runtime>(name: &'static str, first: &[Spec], outputs: &[Tensor<R>]) -> Result<()> {
    let again: SmallVec<[Spec; 1]> = outputs.iter().map(Apply::spec).collect();
    if first == &again[..] {
        return Ok(());
    }
    let list = |specs: &[Spec]| specs.iter().map(|s| format!("{} {}", s.dtype, s.shape)).collect::<Vec<_>>().join(", ");
    let why = format!(
        "gave ({}) in forward and ({}) in backward; it may depend on its inputs and random seeds alone",
        list(first),
        list(&again)
    );
    Err(Error::state(name.to_string(), why))
}

/// Drops a chain of recipes in a loop: recursion over 100 000 would overflow the stack.
impl<R: Runtime> Drop for Recipe<R> {
    fn drop(&mut self) {
        let mut stack: Vec<SavedInput<R>> = self.state.get_mut().inputs.take().into_iter().flatten().collect();
        while let Some(input) = stack.pop() {
            if let SavedInput::Recipe(recipe, _) = input
                && let Some(mut recipe) = Arc::into_inner(recipe)
            {
                stack.extend(mem::take(&mut recipe.state.get_mut().inputs).into_iter().flatten());
            }
        }
    }
}
