//! Algorithms that an emulated library offers for each product, with times as a test sets them. All compute the same
//! result.

use std::time::Duration;

use runtime_cuda::driver::CublasGemm;

/// The candidates of every product, and the requests for them.
#[derive(Clone, Debug, Default)]
pub struct GemmCandidates {
    times: Vec<Duration>,
    /// The number of products for which candidates were requested.
    pub asked: usize,
    /// The candidate that computed each product, in order; `None` for the library's own choice.
    pub used: Vec<Option<usize>>,
}

impl GemmCandidates {
    pub(crate) fn taking(times: Vec<Duration>) -> GemmCandidates {
        GemmCandidates { times, ..GemmCandidates::default() }
    }

    pub(crate) fn of(&mut self, _: &CublasGemm) -> usize {
        self.asked += 1;
        self.times.len()
    }

    /// Notes that a product ran, and returns its duration.
    pub(crate) fn run(&mut self, candidate: Option<usize>) -> Duration {
        self.used.push(candidate);
        candidate.map_or(Duration::ZERO, |i| self.times[i])
    }
}
