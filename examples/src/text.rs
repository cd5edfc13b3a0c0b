//! Text as sequences of characters, and a GPT's loss on them.

use std::path::Path;

use weftgrad::{
    AnyRuntime,
    data::{
        Batch, Loader,
        sources::Characters,
        tokens::{TokenWindows, next_tokens},
    },
    distributed::train::Loss,
    fused::{CrossEntropyOptions, Reduction},
    nn::{Gpt, parallel::VocabularyLoss},
    prelude::*,
};

use crate::{Outcome, prose};

/// The documents to learn if no file is given.
const DOCUMENTS: &[&str] = &[
    include_str!("../../README.md"),
    include_str!("../../ARCHITECTURE.md"),
    include_str!("../../CONTRIBUTING.md"),
    include_str!("../../docs/book/src/many-ranks.md"),
    include_str!("../../record/2026-11-21-past-pytorch.md"),
    include_str!("../../record/2026-11-22-between.md"),
    include_str!("../../record/2026-11-22-halves.md"),
    include_str!("../../record/2026-11-22-one-loop.md"),
    include_str!("../../record/2026-11-22-pairs.md"),
    include_str!("../../record/2026-11-22-pieces.md"),
    include_str!("../../record/2026-11-22-shares.md"),
];

/// The sources whose comments are learned too.
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

/// A text as tokens of its characters: nine tenths to train on and one to validate.
pub struct Corpus {
    /// The characters that occur in the text.
    pub characters: Characters,
    tokens: Vec<u32>,
}

/// A part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The first nine tenths.
    Train,
    /// The last tenth.
    Validation,
}

/// Inputs `[B, T]` and targets `[B, T]`; a target is the next character.
pub type Sequences = (Tensor<AnyRuntime>, Tensor<AnyRuntime>);

impl Corpus {
    /// The text of a file, or the workspace's own prose.
    pub fn read(path: Option<&Path>) -> Outcome<Corpus> {
        let text = read(path)?;
        let characters = Characters::of(&text);
        let tokens = characters.encode(&text)?;
        Ok(Corpus { characters, tokens })
    }

    /// The tokens of a part; an error if it is too short for one sequence.
    pub fn part(&self, part: Part, context: usize) -> Outcome<&[u32]> {
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
}

/// Batches of the sequences of `context` tokens that begin every `stride` tokens.
pub fn sequences(rt: &AnyRuntime, tokens: &[u32], context: usize, stride: usize) -> Result<Loader<Sequences>> {
    let windows = TokenWindows::new(tokens.to_vec(), context)?.stride(stride)?;
    Ok(Loader::new(windows).collate(next_tokens).on(rt))
}

/// The loss of a rank's share of a batch: the sum over its tokens, and their number.
pub fn loss(model: &Gpt<AnyRuntime>, batch: &Batch<Sequences>) -> Result<Loss<AnyRuntime>> {
    let (x, y) = (Var::new(batch.data.0.clone()), Var::new(batch.data.1.clone()));
    let sum = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let loss = model.next_token_loss(&x, &y, &VocabularyLoss { cross_entropy: sum, ..Default::default() })?;
    Loss::sum(loss, x.spec().shape.numel() as f64)
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
        assert!(Corpus::read(None).unwrap().characters.len() < 80);
    }
}
