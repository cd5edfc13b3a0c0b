//! Conditions that end a text.

use numcore::Result;

/// The reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The text has as many tokens as were allowed, or as the model has positions for.
    Length,
    /// The last token is one of `eos_token_ids`.
    End,
    /// The text contains a stop text.
    Text,
}

/// Stop texts, which end a continuation that contains one, and the decoder of tokens.
pub struct StopTexts<'a> {
    /// The stop texts.
    pub stop_strings: &'a [&'a str],
    /// The text of tokens: a tokenizer's `decode`.
    pub decode: &'a dyn Fn(&[u32]) -> Result<String>,
}

impl StopTexts<'_> {
    /// Finds a stop text at the end of the new tokens. It decodes as many tokens as the longest stop text has bytes,
    /// since no token is less than a byte. It adds 4 tokens for characters of several bytes.
    pub(super) fn reached(&self, new: &[u32]) -> Result<Option<FinishReason>> {
        let longest = self.stop_strings.iter().map(|text| text.len()).max().unwrap_or(0);
        let end = &new[new.len().saturating_sub(longest + 4)..];
        let text = (self.decode)(end)?;
        let found = self.stop_strings.iter().any(|stop| !stop.is_empty() && text.contains(stop));
        Ok(found.then_some(FinishReason::Text))
    }
}
