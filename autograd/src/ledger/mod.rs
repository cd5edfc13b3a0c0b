//! The op calls of a checkpointed scope, and the choice of outputs to keep within a budget.
//!
//! Outputs that are not kept are computed again in backward, each once, if a node saved them or another such output
//! needs them. To keep an output saves its own call, and the calls that only it needs. The choice is in [`search`], by
//! minimal cuts of the graph of calls ([`plan`]).

mod cut;
mod fill;
mod plan;
mod search;

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    sync::{Arc, Weak},
};

use numcore::{Runtime, Tensor, ops::Outs};

use self::plan::RematPlan;
use crate::{node::SavedInput, recipe::Recipe};

/// The cost of an output's byte, in floating-point operations: calls without a product are bound by memory.
const FLOPS_OF_A_BYTE: u64 = 8;

/// The bytes that a checkpointed scope keeps for backward, and the computation that backward repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointBill {
    /// Bytes of outputs that are kept. A kept view counts as the output that it is a view of. Inputs of the scope are
    /// not counted.
    pub kept_bytes: usize,
    /// Bytes of outputs that backward computes again.
    pub recomputed_bytes: usize,
    /// Op calls that backward repeats.
    pub recomputed_ops: usize,
    /// Floating-point operations of these calls, as [`ObservedOp::flops`](crate::ObservedOp::flops) counts them.
    pub recomputed_flops: u64,
}

/// A line such as `1024 bytes kept; 4096 bytes recomputed in backward by 7 op calls, 65536 FLOPs`.
impl fmt::Display for CheckpointBill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckpointBill { kept_bytes, recomputed_bytes, recomputed_ops, recomputed_flops } = self;
        write!(
            f,
            "{kept_bytes} bytes kept; {recomputed_bytes} bytes recomputed in backward by {recomputed_ops} op calls, {recomputed_flops} FLOPs"
        )
    }
}

/// The op calls of a scope whose outputs may be computed again.
pub(crate) struct Ledger {
    budget: Option<usize>,
    state: RefCell<LedgerState>,
}

#[derive(Default)]
struct LedgerState {
    calls: Vec<LedgerCall>,
    /// The index of each call, by the address of its recipe.
    of_recipe: HashMap<usize, usize>,
}

/// An op call: its outputs' bytes, its cost, and the calls whose outputs it reads.
struct LedgerCall {
    recipe: Box<dyn KeepableRecipe>,
    bytes: usize,
    inputs: Vec<usize>,
    call: NotedCall,
}

/// Properties of a call that a policy weighs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotedCall {
    pub(crate) flops: u64,
    /// True if the policy keeps the outputs.
    pub(crate) keeps: bool,
    /// True if an output is in the memory of an input, as a view is: to keep it would keep the input.
    pub(crate) shares_memory: bool,
}

impl NotedCall {
    /// The decision about the outputs that is made before any budget.
    fn fixed(&self) -> Option<bool> {
        match self.keeps {
            true => Some(true),
            false => self.shares_memory.then_some(false),
        }
    }
}

/// The recipe of a call on any runtime, with its outputs if there is a budget.
trait KeepableRecipe {
    /// Tells whether a node of the graph saves an output.
    fn is_saved(&self) -> bool;
    fn keep(&mut self);
}

struct LedgerRecipe<R: Runtime> {
    recipe: Weak<Recipe<R>>,
    outputs: Option<Outs<Tensor<R>>>,
}

impl<R: Runtime> KeepableRecipe for LedgerRecipe<R> {
    fn is_saved(&self) -> bool {
        self.recipe.upgrade().is_some_and(|recipe| recipe.is_saved())
    }

    fn keep(&mut self) {
        if let (Some(recipe), Some(outputs)) = (self.recipe.upgrade(), self.outputs.take()) {
            recipe.keep(outputs);
        }
    }
}

fn bytes_of<R: Runtime>(outs: &[Tensor<R>]) -> usize {
    outs.iter().map(|out| out.shape().numel() * out.dtype().size()).sum()
}

impl Ledger {
    pub(crate) fn new(budget: Option<usize>) -> Self {
        Ledger { budget, state: RefCell::default() }
    }

    pub(crate) fn has_budget(&self) -> bool {
        self.budget.is_some()
    }

    /// Notes a call and its outputs.
    pub(crate) fn note<R: Runtime>(&self, recipe: &Arc<Recipe<R>>, outs: &[Tensor<R>], call: NotedCall) {
        let state = &mut *self.state.borrow_mut();
        let read = |input: &SavedInput<R>| match input {
            SavedInput::Recipe(recipe, _) => state.of_recipe.get(&(Arc::as_ptr(recipe) as usize)).copied(),
            _ => None,
        };
        let inputs = recipe.holds().0.iter().filter_map(read).collect();
        if call.keeps {
            recipe.keep(outs.iter().cloned().collect());
        }
        let outputs = self.budget.map(|_| outs.iter().cloned().collect());
        let of_runtime = LedgerRecipe { recipe: Arc::downgrade(recipe), outputs };
        state.of_recipe.insert(Arc::as_ptr(recipe) as usize, state.calls.len());
        let bytes = if call.shares_memory { 0 } else { bytes_of(outs) };
        state.calls.push(LedgerCall { recipe: Box::new(of_runtime), bytes, inputs, call });
    }

    /// Keeps the best outputs within the budget, frees the others, and returns the bill.
    pub(crate) fn settle(&self) -> CheckpointBill {
        let LedgerState { mut calls, .. } = self.state.take();
        let plan = plan_of(&calls);
        let by_policy: Vec<bool> = calls.iter().map(|call| call.call.keeps).collect();
        let kept = match self.budget {
            Some(budget) => solved(&plan, budget.saturating_sub(held_bytes(&calls, &by_policy))),
            None => by_policy,
        };
        calls.iter_mut().zip(&kept).filter(|(_, kept)| **kept).for_each(|(call, _)| call.recipe.keep());
        let (again, read) = plan.needed(&kept);
        let repeated = || calls.iter().zip(&again).filter(|(_, again)| **again).map(|(call, _)| call);
        CheckpointBill {
            kept_bytes: held_bytes(&calls, &read),
            recomputed_bytes: repeated().map(|call| call.bytes).sum(),
            recomputed_ops: repeated().count(),
            recomputed_flops: repeated().map(|call| call.call.flops).sum(),
        }
    }
}

/// A plan, a budget, and the outputs to keep.
struct Solution {
    plan: RematPlan,
    budget: usize,
    kept: Vec<bool>,
}

thread_local! {
    /// The last solution: blocks of a model are mostly alike.
    static LAST: RefCell<Option<Solution>> = const { RefCell::new(None) };
}

/// The outputs to keep within a budget.
fn solved(plan: &RematPlan, budget: usize) -> Vec<bool> {
    LAST.with_borrow_mut(|last| {
        let known = last.take().filter(|last| last.plan == *plan && last.budget == budget);
        let solve = || Solution { plan: plan.clone(), budget, kept: plan.within(budget) };
        last.insert(known.unwrap_or_else(solve)).kept.clone()
    })
}

fn plan_of(calls: &[LedgerCall]) -> RematPlan {
    let cost = |call: &LedgerCall| call.call.flops.saturating_add(FLOPS_OF_A_BYTE.saturating_mul(call.bytes as u64));
    RematPlan {
        costs: calls.iter().map(cost).collect(),
        bytes: calls.iter().map(|call| if call.call.keeps { 0 } else { call.bytes }).collect(),
        inputs: calls.iter().map(|call| call.inputs.clone()).collect(),
        saved: calls.iter().map(|call| call.recipe.is_saved()).collect(),
        fixed: calls.iter().map(|call| call.call.fixed()).collect(),
    }
}

/// The bytes of memory that these calls' outputs are in: a view holds the outputs that it is a view of.
fn held_bytes(calls: &[LedgerCall], outputs: &[bool]) -> usize {
    let mut held = outputs.to_vec();
    // Inputs come before the calls that read them.
    for call in (0..calls.len()).rev().filter(|&call| calls[call].call.shares_memory) {
        if held[call] {
            calls[call].inputs.iter().for_each(|&input| held[input] = true);
        }
    }
    calls.iter().zip(held).filter(|(_, held)| *held).map(|(call, _)| call.bytes).sum()
}
