//! The search for the outputs to keep within a budget.
//!
//! A higher price of bytes keeps fewer of them. At some price two choices are the best, one within the budget and one
//! above it. They bound the cost of all others within the budget. The search goes on by branch and bound. An output
//! that only the second one keeps is kept in one branch and not in the other.

use super::plan::{Choice, Price, RematPlan};

/// The calls in all branches that the search looks into. Many parts of a few dozen calls need fewer.
const MOST_CALLS: usize = 1024;

/// The choices next to a budget: the best one within it at some price, and one above it that is as good at this price.
struct Neighbours {
    within: Choice,
    above: Option<Choice>,
}

impl RematPlan {
    /// The outputs to keep within a budget of bytes.
    pub(super) fn within(&self, budget: usize) -> Vec<bool> {
        let budget = budget as u128;
        let mut best = self.filled(self.least(&self.fixed), budget);
        let mut open = vec![self.fixed.clone()];
        for _ in 0..=MOST_CALLS / self.costs.len().max(1) {
            let Some(mut fixed) = open.pop() else { break };
            let Some(Neighbours { within, above }) = self.neighbours(&fixed, budget) else { continue };
            let Some(above) = above.filter(|above| could_be_less(&within, above, budget, best.cost)) else {
                best = least_of(best, within);
                continue;
            };
            best = least_of(best, self.filled(within.clone(), budget));
            let differ = (0..fixed.len()).filter(|&call| above.kept[call] && !within.kept[call]);
            let Some(call) = differ.max_by_key(|&call| (self.bytes[call], std::cmp::Reverse(call))) else { continue };
            for kept in [false, true] {
                fixed[call] = Some(kept);
                open.push(fixed.clone());
            }
        }
        best.kept
    }

    /// The choice that keeps what is fixed and nothing else.
    fn least(&self, fixed: &[Option<bool>]) -> Choice {
        self.choice(fixed.iter().map(|kept| *kept == Some(true)).collect())
    }

    /// The neighbours of a budget among the choices with these outputs fixed; none if all are above it.
    fn neighbours(&self, fixed: &[Option<bool>], budget: u128) -> Option<Neighbours> {
        let mut within = self.least(fixed);
        if within.bytes > budget {
            return None;
        }
        // All bytes together are worth less than cost 1: of the choices that cost the least, that of the fewest bytes.
        let all: u128 = self.bytes.iter().map(|&bytes| bytes as u128).sum();
        let mut above = self.cheapest(Price { cost: 1, bytes: all + 1 }, fixed);
        while above.bytes > budget {
            let price = price_between(&within, &above);
            let between = self.cheapest(price, fixed);
            if price.of(between.bytes, between.cost) >= price.of(within.bytes, within.cost) {
                return Some(Neighbours { within, above: Some(above) });
            }
            match between.bytes <= budget {
                true => within = between,
                false => above = between,
            }
        }
        Some(Neighbours { within: above, above: None })
    }
}

fn least_of(one: Choice, other: Choice) -> Choice {
    if (other.cost, other.bytes) < (one.cost, one.bytes) { other } else { one }
}

/// The price at which two choices are worth the same.
fn price_between(fewer: &Choice, more: &Choice) -> Price {
    Price { cost: fewer.cost - more.cost, bytes: more.bytes - fewer.bytes }
}

/// Tells whether a choice within the budget could cost less than `best`, which two neighbours of the budget bound.
fn could_be_less(within: &Choice, above: &Choice, budget: u128, best: u128) -> bool {
    let price = price_between(within, above);
    best > 0 && price.of(within.bytes, within.cost) <= price.of(budget, best - 1)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use numcore::{
        DType, NullRuntime, Result, Tensor,
        fused::NnOps,
        ops::{Apply, MatmulOps, PointwiseOps, ViewOps},
    };

    use super::*;
    use crate::{
        Var,
        checkpoint::Keep,
        ledger::{Ledger, plan_of},
        rematerialize::in_scope,
    };

    const WIDTH: usize = 32;

    /// The forward pass of a pre-norm decoder block on `x: [B, T, C]`.
    fn block(x: &Var<NullRuntime>) -> Result<Var<NullRuntime>> {
        let weight =
            |rows: usize, columns: usize| Var::leaf("w", Tensor::zeros(x.runtime(), [rows, columns], DType::F32)?);
        let [batch, length, _] = *x.dims() else { panic!("needs [B, T, C]") };
        let qkv = x.layer_norm(None, None, 1e-5)?.matmul(&weight(WIDTH, 3 * WIDTH)?)?;
        let heads = |at: usize| {
            let part = qkv.narrow(-1, at * WIDTH, WIDTH)?;
            part.reshape([batch, length, 4, WIDTH / 4])?.permute(&[0, 2, 1, 3])
        };
        let found = heads(0)?.causal_attention(&heads(1)?, &heads(2)?)?;
        let found = found.permute(&[0, 2, 1, 3])?.reshape([batch, length, WIDTH])?;
        let x = found.matmul(&weight(WIDTH, WIDTH)?)?.add(x)?;
        let wide = x.layer_norm(None, None, 1e-5)?.matmul(&weight(WIDTH, 4 * WIDTH)?)?.gelu()?;
        wide.matmul(&weight(4 * WIDTH, WIDTH)?)?.add(&x)
    }

    /// The plan of a scope that runs this number of blocks in turn.
    fn recorded(blocks: usize) -> RematPlan {
        let rt = NullRuntime::new();
        let x = Var::leaf("x", Tensor::zeros(&rt, [2, 16, WIDTH], DType::F32).unwrap()).unwrap();
        let ledger = Rc::new(Ledger::new(Some(0)));
        let keep = Keep { calls: None, ledger: Some(ledger.clone()) };
        let _y = in_scope(keep, || (0..blocks).try_fold(x, |h, _| block(&h))).unwrap();
        plan_of(&ledger.state.borrow().calls)
    }

    /// A graph with views, a policy's outputs, and calls of which some cost much for few bytes.
    fn random(seed: u64, calls: usize) -> RematPlan {
        let mut state = seed;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        let mut plan = RematPlan::default();
        for call in 0..calls {
            let fixed = [None, None, None, None, None, None, Some(false), Some(true)][below(8)];
            let bytes = 1 + below(9);
            plan.bytes.push(if fixed.is_none() { bytes } else { 0 });
            plan.costs.push((below(4) * bytes + below(3)) as u64);
            plan.inputs.push((0..below(3).min(call)).map(|_| call - 1 - below(call.min(4))).collect());
            plan.saved.push(below(2) == 0);
            plan.fixed.push(fixed);
        }
        plan
    }

    /// The least cost within each budget up to all bytes, by trying every choice.
    fn exhaustive(plan: &RematPlan) -> Vec<u128> {
        let free: Vec<usize> = (0..plan.fixed.len()).filter(|&call| plan.fixed[call].is_none()).collect();
        let choices = (0..1_u64 << free.len()).map(|bits| {
            let mut kept = plan.least(&plan.fixed).kept;
            free.iter().enumerate().for_each(|(bit, &call)| kept[call] = bits >> bit & 1 == 1);
            plan.choice(kept)
        });
        let mut least = vec![u128::MAX; plan.bytes.iter().sum::<usize>() + 1];
        choices.for_each(|choice| least[choice.bytes as usize] = least[choice.bytes as usize].min(choice.cost));
        (1..least.len()).for_each(|budget| least[budget] = least[budget].min(least[budget - 1]));
        least
    }

    fn within(plan: &RematPlan, budget: usize) -> Choice {
        let choice = plan.choice(plan.within(budget));
        assert!(choice.bytes <= budget as u128, "{} of {budget}", choice.bytes);
        choice
    }

    #[test]
    fn small_graphs_have_the_best_choice() {
        for seed in 0..300 {
            let plan = random(seed, 12);
            for (budget, least) in exhaustive(&plan).into_iter().enumerate() {
                assert_eq!(within(&plan, budget).cost, least, "seed {seed}, budget {budget}");
            }
        }
    }

    #[test]
    fn a_block_has_the_best_choice() {
        let plan = recorded(1);
        let least = exhaustive(&plan);
        let mut better = 0;
        for budget in (0..least.len()).step_by(512) {
            let (choice, greedy) = (within(&plan, budget), plan.filled(plan.least(&plan.fixed), budget as u128));
            assert_eq!(choice.cost, least[budget], "budget {budget}");
            better += usize::from(choice.cost < greedy.cost);
        }
        println!("better than one by one at {better} of {} budgets", least.len().div_ceil(512));
        assert!(better > 0);
    }

    /// A large part has no more bytes than the budget, and a cost between the bound and that of adding one by one.
    #[test]
    fn many_blocks_are_no_worse_than_one_by_one() {
        let plan = recorded(6);
        let all: usize = plan.bytes.iter().sum();
        for budget in (0..=all).step_by(all / 24) {
            let (choice, greedy) = (within(&plan, budget), plan.filled(plan.least(&plan.fixed), budget as u128));
            let bound = plan.neighbours(&plan.fixed, budget as u128).unwrap();
            let bound = match &bound.above {
                None => bound.within.cost as f64,
                Some(above) => {
                    let share =
                        (budget as u128 - bound.within.bytes) as f64 / (above.bytes - bound.within.bytes) as f64;
                    bound.within.cost as f64 + share * (above.cost as f64 - bound.within.cost as f64)
                }
            };
            println!("{budget}: {} greedy {} bound {bound}", choice.cost, greedy.cost);
            assert!(choice.cost <= greedy.cost && choice.cost as f64 >= bound, "budget {budget}");
        }
    }
}
