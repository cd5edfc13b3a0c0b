//! The mask of an assistant's tokens in a conversation.

use std::ops::Range;

use data::sources::Tokenizer;
use numcore::{Error, Result, Within};

use super::{ChatExample, ChatTemplate, Conversation};

impl ChatTemplate {
    /// Encodes a conversation to tokens. In each assistant's message, the content and the end of the turn are marked as
    /// learned.
    ///
    /// A message's place is found by rendering the conversation up to it. Any template works whose text of the first
    /// messages does not depend on later ones.
    ///
    /// # Errors
    /// Fails if the template fails or is not of that kind, or the text cannot be encoded.
    #[track_caller]
    pub fn encode(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<ChatExample> {
        let text = self.render(conversation, false)?;
        let answers = (0..conversation.len()).filter(|&at| conversation.is_assistant(at));
        let spans = answers.map(|at| self.span(conversation, at, &text)).collect::<Result<Vec<_>>>().at_caller()?;
        // The template has already written the token that begins a text.
        let encoded = tokenizer.encode_with_offsets(&text)?;
        let learned = |place: &Range<usize>| {
            spans.iter().any(|span| span.contains(&place.start) && place.end <= span.end && !place.is_empty())
        };
        let (tokens, learned) = encoded.iter().map(|(token, place)| (*token, learned(place))).unzip();
        Ok(ChatExample { tokens, learned })
    }

    /// The place of an assistant's message in the text of the full conversation. Whitespace after the end of its turn
    /// is not part of it.
    fn span(&self, conversation: &Conversation, at: usize, text: &str) -> Result<Range<usize>> {
        let before = self.render(&conversation.first(at), true)?;
        let with = self.render(&conversation.first(at + 1), false)?;
        if !text.starts_with(&*with) || !with.starts_with(&*before) {
            let why = format!(
                "its text of the first {} messages is no prefix of the whole conversation's, so the assistant's tokens cannot be located",
                at + 1
            );
            return Err(Error::format("the chat template", why));
        }
        Ok(before.len()..with.trim_end().len().max(before.len()))
    }
}
