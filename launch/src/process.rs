//! The process of a rank: its start, the signals it gets, and its end.

use std::{
    env,
    ffi::OsString,
    io::{self, ErrorKind, Read},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Instant,
};

#[cfg(target_os = "linux")]
use nix::unistd::getppid;
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};

use crate::{
    environment::{IS_CHILD, LAUNCHER, MEMBER_FILE, Meeting, REMOVED},
    job::Job,
    lines::{RankLines, Stream},
};

/// An event that the supervisor of a job waits for.
pub(crate) enum Event {
    /// The process of a local rank has ended.
    Ended(usize),
    /// The process of a local rank was stopped, or goes on again.
    Stopped(usize, bool),
    /// This process was signaled.
    Signaled(i32),
}

/// A running process, which leads a process group. Dropping it kills the group.
pub(crate) struct RankProcess {
    child: Child,
    group: Pid,
    status: Option<ExitStatus>,
    /// The time at which the process was stopped by a signal, until it goes on.
    pub(crate) stopped: Option<Instant>,
    /// The file that the process makes once it is in the run, until the file was seen.
    member_file: Option<PathBuf>,
    is_newcomer: bool,
    /// Closed once the last line has been passed on.
    closed: Receiver<()>,
}

impl RankProcess {
    /// Starts a rank of this node, in a start of the job or as a newcomer. `events` gets its end.
    pub(crate) fn start(
        job: &Job,
        meeting: &Meeting,
        (local_rank, (start, is_newcomer)): (usize, (usize, bool)),
        lines: &Arc<RankLines>,
        events: &Sender<Event>,
    ) -> io::Result<Self> {
        let mut command = match &job.through {
            None => Command::new(&job.program),
            Some(through) => {
                let mut command = Command::new(through);
                command.arg(AS_RANK).arg(&job.program);
                command
            }
        };
        for name in REMOVED {
            command.env_remove(name);
        }
        let member_file = meeting.member_file(local_rank, start)?;
        command.args(&job.args).envs(meeting.variables(job, local_rank, (start, is_newcomer)));
        command.envs(member_file.as_ref().map(|file| (MEMBER_FILE, file))).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| not_started(&job.program, error))?;
        let (out, error) = (child.stdout.take(), child.stderr.take());
        let group = Pid::from_raw(child.id().cast_signed());
        let (open, closed) = mpsc::channel::<()>();
        let rank = RankProcess { child, group, status: None, stopped: None, member_file, is_newcomer, closed };
        let pass_on = |from: Box<dyn Read + Send>, stream| {
            let (lines, open) = (lines.clone(), open.clone());
            spawn(move || {
                lines.pass_on(from, stream);
                drop(open);
            })
        };
        out.map_or(Ok(()), |out| pass_on(Box::new(out), Stream::Out))?;
        error.map_or(Ok(()), |error| pass_on(Box::new(error), Stream::Error))?;
        let events = events.clone();
        spawn(move || {
            // Nobody listens once the job has ended with an error.
            while let Some(is_stopped) = next_stop(group) {
                let _ = events.send(Event::Stopped(local_rank, is_stopped));
            }
            let _ = events.send(Event::Ended(local_rank));
        })?;
        Ok(rank)
    }

    /// Sends a signal to the process and those that it has started.
    pub(crate) fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            // A group that has just ended needs no signal.
            let _ = killpg(self.group, signal);
        }
    }

    /// Takes the status of a process that has ended. Kills those that it has left behind.
    pub(crate) fn reap(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.status {
            return Ok(status);
        }
        self.signal(Signal::SIGKILL);
        let status = self.child.wait()?;
        self.status = Some(status);
        Ok(status)
    }

    /// Waits until the last line of this process has been passed on, or until a time.
    pub(crate) fn drain(&self, until: Instant) {
        // Nothing is sent: the channel is closed with the last stream.
        let _ = self.closed.recv_timeout(until.saturating_duration_since(Instant::now()));
    }

    pub(crate) fn has_succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.status.is_some()
    }

    /// Tells whether the process has said that it is in the run since the last call. Its file is seen once: nothing
    /// that happens to the file later takes that back.
    pub(crate) fn becomes_member(&mut self) -> bool {
        self.member_file.take_if(|file| file.exists()).is_some()
    }

    /// Tells whether the process may still say that it is in the run.
    pub(crate) fn is_awaited(&self) -> bool {
        self.status.is_none() && self.member_file.is_some()
    }

    /// Tells whether this is a newcomer that the others have not taken in.
    pub(crate) fn waits(&self) -> bool {
        self.is_newcomer && self.member_file.is_some()
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        // A process that cannot be reaped is the system's.
        let _ = self.reap();
    }
}

/// Waits until a process is stopped (true), goes on (false), or has ended (none).
fn next_stop(process: Pid) -> Option<bool> {
    let stops = WaitPidFlag::WSTOPPED | WaitPidFlag::WCONTINUED;
    loop {
        // A process that has ended stays a zombie, whose number nobody else gets, until it is reaped.
        match waitid(Id::Pid(process), stops | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Err(Errno::EINTR) => {}
            Err(_) | Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) => return None,
            // Takes the change that was seen, or one since; none if the process has ended meanwhile.
            Ok(_) => match waitid(Id::Pid(process), stops | WaitPidFlag::WNOHANG) {
                Ok(WaitStatus::Stopped(..)) => return Some(true),
                Ok(WaitStatus::Continued(_)) => return Some(false),
                _ => {}
            },
        }
    }
}

/// The status in words.
pub(crate) fn described(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(number)) => {
            let name = Signal::try_from(number).map_or("an unknown signal", Signal::as_str);
            format!("was killed by signal {number} ({name})")
        }
        (None, None) => "ended".into(),
    }
}

/// The exit status of a shell whose last program had this one.
pub(crate) fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

fn spawn(body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().spawn(body).map(drop)
}

fn not_started(program: &OsString, error: io::Error) -> io::Error {
    let hint = match error.kind() {
        ErrorKind::NotFound => ": give its path, as in `./program`, or a name that is found on PATH",
        ErrorKind::PermissionDenied => ": it is no program, or you may not execute it",
        _ => "",
    };
    io::Error::new(error.kind(), format!("`{}` cannot be started: {error}{hint}", program.display()))
}

/// The first argument of a process that is to become a rank.
const AS_RANK: &str = "--as-rank";

/// Becomes the program of a rank, if this process was started [for that](Job::through); returns none otherwise. The
/// rank ends with its launcher, however that ends. Called first of all.
///
/// # Errors
/// The error if the program cannot be started.
pub fn become_rank() -> Option<io::Error> {
    let mut args = env::args_os().skip(1);
    if args.next()? != AS_RANK {
        return None;
    }
    let program = args.next()?;
    end_with_parent(true);
    Some(not_started(&program, Command::new(&program).args(args).exec()))
}

/// Lets this process end with the launcher that has started it, even one that is killed. Does nothing in a process of
/// another launcher, and on systems other than Linux.
#[cfg(target_os = "linux")]
pub fn end_with_launcher() {
    end_with_parent(env::var_os(IS_CHILD).is_some());
}

/// Lets this process end with its parent, if that is the launcher. If it must be, and is no longer, ends this process.
#[cfg(target_os = "linux")]
fn end_with_parent(must_be_launcher: bool) {
    let is_launched = || env::var(LAUNCHER).is_ok_and(|id| id == getppid().to_string());
    let is_set = is_launched() && nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_ok();
    // A parent that has ended before this call sends no signal.
    if (is_set || must_be_launcher) && !is_launched() {
        eprintln!("the launcher of this process has ended: this process ends too");
        std::process::exit(1);
    }
}

/// Lets this process end with the launcher that has started it, even one that is killed. Does nothing in a process of
/// another launcher, and on systems other than Linux.
#[cfg(not(target_os = "linux"))]
pub fn end_with_launcher() {}

#[cfg(not(target_os = "linux"))]
fn end_with_parent(_: bool) {}
