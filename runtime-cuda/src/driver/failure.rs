//! Failures of driver calls, and their consequence for later calls.

use std::fmt;

use numcore::{DeviceId, Error, ErrorKind};

/// A failure of a driver call, with the driver's message.
#[derive(Clone, Debug)]
pub struct DriverFailure {
    /// The driver's message.
    pub message: String,
    /// The consequence for later calls.
    pub kind: DriverFailureKind,
}

/// The consequence of a failure for later calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverFailureKind {
    /// A failure of this call alone: later ones may succeed.
    Once,
    /// The device's context is lost: every later call fails.
    Sticky,
    /// A library has no algorithm for this call; another form of the operation may have one.
    NotSupported,
}

impl fmt::Display for DriverFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl DriverFailure {
    /// A failure of one call.
    pub fn new(message: impl Into<String>) -> DriverFailure {
        DriverFailure { message: message.into(), kind: DriverFailureKind::Once }
    }

    /// A failure with a `CUresult`, from which the state of the context follows.
    pub fn of_code(code: u32, message: impl Into<String>) -> DriverFailure {
        let kind = if loses_context(code) { DriverFailureKind::Sticky } else { DriverFailureKind::Once };
        DriverFailure { message: message.into(), kind }
    }

    /// A failure of a library that has no algorithm.
    pub fn not_supported(message: impl Into<String>) -> DriverFailure {
        DriverFailure { message: message.into(), kind: DriverFailureKind::NotSupported }
    }

    /// Adds words before the message.
    pub(crate) fn within(self, what: &str) -> DriverFailure {
        DriverFailure { message: format!("{what}: {}", self.message), ..self }
    }

    /// Tells whether the device's context is lost.
    pub fn is_sticky(&self) -> bool {
        self.kind == DriverFailureKind::Sticky
    }
}

/// Turns a driver's failure into an error that names the operation and the device.
pub(crate) fn backend(op: &'static str, device: DeviceId, failure: DriverFailure) -> Error {
    ErrorKind::Backend { op, device, message: failure.message }.into()
}

/// Tells whether a context is unusable after this `CUresult`: uncorrectable memory, NVLink, a contained fault; an
/// illegal address; a timeout; a destroyed context; an assertion; exceptions of the hardware; a fault without a name.
/// After any other code the context is as it was.
fn loses_context(code: u32) -> bool {
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 999)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_faults_of_the_device_are_sticky() {
        let sticky: Vec<u32> = (0..1100).filter(|&code| DriverFailure::of_code(code, "").is_sticky()).collect();
        assert_eq!(sticky, [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999]);
        // Invalid values, memory, launches that do not fit, and captures that broke leave the context as it was.
        assert!([1, 2, 701, 801, 900, 904, 905, 906].iter().all(|code| !sticky.contains(code)));
    }

    #[test]
    fn words_that_are_added_keep_the_kind() {
        let failure = DriverFailure::of_code(700, "an illegal address").within("kernel add");
        assert!(failure.is_sticky());
        assert_eq!(failure.to_string(), "kernel add: an illegal address");
        assert_eq!(DriverFailure::not_supported("no").within("x").kind, DriverFailureKind::NotSupported);
    }
}
