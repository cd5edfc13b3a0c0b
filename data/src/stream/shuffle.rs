//! Streams in a random order, block by block.

use numcore::{Error, Result};

use super::{Stream, StreamState};
use crate::random::keyed;

/// A stream shuffled within each block: [`Stream::shuffle`].
///
/// A shuffle buffer that is refilled as it is emptied mixes slightly further, but its state is its contents. The state
/// of a block is its start, its number, and the number of its examples taken.
pub struct ShuffledStream<S: Stream> {
    inner: S,
    size: usize,
    seed: u64,
    /// The state of the inner stream at the start of the block.
    start: StreamState,
    number: u64,
    /// The examples left in the block, the next one last.
    left: Vec<Result<S::Example>>,
    taken: u64,
}

impl<S: Stream> ShuffledStream<S> {
    pub(super) fn new(inner: S, size: usize, seed: u64) -> Self {
        let start = inner.state();
        ShuffledStream { inner, size: size.max(1), seed, start, number: 0, left: Vec::new(), taken: 0 }
    }

    /// Reads the block that begins at the inner stream's state.
    fn fill(&mut self) {
        self.start = self.inner.state();
        self.taken = 0;
        self.left = std::iter::from_fn(|| self.inner.next()).take(self.size).collect();
        keyed(self.seed, 0, self.number).shuffle(&mut self.left);
    }
}

impl<S> Stream for ShuffledStream<S>
where
    S: Stream,
    S::Example: Send,
{
    type Example = S::Example;

    fn next(&mut self) -> Option<Result<S::Example>> {
        if self.left.is_empty() {
            self.number += u64::from(self.taken > 0);
            self.fill();
        }
        let example = self.left.pop()?;
        self.taken += 1;
        Some(example)
    }

    fn state(&self) -> StreamState {
        let mut integers = self.start.0.clone();
        integers.extend([self.number, self.taken]);
        StreamState(integers)
    }

    fn restore(&mut self, state: &StreamState) -> Result<()> {
        let wrong = |why: &str| Error::format("ShuffledStream::restore", format!("`{state}` {why}"));
        let [start @ .., number, taken] = state.0.as_slice() else {
            return Err(wrong("is no state of a shuffled stream: that has at least two integers"));
        };
        self.inner.restore(&StreamState(start.to_vec()))?;
        self.number = *number;
        self.fill();
        if *taken > self.left.len() as u64 {
            return Err(wrong("has more examples of its block than there are"));
        }
        self.left.truncate(self.left.len() - *taken as usize);
        self.taken = *taken;
        Ok(())
    }
}
