//! [`Terminal`]: progress for people.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, SystemTime},
};

use indicatif::{ProgressBar, ProgressStyle};
use numcore::{Error, Result};

use super::{Record, Sink, Value};

/// A progress bar with the time left and the numbers of the last step. Where there is no terminal (a file, a batch system) it writes a
/// plain line now and then instead: for the first step, the last, and whenever ten seconds have passed.
///
/// ```
/// use train::sink::{Record, Sink, Terminal};
/// # fn main() -> numcore::Result<()> {
/// let mut terminal = Terminal::new().steps(1000).show(["loss", "lr"]);
/// terminal.write(&Record::new(1, 0).scalar("loss", 2.5).scalar("grad_norm", 0.3))?;
/// # Ok(())
/// # }
/// ```
pub struct Terminal {
    total: Option<u64>,
    /// What is shown, and in which order; nothing for the first numbers of each record.
    shown: Option<Vec<String>>,
    every: Duration,
    out: Output,
    first: Option<(u64, SystemTime)>,
    /// The last record for which a line was written, and the last of all.
    written: Option<(u64, SystemTime)>,
    latest: Option<(u64, String)>,
}

enum Output {
    Bar(ProgressBar),
    Lines(Box<dyn Write + Send>),
}

/// Numbers that are shown where nobody chose.
const NUMBERS: usize = 4;

impl Default for Terminal {
    fn default() -> Self {
        Self::new()
    }
}

impl Terminal {
    /// Progress on standard error: a bar if that is a terminal, otherwise lines.
    pub fn new() -> Self {
        if io::stderr().is_terminal() {
            Self::over(Output::Bar(ProgressBar::no_length()))
        } else {
            Self::over(Output::Lines(Box::new(io::stderr())))
        }
    }

    /// Progress as lines, elsewhere.
    pub fn lines_to(out: impl Write + Send + 'static) -> Self {
        Self::over(Output::Lines(Box::new(out)))
    }

    fn over(out: Output) -> Self {
        let every = Duration::from_secs(10);
        Terminal { total: None, shown: None, every, out, first: None, written: None, latest: None }
    }

    /// The length of the run, so that the time left is known.
    pub fn steps(mut self, total: u64) -> Self {
        self.total = Some(total);
        self
    }

    /// The numbers to show; at first the first four of each record.
    pub fn show<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.shown = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// How much time is between two plain lines.
    pub fn every(mut self, time: Duration) -> Self {
        self.every = time;
        self
    }

    fn numbers(&self, record: &Record) -> String {
        let all: Vec<(&str, f64)> = record.scalars().collect();
        let chosen: Vec<(&str, f64)> = match &self.shown {
            Some(names) => names.iter().filter_map(|name| all.iter().copied().find(|(n, _)| n == name)).collect(),
            None => all.into_iter().take(NUMBERS).collect(),
        };
        chosen.iter().map(|(name, x)| format!("  {} {}", plain(name), short(*x))).collect()
    }

    /// Steps done, and the time that those left take at the rate of this run so far.
    fn progress(&self, record: &Record) -> String {
        let Some(total) = self.total else { return format!("step {}", record.step) };
        let left = self.first.and_then(|(step, time)| {
            let done = record.step.checked_sub(step).filter(|&n| n > 0)? as f64;
            let each = record.time.duration_since(time).ok()?.as_secs_f64() / done;
            Duration::try_from_secs_f64(each * total.saturating_sub(record.step) as f64).ok()
        });
        let left = left.map(|left| format!("  {} left", clock(left))).unwrap_or_default();
        format!("step {}/{total}{left}", record.step)
    }

    fn is_due(&self, record: &Record) -> bool {
        let since = self.written.map(|(_, time)| record.time.duration_since(time).unwrap_or_default());
        since.is_none_or(|since| since >= self.every) || self.total == Some(record.step)
    }

    fn show_record(&mut self, record: &Record) -> io::Result<()> {
        let (progress, numbers) = (self.progress(record), self.numbers(record));
        let due = self.is_due(record);
        let line = format!("{progress}{numbers}");
        match &mut self.out {
            Output::Bar(bar) => {
                show_on(bar, record, self.total, numbers);
                for (name, text) in texts(record) {
                    bar.println(format!("{name}: {text}"));
                }
            }
            Output::Lines(out) => {
                if due {
                    writeln!(out, "{line}")?;
                    self.written = Some((record.step, record.time));
                }
                for (name, text) in texts(record) {
                    writeln!(out, "{name}: {text}")?;
                }
            }
        }
        self.latest = Some((record.step, line));
        Ok(())
    }
}

impl Sink for Terminal {
    fn write(&mut self, record: &Record) -> Result<()> {
        if self.first.is_none() {
            self.first = Some((record.step, record.time));
            if let Output::Bar(bar) = &self.out {
                // The time left is measured from where this run began, which may be in the middle.
                bar.set_position(record.step);
                bar.reset_eta();
            }
        }
        self.show_record(record).map_err(|e| Error::io("standard error", e))
    }

    /// Writes the line of the last step, where none was due for it.
    fn flush(&mut self) -> Result<()> {
        let Output::Lines(out) = &mut self.out else { return Ok(()) };
        let missing = self.latest.take().filter(|(step, _)| self.written.is_none_or(|(written, _)| written != *step));
        let line = missing.map_or(Ok(()), |(_, line)| writeln!(out, "{line}"));
        line.and_then(|()| out.flush()).map_err(|e| Error::io("standard error", e))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        match &self.out {
            Output::Bar(bar) => bar.abandon(),
            Output::Lines(_) => {
                // There is nowhere left to say that it failed.
                let _ = self.flush();
            }
        }
    }
}

fn show_on(bar: &ProgressBar, record: &Record, total: Option<u64>, numbers: String) {
    let template = match total {
        Some(total) => {
            bar.set_length(total);
            "{wide_bar} {pos}/{len}{msg}  {eta} left"
        }
        None => "{spinner} step {pos}{msg}  {elapsed}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(numbers);
    bar.set_position(record.step);
}

fn texts(record: &Record) -> impl Iterator<Item = (String, String)> {
    record.values.iter().filter_map(|(name, value)| match value {
        Value::Text(text) => Some((plain(name), plain(text))),
        _ => None,
    })
}

/// The text without what a terminal would obey.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Four digits, in few characters.
fn short(x: f64) -> String {
    let size = x.abs();
    if x == 0.0 || (1e-3..1e6).contains(&size) { format!("{x:.4}") } else { format!("{x:.3e}") }
}

fn clock(time: Duration) -> String {
    let s = time.as_secs();
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s:02}s"),
        (h, m, _) => format!("{h}h{m:02}m"),
    }
}

impl std::fmt::Debug for Terminal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let out = if matches!(self.out, Output::Bar(_)) { "bar" } else { "lines" };
        write!(f, "Terminal({out})")
    }
}
