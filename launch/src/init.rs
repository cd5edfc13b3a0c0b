//! The first process of a container, which reaps all processes whose parents have ended.

use std::{env, io, os::unix::process::CommandExt, process::Command, thread};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};
use signal_hook::{
    consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1},
    iterator::Signals,
};

/// Runs this program once more as a child, if this process is the first of a container. Returns the exit status of the
/// child; none in any other process. Signals go to the child, which is in a process group of its own: it gets those of
/// a terminal through this process alone. All orphans are reaped meanwhile, and end with this process. Called before
/// any thread is started.
///
/// # Errors
/// An error if the program cannot be started.
pub fn run_below_init() -> Option<io::Result<u8>> {
    (std::process::id() == 1).then(run)
}

fn run() -> io::Result<u8> {
    // Before the child, so that no signal is lost. The system drops those for the first process that it does not take,
    // also the ones that end or stop any other process.
    // With SIGCHLD ignored it would also drop the status of the child.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGUSR1, SIGCHLD])?;
    let child = Command::new(env::current_exe()?).args(env::args_os().skip(1)).process_group(0).spawn()?;
    let child = Pid::from_raw(child.id().cast_signed());
    let forward = move || {
        for signal in signals.forever().filter(|&signal| signal != SIGCHLD) {
            // A child that has just ended needs none.
            let _ = Signal::try_from(signal).map(|signal| kill(child, signal));
        }
    };
    thread::Builder::new().spawn(forward)?;
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == child => return Ok(u8::try_from(code).unwrap_or(1)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => return Ok(128 + signal as u8),
            // The child is no longer there, and its end had no name: that of one killed by a real-time signal has none.
            Err(_) if kill(child, None).is_err() => return Ok(1),
            // Such an orphan is reaped all the same.
            Ok(_) | Err(_) => {}
        }
    }
}
