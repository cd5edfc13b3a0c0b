//! A progress bar that shows the loss, tokens (or examples) per second, and the time left.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

/// Progress of a training run. Where there is no terminal it prints a line every tenth of the run instead.
pub struct Progress {
    bar: ProgressBar,
    unit: &'static str,
    per_step: usize,
    begun: Instant,
    from: u64,
    total: u64,
}

impl Progress {
    /// A run from step `from` to `total`, each of `per_step` units.
    pub fn new(from: u64, total: u64, per_step: usize, unit: &'static str) -> Progress {
        let bar = ProgressBar::new(total).with_position(from);
        let template = "{wide_bar} {pos}/{len}  {msg}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Progress { bar, unit, per_step, begun: Instant::now(), from, total }
    }

    /// Step `step` is done.
    pub fn step(&self, step: u64, loss: f64) {
        let rate = ((step - self.from) as usize * self.per_step) as f64 / self.begun.elapsed().as_secs_f64();
        let message = format!("loss {loss:.4}  {rate:.0} {}/s", self.unit);
        if self.bar.is_hidden() && (step.is_multiple_of((self.total / 10).max(1)) || step == self.total) {
            println!("step {step}/{}  {message}", self.total);
        }
        self.bar.set_message(message);
        self.bar.set_position(step);
    }

    /// Prints a line above the bar.
    pub fn say(&self, line: &str) {
        if self.bar.is_hidden() { println!("{line}") } else { self.bar.println(line) }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
