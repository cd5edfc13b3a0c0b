//! The state of a loader: [`State`].

use std::{fmt, str::FromStr};

use numcore::Error;

/// The point at which reading continues: an epoch, and its number of positions read by all ranks together. It holds for
/// any number of ranks.
///
/// ```
/// use data::State;
///
/// let state = State { epoch: 3, position: 640 };
/// assert_eq!(state.to_string(), "epoch 3 position 640");
/// assert_eq!("epoch 3 position 640".parse::<State>().unwrap(), state);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct State {
    /// The epoch.
    pub epoch: u64,
    /// The number of positions read of the epoch's order.
    pub position: u64,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {} position {}", self.epoch, self.position)
    }
}

impl FromStr for State {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed = || {
            let (epoch, position) = text.strip_prefix("epoch ")?.split_once(" position ")?;
            Some(State { epoch: epoch.parse().ok()?, position: position.parse().ok()? })
        };
        parsed().ok_or_else(|| Error::format("State", format!("`{text}` is not `epoch E position P`")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_texts_are_no_state() {
        for text in ["", "epoch 3", "epoch 3 position", "epoch -1 position 2", "epoch 3 position 4 ", "3 4"] {
            let error = text.parse::<State>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}` is not")), "{error}");
        }
    }
}
