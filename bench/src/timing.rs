//! Timing: a call is repeated until enough time has passed for the clock.

use std::time::Instant;

use crate::cases::Case;

/// Nanoseconds per call. Short calls are repeated for about 30 ms; a `long` case is timed one call at a time.
pub fn per_call(case: &mut Case) -> weftgrad::Result<f64> {
    let enough = if case.long { 1.0 } else { 30e6 };
    let once = nanoseconds(case, 1)?;
    let repeats = (enough / once.max(1.0)).max(1.0) as u64;
    Ok(nanoseconds(case, repeats)? / repeats as f64)
}

fn nanoseconds(case: &mut Case, repeats: u64) -> weftgrad::Result<f64> {
    let start = Instant::now();
    for _ in 0..repeats {
        (case.run)()?;
    }
    (case.finish)()?;
    Ok(start.elapsed().as_nanos() as f64)
}
