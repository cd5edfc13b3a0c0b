//! Text as numbers: its characters, and batches of it.

use std::path::Path;

use weftgrad::{AnyRuntime, Result, Tensor, Var, rng::Philox};

use crate::{Outcome, prose};

/// The documents whose sentences are learned when no file is given.
const DOCUMENTS: &[&str] = &[
    include_str!("../../README.md"),
    include_str!("../../ARCHITECTURE.md"),
    include_str!("../../CONTRIBUTING.md"),
    include_str!("../../docs/many-ranks.md"),
    include_str!("../../record/2026-11-21-past-pytorch.md"),
    include_str!("../../record/2026-11-22-between.md"),
    include_str!("../../record/2026-11-22-halves.md"),
    include_str!("../../record/2026-11-22-one-loop.md"),
    include_str!("../../record/2026-11-22-pairs.md"),
    include_str!("../../record/2026-11-22-pieces.md"),
    include_str!("../../record/2026-11-22-shares.md"),
];

/// The sources whose comments are.
const SOURCES: &[&str] = &[
    include_str!("../../numcore/src/error.rs"),
    include_str!("../../numcore/src/layout.rs"),
    include_str!("../../numcore/src/runtime.rs"),
    include_str!("../../numcore/src/shape.rs"),
    include_str!("../../numcore/src/flat.rs"),
    include_str!("../../numcore/src/ops/view.rs"),
    include_str!("../../numcore/src/ops/reduce.rs"),
    include_str!("../../numcore/src/pointwise/mod.rs"),
    include_str!("../../numcore/src/fused/attention.rs"),
    include_str!("../../numcore/src/fused/norm.rs"),
    include_str!("../../autograd/src/sweep.rs"),
    include_str!("../../autograd/src/leaf.rs"),
    include_str!("../../nn/src/module_ext.rs"),
    include_str!("../../optim/src/optimizer.rs"),
    include_str!("../../optim/src/params.rs"),
];

/// A text as numbers of its vocabulary, nine tenths to train on and one to validate.
pub struct Corpus {
    /// The characters of the text, in order.
    pub vocabulary: Vec<char>,
    tokens: Vec<i64>,
}

/// Which part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The first nine tenths.
    Train,
    /// The rest.
    Validation,
}

impl Corpus {
    /// The text of a file, or the workspace's own prose.
    pub fn read(path: Option<&Path>) -> Outcome<Corpus> {
        let text = read(path)?;
        let mut vocabulary: Vec<char> = text.chars().collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        let tokens = text.chars().filter_map(|c| vocabulary.binary_search(&c).ok()).map(|i| i as i64).collect();
        Ok(Corpus { vocabulary, tokens })
    }

    /// The tokens of a part; an error if it is too short for one sequence.
    pub fn part(&self, part: Part, context: usize) -> Outcome<&[i64]> {
        let (train, validation) = self.tokens.split_at(self.tokens.len() / 10 * 9);
        let tokens = if part == Part::Train { train } else { validation };
        if tokens.len() < context + 2 {
            let n = tokens.len();
            return Err(format!(
                "the text is too short: its {part:?} part has {n} characters, a sequence takes {context}"
            )
            .into());
        }
        Ok(tokens)
    }

    /// The number of a character.
    pub fn token(&self, c: char) -> Option<i64> {
        self.vocabulary.binary_search(&c).ok().map(|i| i as i64)
    }
}

/// The text of a file, or the workspace's own prose.
pub fn read(path: Option<&Path>) -> Outcome<String> {
    let Some(path) = path else { return Ok(own()) };
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(String::from_utf8(bytes).map_err(|e| format!("{}: not UTF-8 text ({e})", path.display()))?)
}

/// The workspace's prose.
fn own() -> String {
    let documents = DOCUMENTS.iter().map(|text| prose::of_markdown(text));
    documents.chain(SOURCES.iter().map(|text| prose::of_rust(text))).collect()
}

/// Inputs `[B, T]` and the characters that follow each, `[B · T]`.
pub struct Batch {
    /// Inputs.
    pub x: Var<AnyRuntime>,
    /// What follows.
    pub y: Var<AnyRuntime>,
}

impl Batch {
    /// The sequences that begin at these places.
    pub fn at(rt: &AnyRuntime, tokens: &[i64], starts: &[usize], context: usize) -> Result<Batch> {
        let take = |shift: usize| -> Vec<i64> {
            starts.iter().flat_map(|&s| &tokens[s + shift..s + shift + context]).copied().collect()
        };
        Ok(Batch {
            x: Var::new(Tensor::from_slice(rt, [starts.len(), context], &take(0))?),
            y: Var::new(Tensor::from_slice(rt, [starts.len() * context], &take(1))?),
        })
    }

    /// The batch of a step: a function of the seed and the step alone, so that a resumed run sees the same.
    pub fn random(
        rt: &AnyRuntime,
        tokens: &[i64],
        batch: usize,
        context: usize,
        seed: u64,
        step: u64,
    ) -> Result<Batch> {
        let mut rng = Philox::new(seed.wrapping_add(step.wrapping_mul(0x9E37_79B9_7F4A_7C15)), 7);
        let last = (tokens.len() - context - 1) as u64;
        let starts: Vec<usize> = (0..batch).map(|_| rng.below(last) as usize).collect();
        Self::at(rt, tokens, &starts, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_text_is_prose() {
        let text = own();
        let share = |keep: fn(&char) -> bool| text.chars().filter(keep).count() as f64 / text.len() as f64;
        assert!(text.len() > 60_000, "{} characters", text.len());
        assert!(share(|c| c.is_ascii_lowercase()) > 0.7);
        assert!(share(|c| *c == ' ') < 0.2);
        assert!(!text.contains("  ") && !text.contains("\n\n") && !text.contains(['|', '`']));
        assert!(Corpus::read(None).unwrap().vocabulary.len() < 80);
    }
}
