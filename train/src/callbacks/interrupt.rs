//! SIGTERM and Ctrl-C, as a flag that is looked at once a step.

use std::{
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use numcore::{Error, Result};

/// What comes sooner after the first signal is that signal once more: a launcher forwards what its processes were sent already.
const AGAIN: Duration = Duration::from_secs(1);
/// The numbers of the signals in the status of a process that one of them ended: 128 and the number.
const SIGINT: i32 = 2;
#[cfg(unix)]
const SIGTERM: i32 = 15;

/// What all runs of this process share, as a process has one handler of signals.
#[derive(Debug, Default)]
struct Signals {
    /// Callbacks of runs that are not over.
    listeners: usize,
    /// When the first signal came.
    first: Option<Instant>,
}

static SIGNALS: Mutex<Signals> = Mutex::new(Signals { listeners: 0, first: None });
/// Whether a signal came, for whoever looks at it in every step.
static ASKED: AtomicBool = AtomicBool::new(false);
static HANDLER: OnceLock<Result<(), String>> = OnceLock::new();

fn signals() -> MutexGuard<'static, Signals> {
    SIGNALS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives, SIGTERM and SIGINT (on other systems than Unix: Ctrl-C) are noted; another one that comes at least a second later ends the process at once. When
/// the last one is gone, the signal is forgotten, and the next one ends the process again.
#[derive(Debug)]
pub(crate) struct Listening(());

impl Listening {
    pub fn start() -> Result<Self> {
        let installed = HANDLER.get_or_init(install);
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

/// Whether a run of this process listens.
pub(crate) fn is_listening() -> bool {
    signals().listeners > 0
}

impl Drop for Listening {
    fn drop(&mut self) {
        let mut signals = signals();
        signals.listeners -= 1;
        if signals.listeners == 0 {
            signals.first = None;
            ASKED.store(false, Ordering::SeqCst);
        }
    }
}

/// Hands signals to [`received`], in a thread of their own. SIGHUP stays what it is: who starts a program with `nohup` wants it to be ignored.
#[cfg(unix)]
fn install() -> Result<(), String> {
    let mut each = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).map_err(|e| e.to_string())?;
    let listen = move || each.forever().for_each(received);
    std::thread::Builder::new().name("signals".into()).spawn(listen).map(|_| ()).map_err(|e| e.to_string())
}

#[cfg(not(unix))]
fn install() -> Result<(), String> {
    ctrlc::set_handler(|| received(SIGINT)).map_err(|e| e.to_string())
}

/// Takes note of a signal, or ends the process.
fn received(signal: i32) {
    let mut signals = signals();
    let again = signals.first.is_some_and(|first| first.elapsed() >= AGAIN);
    if signals.listeners == 0 || again {
        std::process::exit(128 + signal);
    }
    signals.first.get_or_insert_with(Instant::now);
    ASKED.store(true, Ordering::SeqCst);
}

/// Whether a signal came.
pub(crate) fn is_asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}
