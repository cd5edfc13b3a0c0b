//! The context of an error: the part of the model, the parameters, and the source line of the call.

use std::{fmt, panic::Location};

use super::{Error, Result};

/// The context that callers add to an error as it propagates.
#[derive(Default)]
pub(super) struct Context {
    /// The part of the model, preceded by its parents, joined by dots.
    path: String,
    /// The known names of operands: parameters, and further facts about them.
    operands: String,
    at: Option<&'static Location<'static>>,
}

impl Context {
    pub(super) fn fmt_before(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { Ok(()) } else { write!(f, "in `{}`: ", self.path) }
    }

    pub(super) fn fmt_after(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.operands.is_empty() {
            write!(f, " ({})", self.operands)?;
        }
        self.at.map_or(Ok(()), |at| write!(f, ", at {at}"))
    }
}

impl Error {
    /// Adds the part of the model in which the error happened. Nested parts are joined by dots: an error within
    /// `attention` that passes through its parent `blocks.3` is in `blocks.3.attention`. An empty part adds nothing.
    pub fn within(mut self, part: impl fmt::Display) -> Self {
        let (mut path, inner) = (part.to_string(), std::mem::take(&mut self.0.context.path));
        if !path.is_empty() && !inner.is_empty() {
            path.push('.');
        }
        path.push_str(&inner);
        self.0.context.path = path;
        self
    }

    /// The part of the model in which the error happened; empty if none was given.
    pub fn path(&self) -> &str {
        &self.0.context.path
    }

    /// Adds a description of the operands, unless the error already has one.
    pub fn with_operands(mut self, known: impl FnOnce() -> String) -> Self {
        if self.0.context.operands.is_empty() {
            self.0.context.operands = known();
        }
        self
    }

    /// Adds the source line of the call, unless the error already has one. Lines of the workspace's own libraries are
    /// left out, since they do not help a caller.
    pub fn at(mut self, place: &'static Location<'static>) -> Self {
        if !is_own(place.file()) {
            self.0.context.at.get_or_insert(place);
        }
        self
    }

    /// The source line of the call, if it is known.
    pub fn location(&self) -> Option<&'static Location<'static>> {
        self.0.context.at
    }
}

/// The folders of the workspace's own libraries.
const OWN: [&str; 13] = [
    "numcore",
    "autograd",
    "nn",
    "optim",
    "comm",
    "distributed",
    "adaptive",
    "data",
    "models",
    "models-export",
    "models-import",
    "watch",
    "train",
];

/// Tells whether a file is a source of the workspace's own libraries.
fn is_own(file: &str) -> bool {
    // The workspace's folder as the compiler got it; empty if it compiles from within the workspace.
    let root = &file!()[..file!().len() - "numcore/src/error/context.rs".len()];
    let mut parts = file.strip_prefix(root).unwrap_or("").split(['/', '\\']);
    matches!(parts.next(), Some(library) if OWN.contains(&library)) && parts.next() == Some("src")
}

/// Adds context to the error of a result: the part of a model, or the source line of the call.
///
/// ```
/// use numcore::{Error, Result, Within};
/// fn attention() -> Result<()> {
///     Err(Error::range("softmax", "axis", 5, "in -2..2"))
/// }
/// fn block() -> Result<()> {
///     attention().within("attention")
/// }
/// let error = block().within(format_args!("blocks.{}", 3)).unwrap_err();
/// assert_eq!(error.to_string(), "in `blocks.3.attention`: softmax: axis is 5, and must be in -2..2");
/// ```
pub trait Within: Sized {
    /// Adds a part of the model to an error ([`Error::within`]). The name is formatted for an error only.
    fn within(self, part: impl fmt::Display) -> Self;

    /// Adds the source line of the call to an error ([`Error::at`]), unless it has one already. In a function with
    /// `#[track_caller]`, that is the line that called the function.
    ///
    /// ```
    /// use numcore::{Error, Result, Within};
    /// #[track_caller]
    /// fn load(step: usize) -> Result<()> {
    ///     (0..step).try_for_each(|_| Err(Error::usage("load", "nothing was saved"))).at_caller()
    /// }
    /// println!("{}", load(1).unwrap_err());
    /// ```
    #[track_caller]
    fn at_caller(self) -> Self;
}

impl<T> Within for Result<T> {
    fn within(self, part: impl fmt::Display) -> Self {
        self.map_err(|error| error.within(part))
    }

    fn at_caller(self) -> Self {
        let place = Location::caller();
        self.map_err(|error| error.at(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_by_dots() {
        let error = Error::usage("op", "why").within(0).within("").within("encoder").on_rank(1);
        assert_eq!(error.path(), "encoder.0");
        assert_eq!(error.to_string(), "rank 1: in `encoder.0`: op: why");
    }

    #[test]
    fn what_is_known_first_of_operands_stays() {
        let error = Error::usage("op", "why").with_operands(String::new);
        assert_eq!(error.to_string(), "op: why");
        let error = error.with_operands(|| "`a` is f32 [2]".into()).with_operands(|| "`b` is f32 [2]".into());
        assert_eq!(error.to_string(), "op: why (`a` is f32 [2])");
    }

    #[test]
    fn own_lines_are_left_out_and_others_shown() {
        let error = Error::usage("op", "why").at(Location::caller());
        assert!(error.location().is_none(), "{error}");
        for (file, own) in [("nn/src/layers/linear.rs", true), ("nn/tests/layers.rs", false), ("src/main.rs", false)] {
            let root = &file!()[..file!().len() - "numcore/src/error/context.rs".len()];
            assert_eq!(is_own(&format!("{root}{file}")), own, "{file}");
        }
    }
}
