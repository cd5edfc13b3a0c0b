//! Constructors of errors, one for each kind that a caller meets.

use std::{fmt, io, path::PathBuf};

use super::{Error, ErrorKind};
use crate::{DType, DeviceId, Scalar, Shape};

impl Error {
    /// An error of kind [`ErrorKind::Shape`].
    pub fn shape(op: &'static str, shapes: &[Shape], why: impl Into<String>) -> Self {
        ErrorKind::Shape { op, shapes: shapes.to_vec(), why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Shape`] for lists of these lengths.
    pub fn lengths(op: &'static str, lengths: &[usize], why: impl Into<String>) -> Self {
        let shapes = lengths.iter().map(|&length| [length].into()).collect();
        ErrorKind::Shape { op, shapes, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::DType`].
    pub fn dtype(op: &'static str, dtypes: &[DType], why: impl Into<String>) -> Self {
        ErrorKind::DType { op, dtypes: dtypes.to_vec(), why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Argument`].
    pub fn argument(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Argument { op, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Range`]: `op: name is value, and must be allowed`.
    ///
    /// ```
    /// let error = numcore::Error::range("dropout", "probability", 1.5, "in [0, 1)");
    /// assert_eq!(error.to_string(), "dropout: probability is 1.5, and must be in [0, 1)");
    /// ```
    pub fn range(op: &'static str, name: &'static str, value: impl Into<Scalar>, allowed: impl fmt::Display) -> Self {
        ErrorKind::Range { op, name, value: value.into(), allowed: allowed.to_string() }.into()
    }

    /// An error of kind [`ErrorKind::Index`] of a device that does not keep the index.
    pub fn late_index(op: &'static str, size: Option<usize>) -> Self {
        ErrorKind::Index { op, index: None, position: Shape::SCALAR, of: Shape::SCALAR, size }.into()
    }

    /// An error of kind [`ErrorKind::Usage`].
    pub fn usage(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Usage { op, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Unsupported`] that does not depend on the device.
    pub fn unsupported(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Unsupported { op, device: None, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Unsupported`] that another device may not give.
    pub fn unsupported_on(device: DeviceId, op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Unsupported { op, device: Some(device), why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Anomaly`].
    pub fn anomaly(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Anomaly { op, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Mismatch`].
    pub fn mismatch(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Mismatch { op, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Schedule`].
    pub fn schedule(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Schedule { op, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Config`].
    pub fn config(op: &'static str, field: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Config { op, field, why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Internal`].
    pub fn internal(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Internal { op, why: why.into() }.into()
    }

    /// An error of the caller's own, so that it can pass through a closure given to a library. It is the
    /// [`source`](std::error::Error::source) of the new error.
    ///
    /// ```
    /// use std::error::Error as _;
    /// let error = numcore::Error::other("no more batches".parse::<usize>().unwrap_err());
    /// assert!(error.source().unwrap().is::<std::num::ParseIntError>());
    /// ```
    pub fn other(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        ErrorKind::Other { source: source.into() }.into()
    }

    /// An error of kind [`ErrorKind::State`].
    pub fn state(name: impl Into<String>, why: impl Into<String>) -> Self {
        ErrorKind::State { name: name.into(), why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Format`].
    pub fn format(what: impl Into<String>, why: impl Into<String>) -> Self {
        ErrorKind::Format { what: what.into(), why: why.into() }.into()
    }

    /// An error of the operating system about the file or folder `path`, or a thread named so, of kind
    /// [`ErrorKind::Io`]. It is shown as `path: source`.
    pub fn io(path: impl Into<PathBuf>, source: io::Error) -> Self {
        ErrorKind::Io { path: path.into(), source }.into()
    }
}

/// An error of the operating system without a path, like [`Error::other`]. [`Error::io`] also names the file.
impl From<io::Error> for Error {
    fn from(source: io::Error) -> Self {
        Error::other(source)
    }
}

/// Any error, with its source, like [`Error::other`].
impl From<Box<dyn std::error::Error + Send + Sync>> for Error {
    fn from(source: Box<dyn std::error::Error + Send + Sync>) -> Self {
        ErrorKind::Other { source }.into()
    }
}
