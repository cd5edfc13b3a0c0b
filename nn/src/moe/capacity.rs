//! How many tokens an expert takes.

/// The limit of an expert's tokens: `⌈T · k / E · factor⌉` of `T` tokens that each pick `k` of `E` experts. What exceeds it is dropped: that
/// expert adds nothing to those tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// The limit as a multiple of an equal share; 1 or a little above.
    pub factor: f64,
    /// Which tokens are dropped.
    pub drop: DropBy,
}

/// Which tokens exceed the [`Capacity`] of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropBy {
    /// The last ones in the batch.
    Position,
    /// The ones that weigh the expert least; of equal ones the last.
    Weight,
}

impl Capacity {
    /// The limit for `tokens` tokens.
    pub fn limit(self, tokens: usize, top_k: usize, experts: usize) -> usize {
        // An exact product first: a factor of 1 gives the equal share itself.
        ((tokens * top_k) as f64 * self.factor / experts.max(1) as f64).ceil() as usize
    }
}
