//! Errors that a caller can cause: each names the operation and its operands.

mod context;
mod kind;
mod made;
mod renamed;

use std::fmt;

use context::Context;
pub use context::Within;
pub use kind::ErrorKind;

/// The result of every fallible function of the workspace; `E` can be another error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the workspace: its [`kind`](Error::kind), with context as far as it is known. Context is the rank (if
/// there are several), the part of the model, the parameters among the operands, and the source line of the call.
///
/// One word wide, so that `Result`s stay cheap. `Debug` writes the same text as `Display`, since
/// `fn main() -> Result<()>` and `unwrap` print it.
pub struct Error(Box<ErrorData>);

struct ErrorData {
    kind: ErrorKind,
    rank: Option<usize>,
    context: Context,
}

impl Error {
    /// The kind of the error, with the operands of the failed operation.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The rank on which the error happened, if there are several ranks.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// Adds the rank on which the error happened.
    pub fn on_rank(mut self, rank: usize) -> Self {
        self.0.rank = Some(rank);
        self
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Error(Box::new(ErrorData { kind, rank: None, context: Context::default() }))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self.kind() {
            ErrorKind::Io { source, .. } => Some(source),
            ErrorKind::Other { source } => Some(&**source),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.rank() {
            write!(f, "rank {rank}: ")?;
        }
        self.0.context.fmt_before(f)?;
        // Text after the first line, such as the last calls of all ranks, has lines of its own.
        let text = self.kind().to_string();
        let (sentence, details) = text.split_at(text.find('\n').unwrap_or(text.len()));
        f.write_str(sentence)?;
        self.0.context.fmt_after(f)?;
        f.write_str(details)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn names_operation_shapes_and_rank() {
        let e = Error::shape("matmul", &[[2, 3].into(), [4, 5].into()], "inner sizes 3 and 4 differ").on_rank(2);
        assert_eq!(e.to_string(), "rank 2: matmul: shapes [2, 3], [4, 5]: inner sizes 3 and 4 differ");
    }

    #[test]
    fn what_main_prints_is_the_sentence() {
        let e = Error::format("device", "`foo` is none of cpu and wgpu").on_rank(1);
        assert_eq!(format!("{e:?}"), "rank 1: device: `foo` is none of cpu and wgpu");
        assert_eq!(format!("{e:#?}"), e.to_string());
    }

    #[test]
    fn the_line_of_the_call_ends_the_sentence() {
        let e =
            Error::from(ErrorKind::Mismatch { op: "agree", why: "they differ\nlast calls:\n  rank 0: none".into() });
        let e = e.with_operands(|| "`a` is f32 [2]".into()).to_string();
        assert!(e.ends_with("they differ (`a` is f32 [2])\nlast calls:\n  rank 0: none"), "{e}");
    }

    #[test]
    fn a_result_may_have_another_error() {
        fn own() -> Result<(), String> {
            Err("mine".into())
        }
        assert_eq!(own(), Err("mine".to_string()));
    }

    #[test]
    fn an_error_of_ones_own_comes_out_as_it_went_in() {
        fn reads() -> Result<()> {
            Err(io::Error::from(io::ErrorKind::UnexpectedEof))?;
            Ok(())
        }
        let error = reads().unwrap_err().on_rank(1);
        assert_eq!(error.to_string(), "rank 1: unexpected end of file");
        let source = std::error::Error::source(&error).unwrap();
        assert_eq!(source.downcast_ref::<io::Error>().unwrap().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn stays_one_word() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }
}
