//! Rematerialization: values that the tape does not save. Backward computes them again, by the op calls that made them.
//!
//! An op call in a scope of recomputation leaves a [`Recipe`]: the call and its inputs, which are recipes in turn. A
//! node that saves an output of the call saves the recipe. When backward first reads the value, it computes the missing
//! inputs, then the call. The value is kept for the nodes that read it later, and is freed with the last of them.
//!
//! A value that leaves its scope is saved as it is, so the chain of recipes ends at the inputs of the scope.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    sync::{Arc, Weak},
};

use numcore::{
    Result, Runtime, Tensor, Within,
    ops::{Apply, Op},
};

use crate::{
    ObservedOp, Var,
    checkpoint::Keep,
    ledger::NotedCall,
    mode::Restore,
    node::{SavedInput, TapeValue},
    recipe::{Recipe, RecipeCall},
};

thread_local! {
    /// The choice of the innermost [`with_recomputation`]; `None` leaves it to the runtime.
    static RECOMPUTATION: Cell<Option<bool>> = const { Cell::new(None) };
    /// The active scopes of recomputation, innermost last.
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
    /// The number of the last scope.
    static LAST: Cell<u64> = const { Cell::new(0) };
}

struct Scope {
    number: u64,
    keep: Keep,
    /// The recipes of calls in this scope and those within it. After it, only nodes and other recipes hold them.
    recipes: Vec<Box<dyn Any>>,
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
    match outermost() {
        // The scopes around it decide what is kept, and up to where it is recomputed.
        Some(_) => in_scope(around(), || make(&inputs)).at_caller(),
        None => in_scope(Keep::default(), || make(&inputs).map(Var::recomputed_anywhere)).at_caller(),
    }
}

impl<R: Runtime> Var<R> {
    /// This variable, recomputed wherever it is read if it is in this scope.
    fn recomputed_anywhere(self) -> Self {
        let TapeValue::Rematerialized(value) = &self.value else { return self };
        let Some(recipe) = value.recipe() else { return self };
        let Rematerialized { value, output, .. } = &**value;
        let value = Rematerialized { value: value.clone(), source: RecipeSource::Anywhere(recipe), output: *output };
        Var { value: TapeValue::Rematerialized(Arc::new(value)), edge: self.edge }
    }
}

/// The policy of the innermost scope.
fn around() -> Keep {
    SCOPES.with_borrow(|scopes| scopes.last().map_or_else(Keep::default, |scope| scope.keep.clone()))
}

/// The number of the outermost active scope.
fn outermost() -> Option<u64> {
    SCOPES.with_borrow(|scopes| scopes.first().map(|scope| scope.number))
}

/// Runs `f` in a scope of recomputation. Without a ledger of its own, it has that of the scope around it.
pub(crate) fn in_scope<T>(keep: Keep, f: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            // Dropped after the borrow: recipes hold tensors.
            drop(SCOPES.with_borrow_mut(Vec::pop));
        }
    }
    let number = LAST.get() + 1;
    LAST.set(number);
    let keep = Keep { ledger: keep.ledger.or_else(|| around().ledger), ..keep };
    SCOPES.with_borrow_mut(|scopes| scopes.push(Scope { number, keep, recipes: Vec::new() }));
    let _leave = Leave;
    f()
}

/// A recomputed value during the forward pass: output `output` of a recipe.
pub(crate) struct Rematerialized<R: Runtime> {
    pub(crate) value: Tensor<R>,
    source: RecipeSource<R>,
    output: u32,
}

/// The recipe of a value, and where the value is saved as a recipe.
enum RecipeSource<R: Runtime> {
    Anywhere(Arc<Recipe<R>>),
    /// In the outermost scope of this number, which holds the recipe; outside, the value is saved as it is.
    Scope(u64, Weak<Recipe<R>>),
}

impl<R: Runtime> Rematerialized<R> {
    /// The recipe; none outside of its scope.
    fn recipe(&self) -> Option<Arc<Recipe<R>>> {
        match &self.source {
            RecipeSource::Anywhere(recipe) => Some(recipe.clone()),
            RecipeSource::Scope(number, recipe) if outermost() == Some(*number) => recipe.upgrade(),
            RecipeSource::Scope(..) => None,
        }
    }

    /// The saved form of the value: its recipe within the scope, the value outside.
    pub(crate) fn saved(&self) -> SavedInput<R> {
        match self.recipe() {
            Some(recipe) => SavedInput::Recipe(recipe, self.output),
            None => SavedInput::Own(self.value.clone()),
        }
    }
}

/// A recipe that was made in forward, and the scope of its outputs.
pub(crate) struct ScopedRecipe<R: Runtime> {
    recipe: Arc<Recipe<R>>,
    /// The number of the outermost scope; none if the outputs are recomputed wherever they are read.
    scope: Option<u64>,
}

impl<R: Runtime> ScopedRecipe<R> {
    /// The recipe of a recorded call; none if its outputs are saved as values.
    pub(crate) fn of(call: impl FnOnce() -> RecipeCall<R>, ins: &[&Var<R>], outs: &[Tensor<R>]) -> Option<Self> {
        let Some(scope) = outermost() else { return Self::of_view(call, ins) };
        let (keep, call) = (around(), call());
        let observed = match (&call, &keep) {
            (RecipeCall::Op(op), Keep { calls: Some(_), .. } | Keep { ledger: Some(_), .. }) => {
                Some(ObservedOp::of(op.clone(), ins, outs.iter().map(Apply::spec).collect(), None))
            }
            _ => None,
        };
        // Ranks may choose otherwise within a budget, but they exchange values together: no exchange is repeated.
        let is_fixed = matches!(call, RecipeCall::Function(..)) && keep.ledger.as_ref().is_some_and(|l| l.has_budget());
        let keeps = is_fixed || observed.as_ref().zip(keep.calls.as_ref()).is_some_and(|(call, keeps)| keeps(call));
        if keeps && keep.ledger.is_none() {
            return None;
        }
        let recipe = Recipe::new(call, ins);
        if let Some(ledger) = &keep.ledger {
            let flops = observed.map_or(0, |call| call.flops());
            ledger.note(&recipe, outs, NotedCall { flops, keeps, shares_memory: share_memory(ins, outs) });
        }
        SCOPES.with_borrow_mut(|scopes| {
            scopes.first_mut().into_iter().for_each(|scope| scope.recipes.push(Box::new(recipe.clone())));
        });
        Some(ScopedRecipe { recipe, scope: Some(scope) })
    }

    /// The recipe of a view, outside of scopes, of a value that is recomputed wherever it is read.
    fn of_view(call: impl FnOnce() -> RecipeCall<R>, ins: &[&Var<R>]) -> Option<Self> {
        let TapeValue::Rematerialized(x) = &ins.first()?.value else { return None };
        x.recipe()?;
        let call = call();
        let is_view = matches!(call, RecipeCall::Op(Op::View(_) | Op::Split(_)));
        is_view.then(|| ScopedRecipe { recipe: Recipe::new(call, ins), scope: None })
    }

    /// The saved form of output `k` within the scope.
    pub(crate) fn saved(&self, k: usize) -> SavedInput<R> {
        SavedInput::Recipe(self.recipe.clone(), k as u32)
    }

    /// Output `k`, whose value is known, as the value of a variable.
    pub(crate) fn output(&self, k: usize, value: Tensor<R>) -> TapeValue<R> {
        let source = match self.scope {
            Some(number) => RecipeSource::Scope(number, Arc::downgrade(&self.recipe)),
            None => RecipeSource::Anywhere(self.recipe.clone()),
        };
        TapeValue::Rematerialized(Arc::new(Rematerialized { value, source, output: k as u32 }))
    }
}

/// Tells whether an output is in the memory of an input.
fn share_memory<R: Runtime>(ins: &[&Var<R>], outs: &[Tensor<R>]) -> bool {
    let value = |v: &Var<R>| match &v.value {
        TapeValue::Own(t) => Some(t.clone()),
        TapeValue::Rematerialized(x) => Some(x.value.clone()),
        TapeValue::Leaf(_) | TapeValue::Dual(_) => None,
    };
    ins.iter().filter_map(|v| value(v)).any(|input| outs.iter().any(|out| input.shares_memory_with(out)))
}
