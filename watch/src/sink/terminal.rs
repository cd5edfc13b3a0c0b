//! [`Terminal`]: progress for people.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, SystemTime},
};

use indicatif::{ProgressBar, ProgressStyle};
use numcore::{Error, Result};

use super::{Record, Sink, Value};

/// Shows a progress bar with the time left and the numbers of the last step. Without a terminal (a file, a batch
/// system) it writes plain lines instead: for the first step, the last, and whenever ten seconds have passed. The
/// length of the run comes with each record of a training loop of the crate `train`; in a custom loop
/// [`steps`](Terminal::steps) sets it.
///
/// ```
/// use watch::sink::{Record, Sink, Terminal};
/// # fn main() -> numcore::Result<()> {
/// let mut terminal = Terminal::new().steps(1000).show(["loss", "lr"]);
/// terminal.write(&Record::new(1, 0).scalar("loss", 2.5).scalar("grad_norm", 0.3))?;
/// # Ok(())
/// # }
/// ```
pub struct Terminal {
    total: Option<u64>,
    /// The names of the shown numbers, in their order; none for the first numbers of each record.
    shown: Option<Vec<String>>,
    /// Numbers that get a line whenever they are recorded.
    announced: Vec<String>,
    every: Duration,
    out: Output,
    first: Option<(Done, SystemTime)>,
    /// Step and time of the last record with a line; `latest` has the last record of all.
    written: Option<(u64, SystemTime)>,
    latest: Option<(u64, String)>,
    /// True once the warning of a loss that is not finite was shown.
    has_warned: bool,
}

enum Output {
    Bar(ProgressBar),
    Lines(Box<dyn Write + Send>),
}

/// The progress of a run and its length, in steps or as fractions of the whole.
#[derive(Clone, Copy)]
struct Done {
    now: f64,
    all: f64,
}

/// The number of shown numbers by default.
const NUMBERS: usize = 4;

impl Default for Terminal {
    fn default() -> Self {
        Self::new()
    }
}

impl Terminal {
    /// Shows progress on standard error: a bar if that is a terminal, otherwise lines.
    pub fn new() -> Self {
        if io::stderr().is_terminal() {
            Self::over(Output::Bar(ProgressBar::no_length()))
        } else {
            Self::over(Output::Lines(Box::new(io::stderr())))
        }
    }

    /// Shows progress as lines written to `out`.
    pub fn lines_to(out: impl Write + Send + 'static) -> Self {
        Self::over(Output::Lines(Box::new(out)))
    }

    fn over(out: Output) -> Self {
        let every = Duration::from_secs(10);
        Terminal {
            total: None,
            shown: None,
            announced: Vec::new(),
            every,
            out,
            first: None,
            written: None,
            latest: None,
            has_warned: false,
        }
    }

    /// Sets the length of the run in steps, so that the time left is known.
    pub fn steps(mut self, total: u64) -> Self {
        self.total = Some(total);
        self
    }

    /// Sets the numbers to show; at first the first four of each record.
    pub fn show<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.shown = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the numbers whose every value gets a line of its own, such as values of evaluations: in a terminal above
    /// the bar.
    pub fn announce<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.announced = names.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the time between two plain lines.
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

    fn done(&self, record: &Record) -> Option<Done> {
        match (self.total, record.fraction) {
            (Some(total), _) => Some(Done { now: record.step as f64, all: total as f64 }),
            (None, Some(now)) => Some(Done { now, all: 1.0 }),
            (None, None) => None,
        }
    }

    /// The steps done, and the time left at the rate of this run so far.
    fn progress(&self, record: &Record) -> String {
        let Some(done) = self.done(record) else { return format!("step {}", record.step) };
        let left = self.first.and_then(|(first, time)| {
            let since = Some(done.now - first.now).filter(|since| *since > 0.0)?;
            let each = record.time.duration_since(time).ok()?.as_secs_f64() / since;
            Duration::try_from_secs_f64(each * (done.all - done.now).max(0.0)).ok()
        });
        let left = left.map(|left| format!("  {} left", clock(left))).unwrap_or_default();
        match self.total {
            Some(total) => format!("step {}/{total}{left}", record.step),
            None => format!("step {} ({:.0} %){left}", record.step, 100.0 * done.now),
        }
    }

    fn is_due(&self, record: &Record) -> bool {
        let since = self.written.map(|(_, time)| record.time.duration_since(time).unwrap_or_default());
        since.is_none_or(|since| since >= self.every) || self.total == Some(record.step)
    }

    fn is_announced(&self, record: &Record) -> bool {
        record.scalars().any(|(name, _)| self.announced.iter().any(|announced| announced == name))
    }

    /// The warning of a loss that is not finite, once.
    fn warning(&mut self, record: &Record) -> Option<(String, String)> {
        let (_, loss) = record.scalars().find(|(name, x)| *name == "loss" && !x.is_finite())?;
        let is_first = !std::mem::replace(&mut self.has_warned, true);
        let why = format!("the loss of step {} is {loss}; `NonFinite::stop()` ends a run there", record.step);
        is_first.then(|| ("warning".into(), why))
    }

    fn show_record(&mut self, record: &Record) -> io::Result<()> {
        let (progress, numbers) = (self.progress(record), self.numbers(record));
        let (due, announced) = (self.is_due(record), self.is_announced(record));
        let line = format!("{progress}{numbers}");
        let warning = self.warning(record);
        match &mut self.out {
            Output::Bar(bar) => {
                show_on(bar, record, self.total, &numbers);
                if announced {
                    bar.println(format!("step {}{numbers}", record.step));
                }
                for (name, text) in warning.into_iter().chain(texts(record)) {
                    bar.println(format!("{name}: {text}"));
                }
            }
            Output::Lines(out) => {
                if due || announced {
                    writeln!(out, "{line}")?;
                    self.written = Some((record.step, record.time));
                }
                for (name, text) in warning.into_iter().chain(texts(record)) {
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
        if self.first.is_none()
            && let Some(done) = self.done(record)
        {
            self.first = Some((done, record.time));
            if let Output::Bar(bar) = &self.out {
                // The time left is measured from the beginning of this run, which may be in the middle.
                show_on(bar, record, self.total, "");
                bar.reset_eta();
            }
        }
        self.show_record(record).map_err(|e| Error::io("standard error", e))
    }

    /// Writes the line of the last step, if none was due for it.
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
            // A rank that was given no record has drawn nothing, and draws nothing now.
            Output::Bar(bar) if self.first.is_some() => bar.abandon(),
            Output::Bar(_) => {}
            Output::Lines(_) => {
                // There is nowhere left to report a failure.
                let _ = self.flush();
            }
        }
    }
}

/// The number of parts that a run is divided into if its length is not in steps.
const PARTS: f64 = 1000.0;

fn show_on(bar: &ProgressBar, record: &Record, total: Option<u64>, numbers: &str) {
    let (template, length, position, message) = match (total, record.fraction) {
        (Some(total), _) => ("{wide_bar} {pos}/{len}{msg}  {eta} left", Some(total), record.step, numbers.to_owned()),
        (None, Some(fraction)) => {
            let message = format!("  step {}{numbers}", record.step);
            ("{wide_bar} {percent} %{msg}  {eta} left", Some(PARTS as u64), (fraction * PARTS) as u64, message)
        }
        (None, None) => ("{spinner} step {pos}{msg}  {elapsed}", None, record.step, numbers.to_owned()),
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    if let Some(length) = length {
        bar.set_length(length);
    }
    bar.set_message(message);
    bar.set_position(position);
}

fn texts(record: &Record) -> impl Iterator<Item = (String, String)> {
    record.values.iter().filter_map(|(name, value)| match value {
        Value::Text(text) => Some((plain(name), plain(text))),
        _ => None,
    })
}

/// Removes control characters that a terminal would obey from the text.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// A number with four digits after the point, or three and an exponent.
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
