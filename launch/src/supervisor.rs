//! The supervision of ranks: all end once one has failed, and are started again if the job says so.

use std::{
    fs,
    io::{self, Write},
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::{Handle, Signals},
};

use crate::{
    environment::Meeting,
    job::Job,
    lines::RankLines,
    process::{Event, RankProcess, code, described},
};

/// The time from SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_millis(1500);
/// The time for which a stopped rank is waited for that all others have left behind.
const STOPPED: Duration = Duration::from_secs(5);
/// The time for the last lines of ranks that have ended: a process that has left its group may keep a stream open.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The local rank that failed first, and its status.
type RankFailure = (usize, ExitStatus);

/// Runs a job, and returns the exit status for the launcher.
pub(crate) fn run(job: &Job) -> io::Result<u8> {
    let lines = |rank| RankLines::new(job.node_rank * job.ranks + rank, job.log_dir.as_deref()).map(Arc::new);
    let lines = (0..job.ranks).map(lines).collect::<io::Result<Vec<_>>>()?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalForwarder::start(sender.clone())?;
    let mut supervisor = Supervisor { job, lines, sender, events, signals: 0 };
    for start in 0.. {
        let Some((rank, status)) = supervisor.started(start)? else { return Ok(0) };
        supervisor.report((rank, status));
        if supervisor.signals > 0 || start >= job.max_restarts {
            return Ok(code(status));
        }
        report(format!("all ranks are started again, {} of {} times\n", start + 1, job.max_restarts).as_bytes());
    }
    Ok(0)
}

struct Supervisor<'a> {
    job: &'a Job,
    lines: Vec<Arc<RankLines>>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// The number of signals so far.
    signals: usize,
}

impl Supervisor<'_> {
    /// Starts all ranks, and waits until they have ended. Returns the first failure.
    fn started(&mut self, start: usize) -> io::Result<Option<RankFailure>> {
        let meeting = Meeting::new(self.job)?;
        self.lines.iter().for_each(|lines| lines.forget());
        let begin =
            |rank: usize| RankProcess::start(self.job, &meeting, (rank, start), &self.lines[rank], &self.sender);
        let mut ranks = (0..self.job.ranks).map(begin).collect::<io::Result<Vec<_>>>()?;
        let failure = self.supervise(&mut ranks)?;
        let until = Instant::now() + LAST_LINES;
        ranks.iter().for_each(|rank| rank.drain(until));
        Ok(failure)
    }

    fn supervise(&mut self, ranks: &mut [RankProcess]) -> io::Result<Option<RankFailure>> {
        let (mut failure, mut deadline): (Option<RankFailure>, _) = (None, None);
        let (mut left, mut has_killed, mut stuck) = (ranks.len(), false, None);
        let end = |ranks: &[RankProcess]| {
            ranks.iter().for_each(|rank| rank.signal(Signal::SIGTERM));
            Some(Instant::now() + GRACE)
        };
        while !ranks.iter().all(RankProcess::has_ended) {
            stuck = if self.is_stuck(ranks) { stuck.or_else(|| Some(Instant::now() + STOPPED)) } else { None };
            match self.next(deadline.or(stuck)) {
                Some(Event::Stopped(rank, is_stopped)) => ranks[rank].is_stopped = is_stopped,
                Some(Event::Ended(rank)) => {
                    let status = ranks[rank].reap()?;
                    if status.success() {
                        continue;
                    }
                    if let Some((_, first)) = &failure {
                        // Others learn of a killed rank by its connections, and may end before it.
                        if !has_killed && first.signal().is_none() && status.signal().is_some_and(|s| s != SIGTERM) {
                            failure = Some((rank, status));
                        }
                        continue;
                    }
                    left -= 1;
                    if left >= self.job.min_ranks.unwrap_or(ranks.len()) {
                        ranks[rank].drain(Instant::now() + LAST_LINES);
                        self.report((rank, status));
                        continue;
                    }
                    failure = Some((rank, status));
                    // Ranks that were asked to end may save first.
                    if self.signals == 0 {
                        deadline = deadline.or_else(|| end(ranks));
                    }
                }
                Some(Event::Signaled(number)) => {
                    self.signals += 1;
                    let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                    ranks.iter().for_each(|rank| rank.signal(signal));
                    // Whoever asks a second time does not want to wait.
                    if self.signals > 1 {
                        deadline = deadline.or_else(|| end(ranks));
                    }
                }
                None => {
                    ranks.iter().for_each(|rank| rank.signal(Signal::SIGKILL));
                    (deadline, stuck, has_killed) = (None, None, true);
                }
            }
        }
        Ok(failure)
    }

    /// Tells whether only stopped ranks are left of a job that goes on without some.
    fn is_stuck(&self, ranks: &[RankProcess]) -> bool {
        let mut left = ranks.iter().filter(|rank| !rank.has_ended());
        self.job.min_ranks.is_some() && ranks.iter().any(RankProcess::has_ended) && left.all(|rank| rank.is_stopped)
    }

    /// Prints the end of a rank, and its last lines.
    fn report(&self, (rank, status): RankFailure) {
        let (all, words) = (self.job.node_rank * self.job.ranks + rank, self.lines[rank].last_words());
        let ending = if words.is_empty() { "" } else { "; its last words:" };
        report(&[format!("rank {all} {}{ending}\n", described(status)).as_bytes(), &words].concat());
    }

    /// The next event; none once the deadline has passed.
    fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else { return self.events.recv().ok() };
        self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }
}

/// The thread that turns signals of this process into events. It ends when this is dropped.
struct SignalForwarder(Handle);

impl SignalForwarder {
    fn start(events: Sender<Event>) -> io::Result<Self> {
        let hangup = (!ignores_hangup()).then_some(SIGHUP);
        let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
        let handle = signals.handle();
        let forward = move || signals.forever().for_each(|signal| drop(events.send(Event::Signaled(signal))));
        thread::Builder::new().name("signals".into()).spawn(forward)?;
        Ok(SignalForwarder(handle))
    }
}

impl Drop for SignalForwarder {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Tells whether `nohup` has started this process, which is to survive its terminal.
fn ignores_hangup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

fn report(words: &[u8]) {
    // There is nowhere else to say it.
    let _ = io::stderr().lock().write_all(&[b"weftgrad-run: ", words].concat());
}
