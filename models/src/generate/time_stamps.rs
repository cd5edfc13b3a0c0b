//! Rules of time stamps in texts of speech.

use super::processors::softmax;

/// The rules by which Whisper's texts have time stamps (Radford et al. 2022). A text begins with a time stamp, and
/// later time stamps come in pairs, which end one segment and begin the next. No time stamp is before another. One is
/// chosen where all time stamps together are likelier than any token of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeStampRules {
    /// The first time stamp; all later tokens are time stamps too, and the one before it says that a text has none.
    pub first: u32,
    /// The token that ends a text, which all tokens of text come before.
    pub end: u32,
    /// The latest time stamp that a text begins with, counted from the first; any if `None`.
    pub latest_begin: Option<u32>,
}

impl TimeStampRules {
    /// Leaves out the tokens that may not follow `new`.
    pub(super) fn apply(self, scores: &mut [f32], new: &[u32]) {
        let [first, end] = [self.first, self.end].map(|token| (token as usize).min(scores.len()));
        let leave_out = |scores: &mut [f32]| scores.fill(f32::NEG_INFINITY);
        let none = self.first.checked_sub(1).and_then(|none| scores.get_mut(none as usize));
        none.into_iter().for_each(|score| *score = f32::NEG_INFINITY);
        let is_stamp = |token: &&u32| **token >= self.first;
        let last = new.iter().rfind(is_stamp);
        let is_last = new.last().filter(is_stamp).is_some();
        // A single time stamp at the beginning is as the second of a pair.
        let in_pair = new.len() < 2 || new.get(new.len() - 2).filter(is_stamp).is_some();
        match (is_last, in_pair) {
            (true, true) => leave_out(&mut scores[first..]),
            (true, false) => leave_out(&mut scores[..end]),
            (false, _) => {}
        }
        if let Some(&last) = last {
            // The second of a pair may equal the first.
            let least = last as usize + usize::from(!is_last);
            let least = least.clamp(first, scores.len());
            leave_out(&mut scores[first..least]);
        }
        if new.is_empty() {
            leave_out(&mut scores[..first]);
            if let Some(latest) = self.latest_begin {
                let after = first.saturating_add(latest as usize).saturating_add(1).min(scores.len());
                leave_out(&mut scores[after..]);
            }
        }
        let probabilities = softmax(scores);
        let (texts, stamps) = probabilities.split_at(first);
        if stamps.iter().sum::<f64>() > texts.iter().copied().fold(0.0, f64::max) {
            leave_out(&mut scores[..first]);
        }
    }
}
