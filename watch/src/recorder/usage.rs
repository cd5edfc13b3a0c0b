//! [`UsageSampler`]: the load of the CPU and of NVIDIA's GPUs, sampled at an interval.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use numcore::{Error, Result, Within, trace};

/// Adds counters to the recording in progress until it is dropped. These are `cpu %`, of which 100 is one core of this
/// process, and `gpu %`, the mean of all GPUs of the machine. The first exists on Linux, the second where there is
/// `nvidia-smi`.
#[derive(Debug)]
pub struct UsageSampler {
    stop: Option<Sender<()>>,
    threads: Vec<JoinHandle<()>>,
    smi: Option<Child>,
}

impl UsageSampler {
    /// Samples every `interval`, which is at least 20 ms: the kernel counts in hundredths of seconds.
    ///
    /// # Errors
    /// An error if no thread can be started.
    #[track_caller]
    pub fn start(interval: Duration) -> Result<Self> {
        let interval = interval.max(Duration::from_millis(20));
        let (stop, stopped) = channel::<()>();
        let look = move || {
            let mut before = (Instant::now(), cpu_time());
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                let now = (Instant::now(), cpu_time());
                if let Some(used) = now.1.zip(before.1).and_then(|(now, before)| now.checked_sub(before)) {
                    trace::sample("cpu %", percent(used, now.0 - before.0));
                }
                before = now;
            }
        };
        let mut sampler = UsageSampler { stop: Some(stop), threads: Vec::new(), smi: None };
        sampler.spawn("usage", look).at_caller()?;
        sampler.watch_gpus(interval).at_caller()?;
        Ok(sampler)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let rank = trace::rank();
        let work = move || {
            if let Some(rank) = rank {
                trace::set_rank(rank);
            }
            work();
        };
        let thread = Builder::new().name(name.into()).spawn(work);
        self.threads.push(thread.map_err(|e| Error::io("thread that looks at usage", e))?);
        Ok(())
    }

    /// Reads the output of `nvidia-smi`, one line per GPU and interval.
    fn watch_gpus(&mut self, interval: Duration) -> Result<()> {
        let every = format!("--loop-ms={}", interval.as_millis());
        let what = ["--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", &every];
        let mut smi = Command::new("nvidia-smi");
        smi.args(what).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Without `nvidia-smi` there is no such GPU, or no way to read its load.
        let Ok(mut child) = smi.spawn() else { return Ok(()) };
        let out = child.stdout.take();
        self.smi = Some(child);
        let Some(out) = out else { return Ok(()) };
        self.spawn("usage-gpu", move || {
            let mut gpus = GpuUsage::default();
            for line in BufReader::new(out).lines().map_while(std::io::Result::ok) {
                if let Some(mean) = gpus.read(&line) {
                    trace::sample("gpu %", mean);
                }
            }
        })
    }
}

impl Drop for UsageSampler {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(mut smi) = self.smi.take() {
            // A process that cannot be killed ends by itself, with the pipe it writes to.
            let _ = smi.kill().and_then(|()| smi.wait());
        }
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported there.
            let _ = thread.join();
        }
    }
}

/// The loads of one round of lines, one line per GPU.
#[derive(Default)]
struct GpuUsage {
    seen: Vec<u64>,
}

impl GpuUsage {
    /// Reads a line; returns the mean of all GPUs when the first line of the next round comes.
    fn read(&mut self, line: &str) -> Option<u64> {
        let (index, usage) = line.split_once(',')?;
        let (index, usage) = (index.trim().parse::<usize>().ok()?, usage.trim().parse::<u64>().ok()?);
        let round = (index == 0 && !self.seen.is_empty()).then(|| std::mem::take(&mut self.seen));
        self.seen.push(usage);
        round.map(|seen| seen.iter().sum::<u64>() / seen.len() as u64)
    }
}

/// The CPU time of this process's threads, in hundredths of seconds.
fn cpu_time() -> Option<u64> {
    times_of(&fs::read_to_string("/proc/self/stat").ok()?)
}

/// The sum of user and system time. The name before them may hold anything, also brackets.
fn times_of(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    Some(times.next()?.ok()? + times.next()?.ok()?)
}

/// The fraction of `time`, in percent.
fn percent(hundredths: u64, time: Duration) -> u64 {
    (hundredths as f64 / time.as_secs_f64().max(1e-3)).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_fourteenth_and_fifteenth_field() {
        let stat = "4242 (a) b (c)) S 1 4242 4242 0 -1 4194304 100 0 0 0 730 12 0 0 20 0 1 0 100 0 0";
        assert_eq!(times_of(stat), Some(742));
        assert_eq!((times_of("nonsense"), times_of("1 (a) S 1 2")), (None, None));
        assert_eq!(percent(30, Duration::from_millis(200)), 150);
    }

    #[test]
    fn gpus_are_averaged_by_round() {
        let mut gpus = GpuUsage::default();
        let lines = ["0, 100", "1, 50", "0, 10", "[N/A], [N/A]", "1, 20", "0, 7"];
        assert_eq!(lines.map(|line| gpus.read(line)), [None, None, Some(75), None, None, Some(15)]);
    }
}
