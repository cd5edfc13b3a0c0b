//! A captured training step: the bits of the step itself, and how much of the host's part it saves.

use std::time::Instant;

use weftgrad::{Cuda, Result, Runtime, Tensor};

use crate::{parity::Setup, report::Found};

const ROUNDS: u32 = 20;

pub fn run(rt: &Cuda) -> Result<Found> {
    let setup = Setup::new(rt)?;
    let step = || -> Result<Vec<Tensor<Cuda>>> {
        let (loss, gradients) = setup.step()?;
        let all = gradients.into_iter().map(|(_, g)| g);
        Ok(all.chain([loss]).collect())
    };
    // Compiled, and with a filled pool, as a capture requires.
    (0..2).try_for_each(|_| step().map(drop))?;
    let want: Vec<Vec<f64>> = step()?.iter().map(|t| t.to_f64s()).collect::<Result<_>>()?;
    let (graph, results) = rt.capture(step)?;
    let timed = |run: &dyn Fn() -> Result<()>| -> Result<f64> {
        rt.synchronize()?;
        let start = Instant::now();
        (0..ROUNDS).try_for_each(|_| run())?;
        rt.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / f64::from(ROUNDS))
    };
    let captured = timed(&|| graph.launch())?;
    let mut failures = Vec::new();
    for (i, (got, want)) in results.iter().zip(&want).enumerate() {
        if got.to_f64s()?.iter().zip(want).any(|(a, b)| a.to_bits() != b.to_bits()) {
            failures.push(format!("result {i} of the captured step differs"));
        }
    }
    drop((graph, results));
    let eager = timed(&|| step().map(drop))?;
    Ok(Found::checks(want.len(), failures).with("captured_ms", captured).with("eager_ms", eager))
}
