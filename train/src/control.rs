//! Requests of callbacks to a run, and the exchange by which ranks agree on them.

use std::time::Duration;

use distributed::comm::{Collectives, Comm, Communicator};
use numcore::{Result, Runtime};

/// The reason for which a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The run has reached its length.
    Finished,
    /// A callback stopped the run, for the reason in the text.
    Requested(String),
    /// The process received a signal: SIGTERM, or SIGINT (Ctrl-C).
    Interrupted,
}

/// The requests of this rank's callbacks. A request of one rank is done by all ranks, at the end of the same step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Control {
    stop: Option<String>,
    interrupted: bool,
    save: Option<Selection>,
    evaluate: Option<Selection>,
    go_back: bool,
    skip: u64,
}

/// The evaluations that run at the end of a step, or the callbacks that save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Selection {
    /// Only the ones whose interval has passed, or that have another reason of their own.
    Due,
    All,
}

impl Control {
    /// Ends the run after this step; the first reason of the lowest rank that has one is reported.
    pub fn stop(&mut self, why: impl Into<String>) {
        self.stop.get_or_insert_with(|| why.into());
    }

    /// Ends the run after this step as a signal does: checkpoints are saved before evaluations, which run when the run
    /// is resumed.
    pub fn interrupt(&mut self) {
        self.interrupted = true;
    }

    /// Saves a checkpoint after this step, in every folder there is.
    pub fn save(&mut self) {
        self.save = Some(Selection::All);
    }

    pub(crate) fn save_due(&mut self) {
        self.save = self.save.max(Some(Selection::Due));
    }

    /// Runs all evaluations after this step.
    pub fn evaluate(&mut self) {
        self.evaluate = Some(Selection::All);
    }

    pub(crate) fn evaluate_due(&mut self) {
        self.evaluate = self.evaluate.max(Some(Selection::Due));
    }

    /// Skips the next batches; where ranks request different numbers, the largest counts.
    pub fn skip_batches(&mut self, batches: u64) {
        self.skip = self.skip.max(batches);
    }

    /// Skips the rest of the epoch.
    pub fn skip_epoch(&mut self) {
        self.skip = u64::MAX;
    }

    /// Goes back to the last checkpoint, and on from there with the next batches: the batches since the checkpoint are
    /// left out.
    pub fn go_back(&mut self) {
        self.go_back = true;
    }
}

/// The requests that all ranks do after a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Agreed {
    pub stop: Option<StopReason>,
    pub save: Option<Selection>,
    pub evaluate: Option<Selection>,
    pub go_back: bool,
    /// The number of batches to skip; `u64::MAX` is the rest of the epoch.
    pub skip: u64,
    /// True if a rank has recorded scalars.
    pub recorded: bool,
    /// The duration of the run by the clock of rank 0.
    pub elapsed: Duration,
}

const STOP: u8 = 1;
const INTERRUPTED: u8 = 2;
const SAVE_ALL: u8 = 4;
const EVALUATE_DUE: u8 = 8;
const EVALUATE_ALL: u8 = 16;
const GO_BACK: u8 = 32;
const RECORDED: u8 = 64;
const SAVE_DUE: u8 = 128;

/// A rank's requests: flags, batches to skip, and a clock.
type RequestBytes = [u8; 17];

impl Control {
    fn to_bytes(&self, recorded: bool, elapsed: Duration) -> RequestBytes {
        let flag = |flag: u8, set: bool| if set { flag } else { 0 };
        let mut bytes = [0; 17];
        bytes[0] = flag(STOP, self.stop.is_some())
            | flag(INTERRUPTED, self.interrupted)
            | flag(SAVE_DUE, self.save == Some(Selection::Due))
            | flag(SAVE_ALL, self.save == Some(Selection::All))
            | flag(EVALUATE_DUE, self.evaluate == Some(Selection::Due))
            | flag(EVALUATE_ALL, self.evaluate == Some(Selection::All))
            | flag(GO_BACK, self.go_back)
            | flag(RECORDED, recorded);
        bytes[1..9].copy_from_slice(&self.skip.to_le_bytes());
        bytes[9..].copy_from_slice(&u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).to_le_bytes());
        bytes
    }

    /// Combines the requests of all ranks, in one exchange of a few bytes, and in one more where a callback stops the
    /// run. One rank exchanges nothing. No request is left afterwards.
    pub(crate) fn agree<R: Runtime>(&mut self, comm: &Comm<R>, recorded: bool, elapsed: Duration) -> Result<Agreed> {
        let own = std::mem::take(self);
        if comm.size() == 1 {
            let reason = own.stop.clone();
            return Ok(Agreed::of(&[own.to_bytes(recorded, elapsed)], reason));
        }
        let requests = comm.exchange_equal(own.to_bytes(recorded, elapsed))?;
        let stops = requests.iter().any(|bytes| bytes[0] & STOP != 0);
        let reason = if stops { first_reason(comm, own.stop.as_deref())? } else { None };
        Ok(Agreed::of(&requests, reason))
    }
}

/// The reason of the lowest rank that has one.
fn first_reason<R: Runtime>(comm: &Comm<R>, own: Option<&str>) -> Result<Option<String>> {
    let all = comm.exchange(own.unwrap_or("").as_bytes())?;
    let first = all.into_iter().find(|reason| !reason.is_empty());
    Ok(Some(first.map_or_else(String::new, |reason| String::from_utf8_lossy(&reason).into_owned())))
}

impl Agreed {
    /// Combines the earlier agreement with a later one.
    pub(crate) fn and(self, later: Agreed) -> Agreed {
        Agreed {
            // A signal replaces an earlier reason: its sender may kill the process soon.
            stop: if later.stop == Some(StopReason::Interrupted) { later.stop } else { self.stop.or(later.stop) },
            save: self.save.max(later.save),
            evaluate: self.evaluate.max(later.evaluate),
            go_back: self.go_back || later.go_back,
            skip: self.skip.max(later.skip),
            recorded: self.recorded || later.recorded,
            elapsed: later.elapsed,
        }
    }

    fn of(requests: &[RequestBytes], reason: Option<String>) -> Agreed {
        let flags = requests.iter().fold(0, |flags, bytes| flags | bytes[0]);
        let number = |bytes: &RequestBytes, at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let stop = match (flags & INTERRUPTED != 0, reason) {
            (true, _) => Some(StopReason::Interrupted),
            (false, reason) => reason.map(StopReason::Requested),
        };
        let which = |due: u8, all: u8| match (flags & due != 0, flags & all != 0) {
            (_, true) => Some(Selection::All),
            (true, false) => Some(Selection::Due),
            (false, false) => None,
        };
        Agreed {
            stop,
            save: which(SAVE_DUE, SAVE_ALL),
            evaluate: which(EVALUATE_DUE, EVALUATE_ALL),
            go_back: flags & GO_BACK != 0,
            skip: requests.iter().map(|bytes| number(bytes, 1)).max().unwrap_or(0),
            recorded: flags & RECORDED != 0,
            elapsed: Duration::from_nanos(requests.first().map_or(0, |bytes| number(bytes, 9))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(own: &[Control]) -> Vec<RequestBytes> {
        own.iter().enumerate().map(|(r, c)| c.to_bytes(r == 2, Duration::from_secs(5 + r as u64))).collect()
    }

    #[test]
    fn what_one_rank_asks_for_all_do() {
        let mut own = vec![Control::default(); 3];
        let none = Agreed { elapsed: Duration::from_secs(5), recorded: true, ..Default::default() };
        assert_eq!(Agreed::of(&requests(&own), None), none);
        own[1].save();
        own[2].skip_batches(3);
        own[0].skip_batches(2);
        own[1].evaluate_due();
        let some = Agreed { save: Some(Selection::All), skip: 3, evaluate: Some(Selection::Due), ..none.clone() };
        assert_eq!(Agreed::of(&requests(&own), None), some);
        own[0].evaluate();
        own[0].evaluate_due();
        own[1].skip_epoch();
        own[2].go_back();
        let more = Agreed { skip: u64::MAX, evaluate: Some(Selection::All), go_back: true, ..some };
        assert_eq!(Agreed::of(&requests(&own), None), more);
        own[2].interrupt();
        assert_eq!(Agreed::of(&requests(&own), Some("x".into())).stop, Some(StopReason::Interrupted));
    }
}
