//! A place in the program that can travel to another process.

use std::{borrow::Cow, panic::Location};

/// A position in the source text: the line of a call, which all ranks must make from one place.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The file, as the compiler names it.
    pub file: Cow<'static, str>,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
}

impl From<&'static Location<'static>> for Place {
    fn from(at: &'static Location<'static>) -> Self {
        Place { file: at.file().into(), line: at.line(), column: at.column() }
    }
}
