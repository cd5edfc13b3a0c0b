//! Captured training steps: their results must equal those of uncaptured steps to the bit. Both are timed.

use std::{cmp::Ordering, time::Instant};

use weftgrad::{
    Cuda, Error, Result, Runtime, Tensor,
    autograd::{manual_seed, next_seed, random_state, set_random_state},
    nn::ModuleExt,
    optim::{AdamW, AdamWConfig, Cosine, Optimizer},
};

use weftgrad_bench::cases::{Case, build, build_captured};

use crate::{parity::Setup, report::Found};

const ROUNDS: u32 = 20;

pub(crate) fn run(rt: &Cuda, item: &str) -> Result<Found> {
    match item {
        "gpt step" => gradients(rt),
        "gpt step with adamw" => training(rt),
        case => case_of_bench(rt, case),
    }
}

/// Compares the losses of a benchmark case with its step captured and not.
fn case_of_bench(rt: &Cuda, case: &str) -> Result<Found> {
    let losses = |built: std::result::Result<Case, String>| -> Result<Vec<f64>> {
        let mut built = built.map_err(|e| Error::argument("graph", e))?;
        (0..8).map(|_| (built.run)().map(|()| built.loss.get().unwrap_or(f64::NAN))).collect()
    };
    let (want, got) = (losses(build(rt, &[case]))?, losses(build_captured(rt, &[case]))?);
    let differs = |(i, (want, got)): (usize, (&f64, &f64))| {
        (want.to_bits() != got.to_bits()).then(|| format!("loss {i} of the captured steps is {got}, and not {want}"))
    };
    let mut failures: Vec<String> = want.iter().zip(&got).enumerate().filter_map(differs).collect();
    if want.windows(2).any(|pair| pair[0].partial_cmp(&pair[1]) != Some(Ordering::Greater)) {
        failures.push(format!("{case} does not learn: {want:?}"));
    }
    Ok(Found::checks(want.len() + 1, failures))
}

/// Compares losses and parameters of whole steps with dropout, AdamW and a schedule: captured and launched, and run
/// normally.
fn training(rt: &Cuda) -> Result<Found> {
    let (want, got) = (trained(rt, false)?, trained(rt, true)?);
    let differs = |(i, (want, got)): (usize, (&Vec<f64>, &Vec<f64>))| {
        let same = want.iter().map(|x| x.to_bits()).eq(got.iter().map(|x| x.to_bits()));
        (!same).then(|| format!("result {i} of the captured steps differs"))
    };
    Ok(Found::checks(want.len(), want.iter().zip(&got).enumerate().filter_map(differs).collect()))
}

fn trained(rt: &Cuda, captured: bool) -> Result<Vec<Vec<f64>>> {
    manual_seed(9);
    let setup = Setup::with_dropout(rt, 0.1)?;
    let schedule = Cosine { t_max: 50, eta_min: 0.0 };
    let mut optimizer = AdamW::new(setup.model(), AdamWConfig::default())?.scheduled(schedule).capturable();
    let step = |optimizer: &mut AdamW<Cuda>| {
        let loss = setup.loss()?;
        optimizer.backward(&loss)?;
        optimizer.step()?;
        loss.value()
    };
    (0..2).try_for_each(|_| step(&mut optimizer).map(drop))?;
    let mut results = Vec::new();
    let before = random_state();
    let graph = if captured { Some(rt.capture(|| step(&mut optimizer))?) } else { None };
    set_random_state(before);
    for _ in 0..8 {
        let loss = match &graph {
            Some((graph, loss)) => {
                optimizer.advance()?;
                graph.launch_with_seeds(next_seed)?;
                loss.to_f64s()?
            }
            None => step(&mut optimizer)?.to_f64s()?,
        };
        results.push(loss);
    }
    for parameter in setup.model().parameters() {
        results.push(parameter.leaf().value()?.to_f64s()?);
    }
    Ok(results)
}

fn gradients(rt: &Cuda) -> Result<Found> {
    let setup = Setup::new(rt)?;
    let step = || -> Result<Vec<Tensor<Cuda>>> {
        let (loss, gradients) = setup.step()?;
        let all = gradients.into_iter().map(|(_, g)| g);
        Ok(all.chain([loss]).collect())
    };
    // Kernels are compiled and the pool is filled, as a capture requires.
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
