//! Speed of a run, and its waiting times.

use std::{
    fs,
    time::{Duration, Instant},
};

use distributed::comm::{Collectives, Communicator};
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
/// | `memory/host_bytes` | the resident memory of this rank's process, on Linux |
///
/// With [`by_rank`](Throughput::by_rank) also, for rank 3 as for every other:
///
/// | recorded as | |
/// |---|---|
/// | `rank/3/lag_seconds` | the time of a step by which rank 3 comes later to collectives than the first rank, if `exchange` was given |
/// | `rank/3/data_wait`, `rank/3/peak_bytes`, `rank/3/host_bytes` | as above, of rank 3 |
///
/// The lag of a rank is the longest wait of a rank in collectives less its own wait: the latest rank waits least. It is
/// 0 for the rank that waits longest. It shows slow devices, slow data and large shares of the work. Waits are those of
/// the host. Over NCCL, hosts wait until all have started a call, and devices for the rest of it. So slow data is seen
/// there, and a slow device is not.
///
/// MFU = (tokens per second × FLOPs per token) / (peak FLOP/s of a rank × ranks). FLOPs per token are 6 times the
/// number of the model's parameters: two for each weight in the forward pass, four in the backward pass.
/// [`flops_per_token`](Throughput::flops_per_token) sets another number: with attention,
/// `6·N + 12·layers·width·context`. Recomputed FLOPs are not counted, so that recomputing does not look like work.
pub struct Throughput<'t> {
    peak_flops: Option<f64>,
    flops_per_token: Option<f64>,
    exchange: Option<Box<dyn FnMut() -> Duration + 't>>,
    by_rank: bool,
    /// The total time waited in collectives at the beginning of the step.
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
    exchange_wait: f64,
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
            by_rank: false,
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

    /// Records the lag, the waits for data and the memory of every rank too. The ranks exchange 32 bytes for each
    /// record, so all of them need this callback.
    #[doc(alias("straggler", "stragglers"))]
    pub fn by_rank(mut self) -> Self {
        self.by_rank = true;
        self
    }

    /// The total time waited in collectives so far.
    fn total_waited(&mut self) -> Duration {
        self.exchange.as_mut().map_or(Duration::ZERO, |waited| waited())
    }

    fn record<R: Runtime, M: Module<R>, B>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let StepSums { steps, seconds, data_wait, exchange_wait, tokens } = self.sums;
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let tokens_per_second = per_second(run.progress().tokens - tokens);
        run.record("throughput/tokens_per_second", tokens_per_second);
        run.record("throughput/steps_per_second", per_second(steps as f64));
        run.record("throughput/data_wait", per_second(data_wait));
        if self.exchange.is_some() {
            run.record("throughput/exchange_wait", per_second(exchange_wait));
        }
        if let Some(peak) = self.peak_flops {
            let flops = self.flops_per_token.unwrap_or_else(|| 6.0 * run.model().num_parameters().total as f64);
            run.record("throughput/mfu", tokens_per_second * flops / (peak * run.comm().size() as f64));
        }
        let peak = run.comm().runtime().memory().total.peak as f64;
        run.record("memory/peak_bytes", peak);
        let host = resident_bytes();
        if let Some(bytes) = host {
            run.record("memory/host_bytes", bytes);
        }
        if self.by_rank {
            let wait = self.exchange.as_ref().map_or(f64::NAN, |_| exchange_wait / steps as f64);
            let own = RankMeasurements { wait, data_wait: per_second(data_wait), peak, host: host.unwrap_or(f64::NAN) };
            let ranks = run.comm().exchange_equal(own.to_bytes())?;
            let ranks: Vec<RankMeasurements> = ranks.into_iter().map(RankMeasurements::from_bytes).collect();
            let members = run.comm().members().to_vec();
            named(&members, &ranks).for_each(|(name, value)| run.record(&name, value));
        }
        self.sums = StepSums { tokens: run.progress().tokens, ..StepSums::default() };
        Ok(())
    }
}

/// Values of one rank; those that were not measured are NaN.
#[derive(Clone, Copy, Debug)]
struct RankMeasurements {
    /// The time of a step that it waited in collectives, in seconds.
    wait: f64,
    data_wait: f64,
    peak: f64,
    host: f64,
}

impl RankMeasurements {
    fn to_bytes(self) -> [u8; 32] {
        let numbers = [self.wait, self.data_wait, self.peak, self.host].map(f64::to_le_bytes);
        std::array::from_fn(|i| numbers[i / 8][i % 8])
    }

    fn from_bytes(bytes: [u8; 32]) -> Self {
        let number = |k: usize| f64::from_le_bytes(std::array::from_fn(|i| bytes[8 * k + i]));
        RankMeasurements { wait: number(0), data_wait: number(1), peak: number(2), host: number(3) }
    }
}

/// The measured values of all ranks, with names: a rank keeps its name when others are lost.
fn named(members: &[usize], ranks: &[RankMeasurements]) -> impl Iterator<Item = (String, f64)> {
    // `max` ignores NaN.
    let longest = ranks.iter().map(|rank| rank.wait).fold(f64::NAN, f64::max);
    let of_rank = move |(k, rank): (&usize, &RankMeasurements)| {
        let values = [
            ("lag_seconds", longest - rank.wait),
            ("data_wait", rank.data_wait),
            ("peak_bytes", rank.peak),
            ("host_bytes", rank.host),
        ];
        values.map(|(name, value)| (format!("rank/{k}/{name}"), value))
    };
    members.iter().zip(ranks).flat_map(of_rank).filter(|(_, value)| !value.is_nan())
}

/// The resident memory of this process, in bytes, where the system tells it.
fn resident_bytes() -> Option<f64> {
    resident_in(&fs::read_to_string("/proc/self/status").ok()?)
}

fn resident_in(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(1024.0 * line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()?)
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for Throughput<'_> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin | Event::WentBack => {
                self.sums = StepSums { tokens: run.progress().tokens, ..StepSums::default() };
            }
            Event::StepBegin => {
                self.begun = Some(Instant::now());
                self.waited = self.total_waited();
            }
            Event::StepEnd(_) => {
                self.sums.steps += 1;
                self.sums.seconds += self.begun.take().map_or(0.0, |begun| begun.elapsed().as_secs_f64());
                self.sums.data_wait += run.data_wait();
                self.sums.exchange_wait += self.total_waited().saturating_sub(self.waited).as_secs_f64();
                if run.is_record_due() {
                    self.record(run)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_waits_least_lags_most() {
        let rank = |wait| RankMeasurements { wait, data_wait: 0.25, peak: 3.0, host: f64::NAN };
        let lags = |waits: &[f64]| {
            let ranks: Vec<RankMeasurements> =
                waits.iter().map(|wait| RankMeasurements::from_bytes(rank(*wait).to_bytes())).collect();
            named(&[0, 1, 2], &ranks).filter(|(name, _)| name.ends_with("lag_seconds")).collect::<Vec<_>>()
        };
        let lag = |rank: usize, x: f64| (format!("rank/{rank}/lag_seconds"), x);
        assert_eq!(lags(&[0.5, 0.0, 0.75]), [lag(0, 0.25), lag(1, 0.75), lag(2, 0.0)]);
        // A rank without a measurement has no lag, and changes no other.
        assert_eq!(lags(&[f64::NAN, 0.5, 0.25]), [lag(1, 0.0), lag(2, 0.25)]);
        assert_eq!(lags(&[f64::NAN; 2]), []);
        let all: Vec<(String, f64)> = named(&[2], &[rank(f64::NAN)]).collect();
        assert_eq!(all, [("rank/2/data_wait".into(), 0.25), ("rank/2/peak_bytes".into(), 3.0)]);
    }

    #[test]
    fn resident_memory_is_read_from_the_status_of_a_process() {
        assert_eq!(
            resident_in("Name:\ta VmRSS:\nVmHWM:\t  20 kB\nVmRSS:\t   1234 kB\nRssAnon: 1 kB\n"),
            Some(1_263_616.0)
        );
        assert_eq!((resident_in(""), resident_in("VmRSS: 7 MB"), resident_in("VmRSS: x kB")), (None, None, None));
    }
}
