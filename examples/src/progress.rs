//! A progress bar that shows the loss, tokens (or examples) per second, and the time left.

use std::{cell::Cell, time::Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress of a training run. Where there is no terminal it prints a line every tenth of the run instead.
pub struct Progress {
    bar: ProgressBar,
    unit: &'static str,
    per_step: usize,
    begun: Instant,
    from: u64,
    /// Tenths of the run that a line was printed for.
    printed: Cell<u64>,
}

impl Progress {
    /// A run that goes on after step `from`, each step of `per_step` units.
    pub fn new(from: u64, per_step: usize, unit: &'static str) -> Progress {
        let bar = ProgressBar::new(from).with_position(from);
        let template = "{wide_bar} {pos}/{len}  {msg}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Progress { bar, unit, per_step, begun: Instant::now(), from, printed: Cell::new(0) }
    }

    /// Step `step` of `total` is done. The total may change from step to step.
    pub fn step(&self, step: u64, total: u64, loss: f64) {
        let rate = ((step - self.from) as usize * self.per_step) as f64 / self.begun.elapsed().as_secs_f64();
        let message = format!("loss {loss:.4}  {rate:.0} {}/s", self.unit);
        let tenths = 10 * step / total.max(1);
        if self.bar.is_hidden() && tenths > self.printed.replace(tenths.max(self.printed.get())) {
            println!("step {step}/{total}  {message}");
        }
        self.bar.set_length(total);
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
