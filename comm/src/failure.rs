//! The failure of a world, with one message for all ranks.

use std::{any::Any, time::Duration};

use numcore::{Error, ErrorKind, Result};

use super::wire::{WireReader, Writer, malformed};

/// The beginning of the cause that other ranks get where a rank has left.
pub const LEFT: &str = "it left";

/// The reason for which a world failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// A rank failed, or left.
    Peer {
        /// The world rank that failed.
        peer: usize,
        /// The message of its error.
        cause: String,
    },
    /// Two ranks made different calls.
    Mismatch {
        /// The two calls.
        why: String,
    },
    /// Ranks did not arrive, or nothing moved any more.
    Timeout {
        /// The time that was waited.
        waited: Duration,
        /// The world ranks that did not arrive; if `called`, the ones with which nothing moved.
        missing: Vec<usize>,
        /// True if they had made the call.
        called: bool,
    },
}

/// The reason of a failure, and the last calls of every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind of the failure, with the ranks that caused it.
    pub reason: FailureReason,
    /// The lines of the [`FlightRecorder`](super::recorder::FlightRecorder).
    pub calls: String,
}

impl Failure {
    /// The error of a call `op` on world rank `rank`.
    pub fn error(self, op: &'static str, rank: usize) -> Error {
        let calls = self.calls;
        let kind = match self.reason {
            FailureReason::Peer { peer, cause } => ErrorKind::Peer { op, peer, cause: format!("{cause}\n{calls}") },
            FailureReason::Mismatch { why } => ErrorKind::Mismatch { op, why: format!("{why}\n{calls}") },
            FailureReason::Timeout { waited, missing, called } => {
                ErrorKind::Timeout { op, waited, missing, called, calls }
            }
        };
        Error::from(kind).on_rank(rank)
    }

    /// Writes the wire form, which another process reads with [`read`](Failure::read).
    pub fn write(&self, to: &mut Writer) {
        match &self.reason {
            FailureReason::Peer { peer, cause } => to.u8(0).usize(*peer).text(cause),
            FailureReason::Mismatch { why } => to.u8(1).text(why),
            FailureReason::Timeout { waited, missing, called } => {
                let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
                to.u8(2).u64(nanos).list(missing).u8(u8::from(*called))
            }
        };
        to.text(&self.calls);
    }

    /// Reads the failure that another process wrote.
    pub fn read(from: &mut WireReader<'_>) -> Result<Failure> {
        let why = match from.u8()? {
            0 => FailureReason::Peer { peer: from.usize()?, cause: from.text()?.into() },
            1 => FailureReason::Mismatch { why: from.text()?.into() },
            2 => {
                let waited = Duration::from_nanos(from.u64()?);
                FailureReason::Timeout { waited, missing: from.list()?, called: from.u8()? != 0 }
            }
            _ => return Err(malformed("a failure")),
        };
        Ok(Failure { reason: why, calls: from.text()?.into() })
    }
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.map_or_else(|| "panicked".into(), |t| format!("panicked: {t}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_travel() {
        let whys = [
            FailureReason::Peer { peer: 3, cause: "panicked: no".into() },
            FailureReason::Mismatch { why: "rank 0 called a, rank 1 b".into() },
            FailureReason::Timeout { waited: Duration::from_millis(1500), missing: vec![2, 5], called: false },
            FailureReason::Timeout { waited: Duration::from_millis(1500), missing: vec![2], called: true },
        ];
        for why in whys {
            let failure = Failure { reason: why, calls: "last calls:".into() };
            let mut w = Writer::default();
            failure.write(&mut w);
            let bytes = w.finish();
            assert_eq!(Failure::read(&mut WireReader::new(&bytes)).unwrap(), failure);
            assert!((0..bytes.len()).all(|end| Failure::read(&mut WireReader::new(&bytes[..end])).is_err()));
        }
    }
}
