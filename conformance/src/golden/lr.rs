//! Learning-rate schedules: the rate at each step.

use numcore::{Error, Result};
use optim::{
    ConstantLr, Cosine, CosineRestarts, CyclicTriangular, ExponentialLr, LinearLr, LrSchedule, MultiStepLr, OneCycle,
    PolynomialLr, StepLr, Warmup,
};

use super::{Attrs, Case, Outcome, compare_values};

/// Rates are pure functions of the step, in `f64`: only the order of a few roundings is free.
const TOLERANCE: f64 = 1e-9;

pub(super) fn run(case: &Case) -> Result<Outcome> {
    let base = case.number("base_lr").ok_or_else(|| Error::format("golden", "the case has no `base_lr`"))?;
    let want = case.numbers("lr");
    let schedule = schedule(&case.op, &case.attrs)?;
    // Rates are compared as multiples of the base rate, so that errors are relative to it.
    let got: Vec<f64> = (0..want.len()).map(|i| schedule.lr(base, i as u64) / base).collect();
    let want: Vec<f64> = want.iter().map(|lr| lr / base).collect();
    Ok(Outcome::of(compare_values("lr", &got, &want, TOLERANCE)))
}

/// Builds the schedule of a case. Absent arguments have PyTorch's defaults.
fn schedule(op: &str, a: &Attrs) -> Result<Box<dyn LrSchedule>> {
    let steps = |names: &[&str], default: usize| a.usize(names, default).map(|n| n as u64);
    let total = |default: usize| steps(&["total", "total_iters"], default);
    let gamma = |default: f64| a.f64("gamma", default);
    Ok(match op {
        "constant" => {
            let (factor, total) = (a.f64("factor", 1.0 / 3.0)?, total(5)?);
            Box::new(move |base: f64, step: u64| if step < total { base * factor } else { base })
        }
        "none" => Box::new(ConstantLr),
        "step" => Box::new(StepLr { size: steps(&["step_size"], 1)?, gamma: gamma(0.1)? }),
        "multistep" => {
            let milestones = a.list(&["milestones"])?.iter().map(|&m| m as u64).collect();
            Box::new(MultiStepLr { milestones, gamma: gamma(0.1)? })
        }
        "exponential" => Box::new(ExponentialLr { gamma: gamma(0.1)? }),
        "cosine" => Box::new(Cosine { t_max: steps(&["t_max"], 1)?, eta_min: a.f64("eta_min", 0.0)? }),
        "cosine_restarts" => {
            let (t_0, t_mult) = (steps(&["t_0"], 1)?, steps(&["t_mult"], 1)?);
            Box::new(CosineRestarts { t_0, t_mult, eta_min: a.f64("eta_min", 0.0)? })
        }
        "linear" => Box::new(LinearLr { start: a.f64("start", 1.0 / 3.0)?, end: a.f64("end", 1.0)?, total: total(5)? }),
        "polynomial" => Box::new(PolynomialLr { total: total(5)?, power: a.f64("power", 1.0)? }),
        "onecycle" => Box::new(OneCycle {
            max_lr: a.f64("max_lr", 1.0)?,
            total: steps(&["total", "total_steps"], 1)?,
            pct_start: a.f64("pct_start", 0.3)?,
            div: a.f64("div", 25.0)?,
            final_div: a.f64("final_div", 1e4)?,
        }),
        "cyclic_triangular" => Box::new(CyclicTriangular {
            low: a.f64("base", 0.0)?,
            high: a.f64("max", 1.0)?,
            up: steps(&["step_up", "step_size_up"], 2000)?,
            down: steps(&["step_down", "step_size_down"], 0)?,
        }),
        "warmup_then_cosine" => {
            let rise = Warmup { steps: steps(&["warmup"], 1)?, start: a.f64("start", 0.01)? };
            Box::new(rise.then(Cosine { t_max: steps(&["t_max"], 1)?, eta_min: a.f64("eta_min", 0.0)? }))
        }
        _ => return Err(Error::format("golden", format!("`{op}` is not a schedule this runner knows"))),
    })
}
