//! SIGTERM and Ctrl-C, as a flag that is read once a step.

use std::{
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use numcore::{Error, Result};

/// The time after the first signal within which another one counts as a repetition: a launcher forwards signals that
/// its processes have received already.
const AGAIN: Duration = Duration::from_secs(1);
/// Numbers of the signals: a process that one of them ended has the status 128 plus the number.
const SIGINT: i32 = 2;
#[cfg(unix)]
const SIGTERM: i32 = 15;

/// The state that all runs of this process share, as a process has one handler of signals.
#[derive(Debug, Default)]
struct Signals {
    /// The number of callbacks of runs that are not over.
    listeners: usize,
    /// The time of the first signal.
    first: Option<Instant>,
}

static SIGNALS: Mutex<Signals> = Mutex::new(Signals { listeners: 0, first: None });
/// True once a signal came; every step reads it.
static SIGNALED: AtomicBool = AtomicBool::new(false);
static HANDLER: OnceLock<Result<(), String>> = OnceLock::new();

fn signals() -> MutexGuard<'static, Signals> {
    SIGNALS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A listener: while it lives, SIGTERM and SIGINT (on other systems than Unix: Ctrl-C) are noted. Another signal that
/// comes at least a second later ends the process at once. When the last listener is gone, the signal is cleared, and
/// the next one ends the process again.
#[derive(Debug)]
pub(crate) struct SignalListener(());

impl SignalListener {
    pub(crate) fn start() -> Result<Self> {
        let installed = HANDLER.get_or_init(install);
        if let Err(e) = installed {
            let why = format!(
                "no handler of signals can be installed: {e}; leave `StopOnSignal` out, and call `Checkpoints::ignore_signals`"
            );
            return Err(Error::unsupported("Trainer::run", why));
        }
        signals().listeners += 1;
        Ok(SignalListener(()))
    }
}

/// Tells whether a run of this process listens.
pub(crate) fn is_listening() -> bool {
    signals().listeners > 0
}

impl Drop for SignalListener {
    fn drop(&mut self) {
        let mut signals = signals();
        signals.listeners -= 1;
        if signals.listeners == 0 {
            signals.first = None;
            SIGNALED.store(false, Ordering::SeqCst);
        }
    }
}

/// Passes signals to [`received`], in a thread of their own. SIGHUP keeps its handler: `nohup` starts programs that are
/// to ignore it.
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

/// Stores a signal, or ends the process.
fn received(signal: i32) {
    let mut signals = signals();
    let again = signals.first.is_some_and(|first| first.elapsed() >= AGAIN);
    if signals.listeners == 0 || again {
        std::process::exit(128 + signal);
    }
    signals.first.get_or_insert_with(Instant::now);
    SIGNALED.store(true, Ordering::SeqCst);
}

/// Tells whether a signal came.
pub(crate) fn is_signaled() -> bool {
    SIGNALED.load(Ordering::Relaxed)
}
