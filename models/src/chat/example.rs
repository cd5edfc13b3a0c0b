//! Conversations as tokens, and several in a row.

use data::pack::{PackedRow, first_fit};
use numcore::{Error, Result, Within};

/// The tokens of a conversation, and a mask of the assistant's tokens, the only ones that are learned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatExample {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// True for the assistant's tokens, the end of a turn included.
    pub learned: Vec<bool>,
}

impl ChatExample {
    /// The target of each token: the next token if it is learned, otherwise −100, which cross-entropy ignores.
    pub fn targets(&self) -> Vec<i64> {
        let next = self.tokens.iter().zip(&self.learned).skip(1);
        let target = |(&token, &learned): (&u32, &bool)| if learned { i64::from(token) } else { -100 };
        let last = (!self.tokens.is_empty()).then_some(-100);
        next.map(target).chain(last).collect()
    }
}

/// Packs conversations in rows of `context` tokens, several to a row, each in the first open row with room. Longer ones
/// are cut at the end. A target that is not learned has a weight of 0.
///
/// # Errors
/// Fails if the context is 0, or an example has not as many marks as tokens.
#[track_caller]
pub fn pack_examples(examples: &[ChatExample], context: usize) -> Result<Vec<PackedRow>> {
    if context == 0 {
        return Err(Error::range("pack_examples", "context", context, "at least 1 to hold a conversation")).at_caller();
    }
    if let Some(at) = examples.iter().position(|e| e.tokens.len() != e.learned.len()) {
        let why = format!("example {at} has not one mark for each token");
        return Err(Error::lengths("pack_examples", &[examples[at].tokens.len(), examples[at].learned.len()], why))
            .at_caller();
    }
    let lengths: Vec<usize> = examples.iter().map(|e| e.tokens.len().min(context)).collect();
    let rows = first_fit(&lengths, context, 64)?;
    Ok(rows.iter().map(|members| row(members.iter().map(|&i| &examples[i]), context)).collect())
}

fn row<'a>(members: impl Iterator<Item = &'a ChatExample>, context: usize) -> PackedRow {
    let mut row = PackedRow::default();
    for (segment, example) in members.enumerate() {
        let targets = example.targets();
        for (at, &token) in example.tokens.iter().enumerate().take(context) {
            row.tokens.push(token);
            row.targets.push(u32::try_from(targets[at]).unwrap_or(0));
            row.positions.push(at as u32);
            row.segments.push(segment as u32 + 1);
            row.weights.push(if targets[at] >= 0 { 1.0 } else { 0.0 });
        }
    }
    for list in [&mut row.tokens, &mut row.targets, &mut row.positions, &mut row.segments] {
        list.resize(context, 0);
    }
    row.weights.resize(context, 0.0);
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(tokens: &[u32], learned: &[u8]) -> ChatExample {
        ChatExample { tokens: tokens.into(), learned: learned.iter().map(|&b| b == 1).collect() }
    }

    #[test]
    fn only_learned_tokens_are_targets() {
        assert_eq!(example(&[5, 6, 7, 8], &[0, 0, 1, 1]).targets(), [-100, 7, 8, -100]);
        assert_eq!(example(&[5], &[1]).targets(), [-100]);
        assert_eq!(example(&[], &[]).targets(), [0i64; 0]);
    }

    #[test]
    fn conversations_share_rows_and_keep_their_marks() {
        let examples = [example(&[1, 2, 3], &[0, 1, 1]), example(&[4; 9], &[1; 9]), example(&[6, 7], &[0, 1])];
        let rows = pack_examples(&examples, 6).unwrap();
        assert_eq!(rows.len(), 2);
        let both = rows.iter().find(|row| row.tokens[0] == 1).unwrap();
        assert_eq!(both.tokens, [1, 2, 3, 6, 7, 0]);
        assert_eq!(both.targets, [2, 3, 0, 7, 0, 0]);
        assert_eq!(both.segments, [1, 1, 1, 2, 2, 0]);
        assert_eq!(both.positions, [0, 1, 2, 0, 1, 0]);
        assert_eq!(both.weights, [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
        let cut = rows.iter().find(|row| row.tokens[0] == 4).unwrap();
        assert_eq!(cut.weights, [1.0; 6]);
        assert!(pack_examples(&examples, 0).is_err());
        assert!(pack_examples(&[example(&[1], &[])], 4).is_err());
    }
}
