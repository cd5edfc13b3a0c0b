//! Streams: examples that come one after another, without random access, as from compressed files or sockets.
//!
//! Prefer random access where possible: a [`Dataset`](crate::Dataset) is shuffled entirely and resumed by two integers.
//! A stream has its own [state](StreamState) and is shuffled in [blocks](Stream::shuffle). Every rank reads all of it
//! and keeps its share.

mod loader;
mod replay;
mod shuffle;

use std::{fmt, str::FromStr};

pub use loader::{StreamBatches, StreamLoader};
use numcore::{Error, Result};
pub use replay::{Replay, lines};
pub use shuffle::ShuffledStream;

/// A sequence of examples with a current position: PyTorch's `IterableDataset`.
pub trait Stream: Send {
    /// The type of an example.
    type Example;

    /// The next example; `None` at the end. After an error the stream continues with the following example.
    fn next(&mut self) -> Option<Result<Self::Example>>;

    /// The current position, for [`restore`](Stream::restore).
    fn state(&self) -> StreamState;

    /// Moves to a state of a stream of the same examples.
    ///
    /// # Errors
    /// Fails if the state is none of this stream's, or the examples before it cannot be read.
    fn restore(&mut self, state: &StreamState) -> Result<()>;

    /// Shuffles the examples within blocks of `block`. A block is in memory at once. The order is a function of the
    /// seed and the block's number.
    fn shuffle(self, block: usize, seed: u64) -> ShuffledStream<Self>
    where
        Self: Sized,
    {
        ShuffledStream::new(self, block, seed)
    }
}

/// The position of a stream: a few integers with a meaning for that stream alone. Their text goes into the notes of a
/// checkpoint.
///
/// ```
/// use data::stream::StreamState;
///
/// let state = StreamState(vec![3, 640]);
/// assert_eq!(state.to_string(), "3 640");
/// assert_eq!("3 640".parse::<StreamState>().unwrap(), state);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct StreamState(pub Vec<u64>);

impl StreamState {
    /// The state as `N` integers; an error if there is another number of them.
    pub(crate) fn integers<const N: usize>(&self, op: &'static str) -> Result<[u64; N]> {
        let wrong = |_| Error::format(op, format!("`{self}` is no state of it: that has {N} integers"));
        <[u64; N]>::try_from(self.0.as_slice()).map_err(wrong)
    }
}

impl fmt::Display for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let integers: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&integers.join(" "))
    }
}

impl FromStr for StreamState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let integers: Option<Vec<u64>> = text.split_whitespace().map(|word| word.parse().ok()).collect();
        let integers = integers.filter(|integers| !integers.is_empty());
        let wrong = || Error::format("StreamState", format!("`{text}` is no list of integers"));
        integers.map(StreamState).ok_or_else(wrong)
    }
}
