//! Outputs added to a choice one by one, while they fit the budget.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::plan::{Choice, RematPlan};

/// A candidate to keep: the cost that keeping it saves for each byte, and its index.
#[derive(PartialEq)]
struct Candidate {
    saves: f64,
    call: usize,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.saves.total_cmp(&other.saves).then(other.call.cmp(&self.call))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl RematPlan {
    /// A choice with more outputs within the budget, added one by one: each saves the most cost for its bytes.
    pub(super) fn filled(&self, choice: Choice, budget: u128) -> Choice {
        let mut filling = Filling::of(self, choice);
        let free = (0..self.costs.len()).filter(|&call| self.fixed[call].is_none());
        let mut heap: BinaryHeap<Candidate> = free.map(|call| filling.candidate(call)).collect();
        while let Some(Candidate { call, .. }) = heap.pop() {
            if filling.choice.bytes + self.bytes[call] as u128 > budget {
                continue;
            }
            // An output that was kept since may have made it worth less.
            let again = filling.candidate(call);
            match heap.peek() {
                Some(next) if *next > again => heap.push(again),
                _ if again.saves > 0.0 => filling.keep(call),
                _ => {}
            }
        }
        filling.choice
    }
}

/// A choice to which outputs are added.
struct Filling<'p> {
    plan: &'p RematPlan,
    choice: Choice,
    /// The number of reasons to compute each output: calls that are computed again and read it, and nodes.
    reasons: Vec<usize>,
}

impl<'p> Filling<'p> {
    fn of(plan: &'p RematPlan, choice: Choice) -> Self {
        let (again, _) = plan.needed(&choice.kept);
        let mut reasons: Vec<usize> = plan.saved.iter().map(|&saved| usize::from(saved)).collect();
        let repeated = again.iter().zip(&plan.inputs).filter(|(again, _)| **again);
        repeated.flat_map(|(_, inputs)| inputs).for_each(|&input| reasons[input] += 1);
        Filling { plan, choice, reasons }
    }

    /// Removes the reasons of a call that is kept, and returns the calls that are not computed again for it.
    fn spare(&mut self, call: usize) -> Vec<usize> {
        let computed = !self.choice.kept[call] && self.reasons[call] > 0;
        let mut spared = Vec::from_iter(computed.then_some(call));
        let mut done = 0;
        while let Some(&call) = spared.get(done) {
            for &input in &self.plan.inputs[call] {
                self.reasons[input] -= 1;
                if self.reasons[input] == 0 && !self.choice.kept[input] {
                    spared.push(input);
                }
            }
            done += 1;
        }
        spared
    }

    fn cost_of(&self, calls: &[usize]) -> u128 {
        calls.iter().map(|&call| self.plan.costs[call] as u128).sum()
    }

    fn candidate(&mut self, call: usize) -> Candidate {
        let spared = self.spare(call);
        spared.iter().flat_map(|&call| &self.plan.inputs[call]).for_each(|&input| self.reasons[input] += 1);
        Candidate { saves: self.cost_of(&spared) as f64 / self.plan.bytes[call].max(1) as f64, call }
    }

    fn keep(&mut self, call: usize) {
        let spared = self.spare(call);
        self.choice.cost -= self.cost_of(&spared);
        self.choice.bytes += self.plan.bytes[call] as u128;
        self.choice.kept[call] = true;
    }
}
