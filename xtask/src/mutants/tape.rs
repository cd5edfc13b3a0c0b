//! The changes of the tape that a test must notice.

use super::Mutant;

const CHECKPOINTS: &[&str] =
    &["test", "-p", "weftgrad-autograd", "--test", "all", "--", "checkpoints", "budgets", "recomputed"];
const LEDGER: &[&str] = &["test", "-p", "weftgrad-autograd", "--lib", "--", "ledger"];

#[rustfmt::skip]
pub(super) const TAPE: &[Mutant] = &[
    Mutant { file: "autograd/src/rematerialize.rs", from: "if outermost() == Some(*number) => recipe.upgrade(),", to: "=> recipe.upgrade().filter(|_| *number > 0),", test: CHECKPOINTS },
    Mutant { file: "autograd/src/recipe.rs", from: "let done = if remade.keeps_graph { None } else { state.inputs.take() };", to: "let done = state.inputs.take();", test: CHECKPOINTS },
    Mutant { file: "autograd/src/recipe.rs", from: "self.recipes.iter().for_each(|recipe| recipe.state.lock().outputs = None);", to: "", test: CHECKPOINTS },
    Mutant { file: "autograd/src/recipe.rs", from: "context.run(|| with_grad(|| function.forward(&values)))?", to: "function.forward(&values)?", test: CHECKPOINTS },
    Mutant { file: "autograd/src/ledger/plan.rs", from: "if kept[call] {\n                read[call] = true;", to: "if kept[call] {", test: CHECKPOINTS },
    Mutant { file: "autograd/src/ledger/mod.rs", from: "held[input] = true", to: "held[input] |= false", test: CHECKPOINTS },
    Mutant { file: "autograd/src/ledger/plan.rs", from: "Some(false) => u128::MAX,", to: "Some(false) => 0,", test: LEDGER },
    Mutant { file: "autograd/src/ledger/cut.rs", from: "self.edges[edge ^ 1].left += flow;", to: "", test: LEDGER },
    Mutant { file: "autograd/src/ledger/search.rs", from: "price.of(budget, best - 1)", to: "price.of(budget, best * 9 / 10)", test: LEDGER },
];
