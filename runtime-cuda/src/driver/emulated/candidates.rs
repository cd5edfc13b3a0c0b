//! Algorithms that an emulated library offers for each product, with times as a test sets them. All compute the same.

use std::time::Duration;

use super::super::CublasGemm;

/// The candidates of every product, and what was asked for.
#[derive(Clone, Debug, Default)]
pub struct GemmCandidates {
    times: Vec<Duration>,
    /// For how many products candidates were asked for.
    pub asked: usize,
    /// The candidate that each product was computed by, or nothing for the library's own choice, in order.
    pub used: Vec<Option<usize>>,
}

impl GemmCandidates {
    pub(super) fn taking(times: Vec<Duration>) -> GemmCandidates {
        GemmCandidates { times, ..GemmCandidates::default() }
    }

    pub(super) fn of(&mut self, _: &CublasGemm) -> usize {
        self.asked += 1;
        self.times.len()
    }

    /// How long a product takes.
    pub(super) fn run(&mut self, candidate: Option<usize>) -> Duration {
        self.used.push(candidate);
        candidate.map_or(Duration::ZERO, |i| self.times[i])
    }
}
