//! Which tokens of a conversation are an assistant's.

use std::ops::Range;

use data::sources::Tokenizer;
use numcore::{Error, Result};

use super::{ChatExample, ChatTemplate, Conversation};

impl ChatTemplate {
    /// The tokens of a conversation; of each assistant's message what it said and the end of its turn are marked as learned.
    ///
    /// Where a message begins and ends is found by rendering the conversation up to it, so any template will do whose text of the first messages
    /// does not depend on those after them.
    ///
    /// # Errors
    /// If the template fails, is not of that kind, or the text cannot be encoded.
    pub fn encode(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<ChatExample> {
        let text = self.render(conversation, false)?;
        let answers = (0..conversation.len()).filter(|&at| conversation.is_assistant(at));
        let spans = answers.map(|at| self.span(conversation, at, &text)).collect::<Result<Vec<_>>>()?;
        // The template has written what begins a text already.
        let encoded = tokenizer.encode_with_offsets(&text)?;
        let learned = |place: &Range<usize>| {
            spans.iter().any(|span| span.contains(&place.start) && place.end <= span.end && !place.is_empty())
        };
        let (tokens, learned) = encoded.iter().map(|(token, place)| (*token, learned(place))).unzip();
        Ok(ChatExample { tokens, learned })
    }

    /// Where an assistant's message stands in the text of the whole conversation. Whitespace after the end of its turn is the template's.
    fn span(&self, conversation: &Conversation, at: usize, text: &str) -> Result<Range<usize>> {
        let before = self.render(&conversation.first(at), true)?;
        let with = self.render(&conversation.first(at + 1), false)?;
        if !text.starts_with(&*with) || !with.starts_with(&*before) {
            let why = format!(
                "its text of the first {} messages is not what the whole conversation begins with, so what the assistant said cannot be told apart",
                at + 1
            );
            return Err(Error::format("the chat template", why));
        }
        Ok(before.len()..with.trim_end().len().max(before.len()))
    }
}
