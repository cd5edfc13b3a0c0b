//! Examples that come one after another: compressed files, sockets, whatever cannot be read by number.
//!
//! Random access is better where it can be had: a [`Dataset`](crate::Dataset) is shuffled whole and resumed by two integers. A stream
//! carries its own [state](StreamState), is shuffled in [blocks](Stream::shuffle), and every rank reads all of it and keeps its share.

mod loader;
mod replay;
mod shuffle;

use std::{fmt, str::FromStr};

pub use loader::{StreamBatches, StreamLoader};
use numcore::{Error, Result};
pub use replay::{Replay, lines};
pub use shuffle::ShuffledStream;

/// Examples in an order that only the stream knows, and where it is among them: PyTorch's `IterableDataset`.
pub trait Stream: Send {
    /// What comes next.
    type Example;

    /// The next example; nothing at the end. After an error the stream goes on with the example behind it.
    fn next(&mut self) -> Option<Result<Self::Example>>;

    /// Where it is: what [`restore`](Stream::restore) takes back.
    fn state(&self) -> StreamState;

    /// Goes to a state that a stream of the same examples was in.
    ///
    /// # Errors
    /// If it cannot be such a state, or what it is of cannot be read.
    fn restore(&mut self, state: &StreamState) -> Result<()>;

    /// Examples in a random order within blocks of `block`, each in memory whole. The order is a function of the seed and the block's number.
    fn shuffle(self, block: usize, seed: u64) -> ShuffledStream<Self>
    where
        Self: Sized,
    {
        ShuffledStream::new(self, block, seed)
    }
}

/// Where a stream is: a few integers that only the stream understands. As text they go into the notes of a checkpoint.
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
    /// The state as so many integers.
    pub(crate) fn integers<const N: usize>(&self, op: &'static str) -> Result<[u64; N]> {
        let wrong = |_| Error::argument(op, format!("`{self}` is no state of it: that has {N} integers"));
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
        let wrong = || Error::argument("StreamState", format!("`{text}` is no list of integers"));
        integers.map(StreamState).ok_or_else(wrong)
    }
}
