//! Random pointwise programs on a runtime, against plain evaluation on the host.
//!
//! A program of floats is compared within an error bound that is carried along through its evaluation. So cancellation
//! and fused multiply-adds are allowed their error and nothing more. An element is skipped if a step, a comparison or a
//! pole is within the bound. Programs of integers must agree exactly.

mod bound;
mod floats;
mod integers;
mod tree;

use std::fmt::Debug;

use numcore::Runtime;
use proptest::{
    strategy::Strategy,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner},
};

use super::report::{Section, Verdict};

pub(crate) fn programs<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("random programs");
    floats::checks(rt, &mut section);
    integers::checks(rt, &mut section);
    section
}

/// Runs `check` on `cases` random values, equal in every run, and shrinks the first that fails.
pub(crate) fn random<T: Debug>(
    cases: u32,
    strategy: impl Strategy<Value = T>,
    check: impl Fn(&T) -> numcore::Result<Verdict>,
) -> Verdict {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let outcome = runner.run(&strategy, |value| {
        let verdict = check(&value).map_err(|e| TestCaseError::fail(e.to_string()))?;
        verdict.reason().map_or(Ok(()), |why| Err(TestCaseError::fail(why.to_string())))
    });
    match outcome {
        Ok(()) => Verdict::PASSED,
        Err(TestError::Fail(why, value)) => Verdict::failed(format!("{why} for {value:?}")),
        Err(TestError::Abort(why)) => Verdict::failed(why),
    }
}
