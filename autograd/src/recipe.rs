//! Recipes: recorded calls that backward runs again for their outputs.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, Op, Outs, Rule, Spec},
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{
    BackwardHook, Function, Var,
    mode::{ForwardContext, with_grad},
    node::SavedInput,
    var::saved_input,
};

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
    pub(crate) fn new(call: RecipeCall<R>, ins: &[&Var<R>]) -> Arc<Self> {
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
        let inputs = self.state.lock().inputs.clone().unwrap_or_default();
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
                let outputs = context.run(|| with_grad(|| function.forward(&values)))?;
                check(function.name(), specs, &outputs)?;
                outputs.into_iter().collect()
            }
        };
        let mut state = self.state.lock();
        state.outputs = Some(outputs);
        // The inputs are of no more use, unless another pass begins without the outputs.
        let done = if remade.keeps_graph { None } else { state.inputs.take() };
        drop(state);
        drop(done);
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
