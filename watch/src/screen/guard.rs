//! The terminal as it was before, after a signal too.

use std::sync::atomic::{AtomicBool, Ordering};

use numcore::Result;

/// True while a screen is shown.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Leaves the terminal as it was before, when it is dropped, and before a signal ends the process.
pub(super) struct TerminalGuard(());

impl TerminalGuard {
    pub(super) fn start() -> Result<Self> {
        #[cfg(unix)]
        signals::install()?;
        SHOWN.store(true, Ordering::SeqCst);
        Ok(TerminalGuard(()))
    }
}

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        ratatui::restore();
        SHOWN.store(false, Ordering::SeqCst);
    }
}

#[cfg(unix)]
mod signals {
    use std::{
        io,
        sync::{OnceLock, atomic::Ordering},
        thread,
    };

    use numcore::{Error, Result};
    use ratatui::crossterm::{cursor, execute};
    use signal_hook::{
        consts::{SIGHUP, SIGINT, SIGTERM},
        iterator::Signals,
        low_level::emulate_default_handler,
    };

    use super::SHOWN;

    static HANDLER: OnceLock<Result<(), String>> = OnceLock::new();

    /// Waits for signals in a thread of their own, until the process ends: a removed handler would ignore its signal.
    pub(super) fn install() -> Result<()> {
        let install = || {
            let mut each = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
            thread::Builder::new().name("signals".into()).spawn(move || each.forever().for_each(received)).map(|_| ())
        };
        let installed = HANDLER.get_or_init(|| install().map_err(|e: io::Error| e.to_string()));
        installed.clone().map_err(|e| Error::io("handler of signals", io::Error::other(e)))
    }

    /// Ends the process by its signal. Nothing else is written meanwhile.
    fn received(signal: i32) {
        let mut output = io::stdout().lock();
        if SHOWN.load(Ordering::SeqCst) {
            // A terminal that is gone takes nothing.
            let _ = ratatui::try_restore();
            let _ = execute!(output, cursor::Show);
        }
        let _ = emulate_default_handler(signal);
    }
}
