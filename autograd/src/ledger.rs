//! The op calls of a checkpointed scope, and the choice of outputs to keep within a budget.
//!
//! Outputs that are not kept are computed again in backward, each once, if a node saved them or another such output
//! needs them. To keep an output saves its own call, and the calls that only it needs.

use std::{
    cell::RefCell,
    collections::{BinaryHeap, HashMap},
    fmt,
    sync::{Arc, Weak},
};

use numcore::{Runtime, Tensor, ops::Outs};

use crate::{node::SavedInput, recipe::Recipe};

/// The cost of an output's byte, in floating-point operations: calls without a product are bound by memory.
const FLOPS_OF_A_BYTE: u64 = 8;

/// The bytes that a checkpointed scope keeps for backward, and the computation that backward repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointBill {
    /// Bytes of outputs that are kept. Inputs of the scope are not counted.
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
        let plan = RematPlan::of(&calls);
        let kept = match self.budget {
            Some(budget) => plan.within(budget),
            None => plan.keeps.clone(),
        };
        calls.iter_mut().zip(&kept).filter(|(_, kept)| **kept).for_each(|(call, _)| call.recipe.keep());
        let (again, read) = plan.needed(&kept);
        let of = |which: &[bool]| calls.iter().zip(which.to_vec()).filter(|(_, is)| *is).map(|(call, _)| call);
        CheckpointBill {
            kept_bytes: of(&read).map(|call| call.bytes).sum(),
            recomputed_bytes: of(&again).map(|call| call.bytes).sum(),
            recomputed_ops: of(&again).count(),
            recomputed_flops: of(&again).map(|call| call.call.flops).sum(),
        }
    }
}

/// The calls as a graph: costs, bytes, inputs, and the calls whose outputs nodes have saved.
struct RematPlan {
    costs: Vec<u64>,
    bytes: Vec<usize>,
    inputs: Vec<Vec<usize>>,
    saved: Vec<bool>,
    /// The calls whose outputs a policy keeps already.
    keeps: Vec<bool>,
    /// The calls whose outputs can be kept.
    keepable: Vec<bool>,
}

/// A candidate of the search: the cost that keeping it saves for each byte, and its index.
#[derive(PartialEq)]
struct Candidate {
    saves: f64,
    call: usize,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.saves.total_cmp(&other.saves).then(other.call.cmp(&self.call))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl RematPlan {
    fn of(calls: &[LedgerCall]) -> Self {
        RematPlan {
            costs: calls
                .iter()
                .map(|call| call.call.flops.saturating_add(FLOPS_OF_A_BYTE * call.bytes as u64))
                .collect(),
            bytes: calls.iter().map(|call| call.bytes).collect(),
            inputs: calls.iter().map(|call| call.inputs.clone()).collect(),
            saved: calls.iter().map(|call| call.recipe.is_saved()).collect(),
            keeps: calls.iter().map(|call| call.call.keeps).collect(),
            keepable: calls.iter().map(|call| !call.call.shares_memory).collect(),
        }
    }

    /// The calls that backward repeats if these outputs are kept, and the kept outputs that it reads.
    fn needed(&self, kept: &[bool]) -> (Vec<bool>, Vec<bool>) {
        let (mut again, mut read) = (vec![false; kept.len()], vec![false; kept.len()]);
        let mut stack: Vec<usize> = (0..kept.len()).filter(|&call| self.saved[call]).collect();
        while let Some(call) = stack.pop() {
            if kept[call] {
                read[call] = true;
            } else if !std::mem::replace(&mut again[call], true) {
                stack.extend(&self.inputs[call]);
            }
        }
        (again, read)
    }

    fn cost(&self, kept: &[bool]) -> u64 {
        self.needed(kept).0.iter().zip(&self.costs).filter(|(again, _)| **again).map(|(_, cost)| cost).sum()
    }

    /// Outputs of at most `budget` bytes, chosen one by one: each saves the most cost for its bytes beside those before.
    fn within(&self, budget: usize) -> Vec<bool> {
        let mut kept = self.keeps.clone();
        let before: usize = kept.iter().zip(&self.bytes).filter(|(kept, _)| **kept).map(|(_, bytes)| bytes).sum();
        let mut left = budget.saturating_sub(before);
        let mut cost = self.cost(&kept);
        let saves = |call: usize, kept: &mut [bool], cost: u64| {
            kept[call] = true;
            let without = self.cost(kept);
            kept[call] = false;
            Candidate { saves: (cost - without) as f64 / self.bytes[call].max(1) as f64, call }
        };
        let mut heap: BinaryHeap<Candidate> = {
            let candidates = (0..kept.len()).filter(|&call| self.keepable[call] && !self.keeps[call]);
            candidates.map(|call| saves(call, &mut kept, cost)).collect()
        };
        while let Some(Candidate { call, .. }) = heap.pop() {
            if self.bytes[call] > left {
                continue;
            }
            // What was kept since may have made it worth less.
            let now = saves(call, &mut kept, cost);
            match heap.peek() {
                Some(next) if *next > now => heap.push(now),
                _ if now.saves > 0.0 => {
                    kept[call] = true;
                    left -= self.bytes[call];
                    cost = self.cost(&kept);
                }
                _ => {}
            }
        }
        kept
    }
}
