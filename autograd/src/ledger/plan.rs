//! The choice of outputs to keep at a price of bytes: a minimal cut.
//!
//! Two questions about a call are whether backward needs its outputs, and whether it computes them again. A call that
//! is needed and not computed again costs bytes. One that is computed again costs time, and needs its inputs. So the
//! graph has two nodes for each call, "needed" and "again", on the source's side of the cut if the answer is yes. The
//! edge from the first to the second has the price of the call's bytes, that from the second to the sink its cost.
//! Edges from "again" to "needed" of each input have no limit, so the cut does not part them.

use super::cut::FlowGraph;

/// The calls of a scope as a graph.
#[derive(Clone, Default, PartialEq)]
pub(super) struct RematPlan {
    /// The cost of computing a call again.
    pub(super) costs: Vec<u64>,
    /// The bytes of a call's outputs that count in the budget.
    pub(super) bytes: Vec<usize>,
    /// The calls whose outputs a call reads.
    pub(super) inputs: Vec<Vec<usize>>,
    /// The calls whose outputs nodes have saved.
    pub(super) saved: Vec<bool>,
    /// True for outputs that are kept in any case, false for those that cannot be kept.
    pub(super) fixed: Vec<Option<bool>>,
}

/// Outputs to keep, with their bytes and the cost of computing the others again.
#[derive(Clone)]
pub(super) struct Choice {
    pub(super) kept: Vec<bool>,
    pub(super) bytes: u128,
    pub(super) cost: u128,
}

/// The price of kept bytes: `cost` for `bytes`.
#[derive(Clone, Copy)]
pub(super) struct Price {
    pub(super) cost: u128,
    pub(super) bytes: u128,
}

impl Price {
    /// The worth of a choice, in units in which a byte costs `cost`, and cost 1 costs `bytes`.
    pub(super) fn of(self, bytes: u128, cost: u128) -> u128 {
        self.cost.saturating_mul(bytes).saturating_add(self.bytes.saturating_mul(cost))
    }
}

impl RematPlan {
    /// The calls that backward repeats if these outputs are kept, and the kept outputs that it reads.
    pub(super) fn needed(&self, kept: &[bool]) -> (Vec<bool>, Vec<bool>) {
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

    pub(super) fn choice(&self, kept: Vec<bool>) -> Choice {
        let (again, _) = self.needed(&kept);
        let of = |which: &[bool], what: &dyn Fn(usize) -> u128| {
            which.iter().enumerate().filter(|(_, is)| **is).map(|(call, _)| what(call)).sum()
        };
        let bytes = of(&kept, &|call| self.bytes[call] as u128);
        Choice { bytes, cost: of(&again, &|call| self.costs[call] as u128), kept }
    }

    /// The choice of the least worth at a price, among those with these outputs fixed.
    pub(super) fn cheapest(&self, price: Price, fixed: &[Option<bool>]) -> Choice {
        let calls = 0..self.costs.len();
        let needed = |call: usize| if self.saved[call] { FlowGraph::SOURCE } else { 2 + 2 * call };
        let again = |call: usize| 3 + 2 * call;
        let mut graph = FlowGraph::new(2 + 2 * calls.len());
        for call in calls.clone() {
            let to_keep = match fixed[call] {
                Some(true) => 0,
                Some(false) => u128::MAX,
                None => price.of(self.bytes[call] as u128, 0),
            };
            graph.connect(needed(call), again(call), to_keep);
            graph.connect(again(call), FlowGraph::SINK, price.of(0, self.costs[call] as u128));
            for &input in self.inputs[call].iter().filter(|&&input| !self.saved[input]) {
                graph.connect(again(call), needed(input), u128::MAX);
            }
        }
        let cut = graph.cut();
        let keeps = |call: usize| fixed[call].unwrap_or(cut[needed(call)] && !cut[again(call)]);
        self.choice(calls.map(keeps).collect())
    }
}
