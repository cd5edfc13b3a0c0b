//! Speed of a run, and its waiting times.

use std::time::{Duration, Instant};

use distributed::comm::Communicator;
use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime};

use crate::{Callback, Event, Run};

/// Measures the speed of a run, over the steps since the last record; time in evaluations and saves is not counted.
///
/// | recorded as | |
/// |---|---|
/// | `throughput/tokens_per_second` | loss weights of all ranks per second: tokens, where losses are sums over tokens |
/// | `throughput/steps_per_second` | |
/// | `throughput/mfu` | model FLOPs utilization, if [`peak_flops`](Throughput::peak_flops) was given |
/// | `throughput/data_wait` | the fraction of the time that this rank waited for batches |
/// | `throughput/exchange_wait` | the fraction in collectives, if [`exchange`](Throughput::exchange) was given |
/// | `memory/peak_bytes` | the peak of memory in use on this rank, since the runtime was made |
///
/// MFU = (tokens per second × FLOPs per token) / (peak FLOP/s of a rank × ranks). FLOPs per token are 6 times the
/// number of the model's parameters: two for each weight in the forward pass, four in the backward pass.
/// [`flops_per_token`](Throughput::flops_per_token) sets another number: with attention,
/// `6·N + 12·layers·width·context`. Recomputed FLOPs are not counted, so that recomputing does not look like work.
pub struct Throughput<'t> {
    peak_flops: Option<f64>,
    flops_per_token: Option<f64>,
    exchange: Option<Box<dyn FnMut() -> Duration + 't>>,
    waited: Duration,
    /// Sums over the steps since the last record.
    sums: StepSums,
    begun: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct StepSums {
    steps: u64,
    seconds: f64,
    data_wait: f64,
    /// The token count at the last record.
    tokens: f64,
}

impl Default for Throughput<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'t> Throughput<'t> {
    /// Measures speed, waiting for data, and memory.
    pub fn new() -> Self {
        Throughput {
            peak_flops: None,
            flops_per_token: None,
            exchange: None,
            waited: Duration::ZERO,
            sums: StepSums::default(),
            begun: None,
        }
    }

    /// Sets the peak of one rank's device, in FLOP/s of the type that it computes in, from which the utilization
    /// follows.
    pub fn peak_flops(mut self, of_a_rank: f64) -> Self {
        self.peak_flops = Some(of_a_rank);
        self
    }

    /// Sets the FLOPs of a forward and a backward pass for one token.
    pub fn flops_per_token(mut self, flops: f64) -> Self {
        self.flops_per_token = Some(flops);
        self
    }

    /// Sets the function that returns this rank's total time waiting in collectives so far:
    /// `|| counting.total().exposed` of a [`CountingCommunicator`](distributed::comm::CountingCommunicator).
    pub fn exchange(mut self, waited: impl FnMut() -> Duration + 't) -> Self {
        self.exchange = Some(Box::new(waited));
        self
    }

    fn record<R: Runtime, M: Module<R>, B>(&mut self, run: &mut Run<'_, R, M, B>) {
        let StepSums { steps, seconds, data_wait, tokens } = self.sums;
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let tokens_per_second = per_second(run.progress().tokens - tokens);
        run.record("throughput/tokens_per_second", tokens_per_second);
        run.record("throughput/steps_per_second", per_second(steps as f64));
        run.record("throughput/data_wait", per_second(data_wait));
        if let Some(waited) = &mut self.exchange {
            let now = waited();
            run.record("throughput/exchange_wait", per_second(now.saturating_sub(self.waited).as_secs_f64()));
            self.waited = now;
        }
        if let Some(peak) = self.peak_flops {
            let flops = self.flops_per_token.unwrap_or_else(|| 6.0 * run.model().num_parameters().total as f64);
            run.record("throughput/mfu", tokens_per_second * flops / (peak * run.comm().size() as f64));
        }
        let peak = run.comm().runtime().memory().total.peak;
        run.record("memory/peak_bytes", peak as f64);
        self.sums = StepSums { tokens: run.progress().tokens, ..StepSums::default() };
    }
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for Throughput<'_> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin | Event::WentBack => {
                self.sums = StepSums { tokens: run.progress().tokens, ..StepSums::default() };
                self.waited = self.exchange.as_mut().map_or(Duration::ZERO, |waited| waited());
            }
            Event::StepBegin => self.begun = Some(Instant::now()),
            Event::StepEnd(_) => {
                self.sums.steps += 1;
                self.sums.seconds += self.begun.take().map_or(0.0, |begun| begun.elapsed().as_secs_f64());
                self.sums.data_wait += run.data_wait();
                if run.is_record_due() {
                    self.record(run);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        for (field, value) in [("peak_flops", self.peak_flops), ("flops_per_token", self.flops_per_token)] {
            if value.is_some_and(|value| !(value > 0.0 && value.is_finite())) {
                return Err(Error::config("Throughput", field, format!("`{field}` cannot be {value:?}")));
            }
        }
        Ok(())
    }
}
