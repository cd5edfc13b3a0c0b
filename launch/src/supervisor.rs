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
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1},
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
/// The time from SIGTERM to SIGKILL for survivors of a job that goes on without some ranks.
const LONG_GRACE: Duration = Duration::from_secs(30);
/// The time for which a stopped rank is waited for that all others have left behind.
const STOPPED: Duration = Duration::from_secs(5);
/// The time after which a stopped rank of a job that newcomers may join is killed, to make place for one.
const HUNG: Duration = Duration::from_secs(15);
/// The time between two looks for processes that say that they are in the run.
const LOOK: Duration = Duration::from_millis(200);
/// The time for the last lines of ranks that have ended: a process that has left its group may keep a stream open.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The local rank that failed first, and its status.
type RankFailure = (usize, ExitStatus);

/// Runs a job, and returns the exit status for the launcher.
pub(crate) fn run(job: &Job) -> io::Result<u8> {
    let lines = |rank| RankLines::new(job.rank_of(rank), job.log_dir.as_deref()).map(Arc::new);
    let most = job.max_ranks.unwrap_or(job.ranks);
    let lines = (0..most).map(lines).collect::<io::Result<Vec<_>>>()?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalForwarder::start(sender.clone(), job.max_ranks.is_some())?;
    let mut supervisor =
        Supervisor { job, lines, sender, events, signals: 0, starts: 0, restarts: 0, has_begun: false };
    loop {
        let meeting = Meeting::new(job)?;
        supervisor.has_begun = false;
        let Some((rank, status)) = supervisor.started(&meeting)? else { return Ok(0) };
        supervisor.report((rank, status));
        if supervisor.signals > 0 || supervisor.restarts >= job.max_restarts || supervisor.has_begun {
            return Ok(code(status));
        }
        (supervisor.starts, supervisor.restarts) = (supervisor.starts + 1, supervisor.restarts + 1);
        let (count, most) = (supervisor.restarts, job.max_restarts);
        report(format!("all ranks are started again, {count} of {most} times\n").as_bytes());
    }
}

struct Supervisor<'a> {
    job: &'a Job,
    lines: Vec<Arc<RankLines>>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// The number of signals so far.
    signals: usize,
    /// The number of times that all ranks were started again or a newcomer was started, for whatever reason.
    starts: usize,
    /// The number of those that followed a failure.
    restarts: usize,
    /// True once a rank of this node is in a run that others may join.
    has_begun: bool,
}

impl Supervisor<'_> {
    /// Starts all ranks, and waits until they have ended. Returns the first failure.
    fn started(&mut self, meeting: &Meeting) -> io::Result<Option<RankFailure>> {
        self.lines.iter().for_each(|lines| lines.forget());
        let begin = |rank| self.begin(meeting, rank, (self.starts, false));
        let mut ranks = (0..self.job.ranks).map(begin).collect::<io::Result<Vec<_>>>()?;
        let failure = self.supervise(&mut ranks, meeting)?;
        let until = Instant::now() + LAST_LINES;
        ranks.iter().for_each(|rank| rank.drain(until));
        Ok(failure)
    }

    fn begin(&self, meeting: &Meeting, rank: usize, start: (usize, bool)) -> io::Result<RankProcess> {
        RankProcess::start(self.job, meeting, (rank, start), &self.lines[rank], &self.sender)
    }

    fn supervise(&mut self, ranks: &mut Vec<RankProcess>, meeting: &Meeting) -> io::Result<Option<RankFailure>> {
        let (mut failure, mut deadline): (Option<RankFailure>, _) = (None, None);
        let (mut left, mut has_killed, mut stuck) = (ranks.len(), false, None);
        let (fewest, mut is_over) = (self.job.min_ranks.unwrap_or(left), false);
        // Survivors of a job that goes on without some ranks may save their last commit.
        let grace = if self.job.min_ranks.is_some() { LONG_GRACE } else { GRACE };
        let end = |ranks: &[RankProcess], grace| {
            ranks.iter().for_each(|rank| rank.signal(Signal::SIGTERM));
            Some(Instant::now() + grace)
        };
        while !ranks.iter().all(RankProcess::has_ended) {
            stuck = if self.is_stuck(ranks) { stuck.or_else(|| Some(Instant::now() + STOPPED)) } else { None };
            let (due, hung) = (deadline.or(stuck), self.next_hung(ranks));
            let look = ranks.iter().any(RankProcess::is_awaited).then(|| Instant::now() + LOOK);
            let event = self.next(due.into_iter().chain(hung).chain(look).min());
            ranks.iter_mut().for_each(|rank| self.has_begun |= rank.becomes_member());
            match event {
                Some(Event::Stopped(rank, is_stopped)) => ranks[rank].stopped = is_stopped.then(Instant::now),
                Some(Event::Ended(rank)) => {
                    let status = ranks[rank].reap()?;
                    // The run is over, whatever waits to join it.
                    if !is_over && self.has_ended_well(ranks) {
                        is_over = true;
                        deadline = deadline.or_else(|| end(ranks, GRACE));
                    }
                    if status.success() || is_over {
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
                    let why = self.why_over(ranks, (left, fewest));
                    if left >= fewest && why.is_none() && self.has_met() {
                        ranks[rank].drain(Instant::now() + LAST_LINES);
                        self.report((rank, status));
                        if self.takes_newcomers(ranks) && self.restarts < self.job.max_restarts {
                            self.restarts += 1;
                            left += usize::from(self.join(ranks, rank, meeting));
                        }
                        continue;
                    }
                    why.into_iter().for_each(|why| report(format!("{why}: the job ends\n").as_bytes()));
                    failure = Some((rank, status));
                    // Ranks that were asked to end may save first.
                    if self.signals == 0 {
                        deadline = deadline.or_else(|| end(ranks, grace));
                    }
                }
                Some(Event::Signaled(SIGUSR1)) => {
                    let running = ranks.iter().filter(|rank| !rank.has_ended()).count();
                    if self.takes_newcomers(ranks) && self.job.max_ranks.is_some_and(|most| running < most) {
                        let place = ranks.iter().position(RankProcess::has_ended).unwrap_or(ranks.len());
                        left += usize::from(self.join(ranks, place, meeting));
                    }
                }
                Some(Event::Signaled(number)) => {
                    self.signals += 1;
                    let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                    ranks.iter().for_each(|rank| rank.signal(signal));
                    // Whoever asks a second time does not want to wait.
                    if self.signals > 1 {
                        deadline = deadline.or_else(|| end(ranks, GRACE));
                    }
                }
                None if due.is_none_or(|due| Instant::now() < due) => {
                    let is_hung = |rank: &&mut RankProcess| rank.stopped.is_some_and(|since| since.elapsed() >= HUNG);
                    for rank in ranks.iter_mut().filter(is_hung) {
                        rank.signal(Signal::SIGKILL);
                        rank.stopped = None;
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
        self.job.min_ranks.is_some()
            && ranks.iter().any(RankProcess::has_ended)
            && left.all(|rank| rank.stopped.is_some())
    }

    /// The time at which the next stopped rank is killed, in a job that newcomers may join.
    fn next_hung(&self, ranks: &[RankProcess]) -> Option<Instant> {
        let stopped = ranks.iter().filter(|rank| !rank.has_ended()).filter_map(|rank| rank.stopped);
        self.job.max_ranks.and(stopped.min()).map(|since| since + HUNG)
    }

    /// Tells whether only newcomers are left of a run that has ended well on a rank: nobody takes them in any more.
    fn has_ended_well(&self, ranks: &[RankProcess]) -> bool {
        self.job.max_ranks.is_some()
            && ranks.iter().any(RankProcess::has_succeeded)
            && ranks.iter().all(|rank| rank.has_ended() || rank.waits())
    }

    /// Tells whether ranks that others may join have met each other: before, they can only be started again.
    fn has_met(&self) -> bool {
        self.job.max_ranks.is_none() || self.has_begun
    }

    /// The reason that a run which others may join is over after a failure, if it is known here. One that has not begun
    /// may start again. Members on other nodes are not known: newcomers themselves find out whether one is left to take
    /// them in. But nobody listens for them once the endpoint's node, which is the first one, has no member.
    fn why_over(&self, ranks: &[RankProcess], (left, fewest): (usize, usize)) -> Option<String> {
        self.job.max_ranks.filter(|_| self.has_begun)?;
        if left < fewest {
            return Some(format!("{left} ranks are left, and at least {fewest} must run"));
        }
        let is_lost = |rank: &RankProcess| !rank.has_succeeded() && (rank.has_ended() || rank.waits());
        let on_node = if self.job.nodes == 1 { "" } else { " on the node at which others join" };
        (self.job.node_rank == 0 && ranks.iter().all(is_lost))
            .then(|| format!("no rank is left{on_node} that was in the run"))
    }

    /// Tells whether newcomers may join: not once the run has ended on a rank, or is to end.
    fn takes_newcomers(&self, ranks: &[RankProcess]) -> bool {
        self.job.max_ranks.is_some() && self.signals == 0 && !ranks.iter().any(RankProcess::has_succeeded)
    }

    /// Starts a newcomer in the place of a rank that has ended, or behind all. Returns false if it cannot be started:
    /// the others go on without it.
    fn join(&mut self, ranks: &mut Vec<RankProcess>, rank: usize, meeting: &Meeting) -> bool {
        self.lines[rank].forget();
        self.starts += 1;
        report(format!("rank {} is started to join the others\n", self.job.rank_of(rank)).as_bytes());
        let newcomer = match self.begin(meeting, rank, (self.starts, true)) {
            Ok(newcomer) => newcomer,
            Err(error) => {
                report(format!("the others go on without rank {}: {error}\n", self.job.rank_of(rank)).as_bytes());
                return false;
            }
        };
        match ranks.get_mut(rank) {
            Some(place) => *place = newcomer,
            None => ranks.push(newcomer),
        }
        true
    }

    /// Prints the end of a rank, and its last lines.
    fn report(&self, (rank, status): RankFailure) {
        let (all, words) = (self.job.rank_of(rank), self.lines[rank].last_words());
        let ending = if words.is_empty() { "" } else { "; its last words:" };
        report(&[format!("rank {all} {}{ending}\n", described(status)).as_bytes(), &words].concat());
    }

    /// The next event; none once the deadline has passed.
    fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else { return self.events.recv().ok() };
        self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }
}

/// The thread that turns signals of this process into events. It ends when this is dropped. A process that was started
/// with SIGCHLD ignored loses the statuses of its children: the handler takes that back.
struct SignalForwarder(Handle);

impl SignalForwarder {
    fn start(events: Sender<Event>, takes_newcomers: bool) -> io::Result<Self> {
        let others = [(!ignores_hangup()).then_some(SIGHUP), takes_newcomers.then_some(SIGUSR1)];
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGCHLD].into_iter().chain(others.into_iter().flatten()))?;
        let handle = signals.handle();
        let forward = move || {
            let sent = signals.forever().filter(|&signal| signal != SIGCHLD);
            sent.for_each(|signal| drop(events.send(Event::Signaled(signal))));
        };
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
