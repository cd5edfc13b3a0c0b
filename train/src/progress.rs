//! Progress of a run, its length, and intervals of actions.

use std::time::Duration;

use numcore::{Error, Result};

/// The progress of a run: equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// The number of updates so far, over the whole run.
    pub step: u64,
    /// The epoch of the next batch, from 0.
    pub epoch: u64,
    /// The positions of this epoch that all ranks together have read.
    pub position: u64,
    /// The number of positions in an epoch.
    pub epoch_len: u64,
    /// The sum of loss weights so far: tokens, where losses are sums over tokens, and examples, where they are sums
    /// over examples.
    pub tokens: f64,
    /// The time that the run has trained by the clock of rank 0, resumed parts included. It is read once a step, at the
    /// step's end. Within the callbacks of a step it is thus the end time of the previous step.
    pub elapsed: Duration,
}

impl Progress {
    /// The number of epochs so far, with the fraction of the current one.
    pub fn epochs(&self) -> f64 {
        self.epoch as f64 + self.position as f64 / self.epoch_len.max(1) as f64
    }
}

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// A number of updates.
    Steps(u64),
    /// A number of passes through the data; a fraction ends within an epoch.
    Epochs(f64),
    /// A sum of loss weights: tokens, where losses are sums over tokens.
    Tokens(u64),
    /// A time of training in seconds, resumed parts included, by the clock of rank 0.
    Seconds(f64),
}

impl Length {
    /// Tells whether a run with this progress is at its end.
    pub fn is_reached(&self, at: &Progress) -> bool {
        self.fraction(at) >= 1.0
    }

    /// The fraction of the run that is done: from 0, and 1 or more at its end.
    pub fn fraction(&self, at: &Progress) -> f64 {
        let of = |done: f64, all: f64| if all > 0.0 { done / all } else { 1.0 };
        match *self {
            Length::Steps(n) => of(at.step as f64, n as f64),
            Length::Epochs(n) => of(at.epochs(), n),
            Length::Tokens(n) => of(at.tokens, n as f64),
            Length::Seconds(s) => of(at.elapsed.as_secs_f64(), s),
        }
    }

    pub(crate) fn counts_tokens(&self) -> bool {
        matches!(self, Length::Tokens(_))
    }

    pub(crate) fn check(&self) -> Result<()> {
        match *self {
            Length::Epochs(x) | Length::Seconds(x) if !(x >= 0.0 && x.is_finite()) => {
                Err(Error::config("Trainer", "until", format!("a run cannot last {self:?}")))
            }
            _ => Ok(()),
        }
    }
}

/// The interval of an action. It is due at the end of the first step at which another whole interval has passed since
/// the run began. Due steps thus depend on the run alone, not on the step at which it was resumed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interval {
    /// A number of updates.
    Steps(u64),
    /// A number of passes through the data: `Epochs(0.25)` is four times in each.
    Epochs(f64),
    /// A sum of loss weights: tokens, where losses are sums over tokens.
    Tokens(u64),
    /// A fraction of the run's length: `Fraction(0.1)` is ten times in a run.
    Fraction(f64),
    /// A time of training in seconds, by the clock of rank 0.
    Seconds(f64),
    /// No interval: the action is never due.
    Never,
}

impl Interval {
    /// Tells whether a step that led from one point to another has completed an interval.
    pub fn is_due(&self, from: &Progress, to: &Progress, length: &Length) -> bool {
        // A quotient such as 0.3 / 0.1, which is rounded to just below 3, counts as a whole one.
        let whole = |at: f64, each: f64| (at / each + 1e-9).floor();
        let passed = |a: f64, b: f64, each: f64| each > 0.0 && whole(b, each) > whole(a, each);
        match *self {
            Interval::Steps(0) | Interval::Never => false,
            Interval::Steps(n) => to.step / n > from.step / n,
            Interval::Epochs(e) => passed(from.epochs(), to.epochs(), e),
            Interval::Tokens(n) => passed(from.tokens, to.tokens, n as f64),
            Interval::Fraction(f) => passed(length.fraction(from), length.fraction(to), f),
            Interval::Seconds(s) => passed(from.elapsed.as_secs_f64(), to.elapsed.as_secs_f64(), s),
        }
    }

    pub(crate) fn counts_tokens(&self) -> bool {
        matches!(self, Interval::Tokens(_))
    }

    pub(crate) fn check(&self, of: &'static str) -> Result<()> {
        let positive = match *self {
            Interval::Steps(n) | Interval::Tokens(n) => n > 0,
            Interval::Epochs(x) | Interval::Fraction(x) | Interval::Seconds(x) => x > 0.0 && x.is_finite(),
            Interval::Never => true,
        };
        if positive {
            return Ok(());
        }
        let why = format!("{of}: nothing can happen every {self:?}; give a positive number, or `Interval::Never`");
        Err(Error::config("Trainer", "every", why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64) -> Progress {
        let elapsed = Duration::from_millis(700 * step);
        Progress { step, epoch: step / 10, position: step % 10 * 4, epoch_len: 40, tokens: 32.0 * step as f64, elapsed }
    }

    /// The steps of a run of `length` at whose end the interval is due.
    fn due(interval: Interval, length: Length) -> Vec<u64> {
        (1..)
            .take_while(|&s| !length.is_reached(&at(s - 1)))
            .filter(|&s| interval.is_due(&at(s - 1), &at(s), &length))
            .collect()
    }

    #[test]
    fn intervals_are_due_when_a_whole_one_has_passed() {
        let twenty = Length::Steps(20);
        assert_eq!(due(Interval::Steps(7), twenty), [7, 14]);
        assert_eq!(due(Interval::Epochs(1.0), twenty), [10, 20]);
        assert_eq!(due(Interval::Epochs(0.3), twenty), [3, 6, 9, 12, 15, 18]);
        assert_eq!(due(Interval::Epochs(0.25), twenty), [3, 5, 8, 10, 13, 15, 18, 20]);
        assert_eq!(due(Interval::Tokens(100), twenty), [4, 7, 10, 13, 16, 19]);
        assert_eq!(due(Interval::Fraction(0.25), twenty), [5, 10, 15, 20]);
        assert_eq!(due(Interval::Fraction(0.1), Length::Epochs(1.0)), (1..=10).collect::<Vec<_>>());
        assert_eq!(due(Interval::Seconds(2.0), twenty), [3, 6, 9, 12, 15, 18, 20]);
        assert_eq!(due(Interval::Never, twenty), [0; 0]);
    }

    #[test]
    fn an_interval_shorter_than_a_step_is_due_once_a_step() {
        assert_eq!(due(Interval::Tokens(5), Length::Steps(3)), [1, 2, 3]);
        assert_eq!(due(Interval::Seconds(0.01), Length::Steps(3)), [1, 2, 3]);
    }

    #[test]
    fn lengths_end() {
        let steps = |length: Length| (0..).find(|&s| length.is_reached(&at(s))).unwrap();
        assert_eq!(steps(Length::Steps(12)), 12);
        assert_eq!(steps(Length::Epochs(1.5)), 15);
        assert_eq!(steps(Length::Tokens(65)), 3);
        assert_eq!(steps(Length::Seconds(2.0)), 3);
        assert_eq!([Length::Steps(0), Length::Epochs(0.0), Length::Tokens(0), Length::Seconds(0.0)].map(steps), [0; 4]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for length in [Length::Epochs(f64::NAN), Length::Seconds(-1.0), Length::Epochs(f64::INFINITY)] {
            assert!(length.check().is_err(), "{length:?}");
        }
        for every in [Interval::Steps(0), Interval::Fraction(0.0), Interval::Seconds(f64::NAN), Interval::Epochs(-1.0)]
        {
            let error = every.check("Evaluate").unwrap_err().to_string();
            assert!(error.contains("Evaluate: nothing can happen every"), "{error}");
        }
    }
}
