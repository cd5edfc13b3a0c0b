//! SIGTERM and Ctrl-C, as a flag that is looked at once a step.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use numcore::{Error, Result};

/// A process has one handler of signals, so this is the one thing here that all runs of a process share.
static ASKED: AtomicBool = AtomicBool::new(false);
static LISTENING: OnceLock<Result<(), String>> = OnceLock::new();

/// Listens from now on for SIGTERM, SIGINT and SIGHUP (on Windows: Ctrl-C and what closes a console). The second one ends the process at once.
pub(super) fn listen() -> Result<()> {
    let listening = LISTENING.get_or_init(|| {
        let asked = || {
            if ASKED.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        };
        ctrlc::set_handler(asked).map_err(|e| e.to_string())
    });
    let why = |e: &String| {
        let why = format!("signals cannot be listened for: {e}; turn it off with `Checkpoints::on_signal(false)`");
        Error::argument("Checkpoints", why)
    };
    listening.as_ref().copied().map_err(why)
}

/// Whether the process was asked to end.
pub(super) fn is_asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}
