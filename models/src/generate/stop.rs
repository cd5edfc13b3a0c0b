//! When a text ends.

use numcore::Result;

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It has as many tokens as were allowed, or as the model has positions for.
    Length,
    /// A token ended it.
    End,
    /// A stop text is in it.
    Text,
}

/// Texts that end a continuation once they are in it, and how tokens are read.
pub struct StopTexts<'a> {
    /// The texts.
    pub stop_strings: &'a [&'a str],
    /// The text of tokens: a tokenizer's `decode`.
    pub decode: &'a dyn Fn(&[u32]) -> Result<String>,
}

impl StopTexts<'_> {
    /// Whether the text of the new tokens has one of these. Only the end is decoded: as many tokens as the longest text has bytes, since no
    /// token is less than a byte, and some for characters of several.
    pub(super) fn reached(&self, new: &[u32]) -> Result<Option<FinishReason>> {
        let longest = self.stop_strings.iter().map(|text| text.len()).max().unwrap_or(0);
        let end = &new[new.len().saturating_sub(longest + 4)..];
        let text = (self.decode)(end)?;
        let found = self.stop_strings.iter().any(|stop| !stop.is_empty() && text.contains(stop));
        Ok(found.then_some(FinishReason::Text))
    }
}
