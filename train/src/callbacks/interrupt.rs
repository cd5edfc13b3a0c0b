//! SIGTERM and Ctrl-C, as a flag that is looked at once a step.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use numcore::{Error, Result};

/// What all runs of this process share, as a process has one handler of signals.
#[derive(Debug, Default)]
struct Signals {
    /// Callbacks of runs that are not over.
    listeners: usize,
    asked: bool,
}

static SIGNALS: Mutex<Signals> = Mutex::new(Signals { listeners: 0, asked: false });
static HANDLER: OnceLock<Result<(), String>> = OnceLock::new();

fn signals() -> MutexGuard<'static, Signals> {
    SIGNALS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives, SIGTERM, SIGINT and SIGHUP (on Windows: Ctrl-C and what closes a console) are noted; the second one ends the process at once. When
/// the last one is gone, the signal is forgotten, and the next one ends the process again.
#[derive(Debug)]
pub(super) struct Listening(());

impl Listening {
    pub fn start() -> Result<Self> {
        // The handler runs in a thread of its own, which may wait for a lock.
        let handler = || {
            let mut signals = signals();
            if signals.listeners == 0 || signals.asked {
                std::process::exit(130);
            }
            signals.asked = true;
        };
        let installed = HANDLER.get_or_init(|| ctrlc::set_handler(handler).map_err(|e| e.to_string()));
        if let Err(e) = installed {
            let why = format!(
                "signals cannot be listened for: {e}; leave `StopOnSignal` out, and give `Checkpoints::on_signal(false)`"
            );
            return Err(Error::argument("Trainer::run", why));
        }
        signals().listeners += 1;
        Ok(Listening(()))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let mut signals = signals();
        signals.listeners -= 1;
        if signals.listeners == 0 {
            signals.asked = false;
        }
    }
}

/// Whether a signal came.
pub(crate) fn is_asked() -> bool {
    signals().asked
}
