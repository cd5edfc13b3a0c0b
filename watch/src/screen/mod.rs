//! Runs in a terminal, while they train or afterwards: curves, the values of ranks, memory. The program
//! `weftgrad-watch` is [`show`].
//!
//! Files are only read, so no run is disturbed.

mod curves;
mod draw;
mod follow;
mod guard;
mod ranks;
mod state;
#[cfg(test)]
mod tests;
mod text;

use std::{
    io::{self, IsTerminal, Write},
    path::PathBuf,
    time::{Duration, SystemTime},
};

use guard::TerminalGuard;
use numcore::{Error, Result};
use ratatui::{
    Terminal,
    backend::Backend,
    crossterm::event::{self, Event},
};
use state::RunScreen;

/// The width and height of a screen that is printed.
const PRINTED: (u16, u16) = (100, 32);

/// Shows the runs of these folders, or of these files of [`Jsonl`](crate::sink::Jsonl), until a key ends it. The files
/// are read again every `every`. A run that has not written yet is waited for. Where standard output is no terminal,
/// one screen is printed.
///
/// # Errors
/// An error if the terminal cannot be used. The terminal is as before afterwards, after a panic too, and when SIGHUP,
/// SIGINT or SIGTERM ends the process. A file that cannot be read is named on the screen.
pub fn show(runs: &[PathBuf], every: Duration) -> Result<()> {
    let mut screen = RunScreen::of(runs);
    screen.read();
    if !io::stdout().is_terminal() {
        let text = screen.to_text(SystemTime::now(), PRINTED);
        return io::stdout().write_all(text.as_bytes()).map_err(|e| Error::io("standard output", e));
    }
    let _guard = TerminalGuard::start()?;
    let mut terminal = ratatui::try_init().map_err(in_terminal)?;
    let next = || Ok(if event::poll(every)? { Some(event::read()?) } else { None });
    run(&mut terminal, &mut screen, next, SystemTime::now)
}

/// Draws until a key ends it. `next` waits for an event; none says that the files are to be read again.
fn run<B: Backend<Error: Send + Sync + 'static>>(
    terminal: &mut Terminal<B>,
    screen: &mut RunScreen,
    mut next: impl FnMut() -> io::Result<Option<Event>>,
    now: impl Fn() -> SystemTime,
) -> Result<()> {
    loop {
        let drawn = terminal.draw(|frame| screen.draw(now(), frame.area(), frame.buffer_mut()));
        drawn.map_err(|e| in_terminal(io::Error::other(e)))?;
        match next().map_err(in_terminal)? {
            Some(Event::Key(key)) if key.is_press() => {
                if screen.press(key).is_break() {
                    return Ok(());
                }
            }
            // A new size is drawn.
            Some(_) => {}
            None => screen.read(),
        }
    }
}

fn in_terminal(error: io::Error) -> Error {
    Error::io("terminal", error)
}
