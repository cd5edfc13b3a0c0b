//! Constructors of errors, one for each kind that a caller meets.

use std::{io, path::PathBuf};

use super::{Error, ErrorKind};
use crate::{DType, Shape};

impl Error {
    /// An error of kind [`ErrorKind::Shape`].
    pub fn shape(op: &'static str, shapes: &[Shape], why: impl Into<String>) -> Self {
        ErrorKind::Shape { op, shapes: shapes.to_vec(), why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::DType`].
    pub fn dtype(op: &'static str, dtypes: &[DType], why: impl Into<String>) -> Self {
        ErrorKind::DType { op, dtypes: dtypes.to_vec(), why: why.into() }.into()
    }

    /// An error of kind [`ErrorKind::Argument`].
    pub fn argument(op: &'static str, why: impl Into<String>) -> Self {
        ErrorKind::Argument { op, why: why.into() }.into()
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

    /// An error of the operating system about the file or folder `path`, of kind [`ErrorKind::Io`]. It is shown as
    /// `path: source`.
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
