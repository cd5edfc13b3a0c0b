//! Streams that restore a position by reading again from the start.

use std::{
    fs::File,
    io::{self, BufRead},
    path::{Path, PathBuf},
    string::FromUtf8Error,
};

use numcore::{Error, Result, Within};

use super::{Stream, StreamState};
use crate::{
    files::{unpacked, without_mark},
    loader::caught,
};

/// A stream from an iterator that can be made again. The state is the number of examples read.
///
/// ```
/// use data::stream::{Replay, Stream};
/// # fn main() -> numcore::Result<()> {
/// let mut squares = Replay::new(|| Ok((0..5).map(|x| Ok(x * x))))?;
/// squares.next();
/// let state = squares.state();
/// assert_eq!(squares.next().unwrap()?, 1);
/// squares.restore(&state)?;
/// assert_eq!(squares.next().unwrap()?, 1);
/// # Ok(())
/// # }
/// ```
pub struct Replay<F, I> {
    start: F,
    examples: I,
    read: u64,
}

impl<F, I, E> Replay<F, I>
where
    F: FnMut() -> Result<I> + Send,
    I: Iterator<Item = Result<E>> + Send,
{
    /// Streams the iterator that `start` makes. Every call of `start` must give the same examples.
    ///
    /// # Errors
    /// Fails if `start` fails.
    #[track_caller]
    pub fn new(mut start: F) -> Result<Self> {
        Ok(Replay { examples: start().at_caller()?, start, read: 0 })
    }
}

impl<F, I, E> Stream for Replay<F, I>
where
    F: FnMut() -> Result<I> + Send,
    I: Iterator<Item = Result<E>> + Send,
{
    type Example = E;

    fn next(&mut self) -> Option<Result<E>> {
        // A panic counts as one example read, as an error does.
        let example = caught(|| self.examples.next().transpose()).transpose();
        self.read += u64::from(example.is_some());
        example
    }

    fn state(&self) -> StreamState {
        StreamState(vec![self.read])
    }

    fn restore(&mut self, state: &StreamState) -> Result<()> {
        let [read] = state.integers("Replay::restore")?;
        self.examples = (self.start)()?;
        self.read = 0;
        while self.read < read {
            if self.next().is_none() {
                let allowed = format!("at most {}, the number of examples", self.read);
                return Err(Error::range("Replay::restore", "number of examples read", read, allowed));
            }
        }
        Ok(())
    }
}

/// Reads the lines of text files that are not blank, file after file. Files compressed by gzip are unpacked.
///
/// # Errors
/// Fails if a file cannot be opened. A line that is no UTF-8 is an error in its place, with file and line. A file that
/// ends within its compressed data gives an error after its last complete line; the next file follows.
#[track_caller]
pub fn lines<P: AsRef<Path>>(paths: &[P]) -> Result<impl Stream<Example = String> + use<P>> {
    let paths: Vec<PathBuf> = paths.iter().map(|path| path.as_ref().to_owned()).collect();
    // Later files are opened only when they are reached; this finds missing ones at once.
    paths.iter().try_for_each(|path| File::open(path).map(drop).map_err(|e| Error::io(path, e))).at_caller()?;
    Replay::new(move || Ok(paths.clone().into_iter().flat_map(FileLines::open)))
}

/// The lines of one file.
struct FileLines {
    path: PathBuf,
    /// The open file; `None` after its end or an error.
    from: Option<Box<dyn BufRead + Send>>,
    line: u64,
    /// The error, if the file cannot be opened.
    failed: Option<io::Error>,
}

impl FileLines {
    fn open(path: PathBuf) -> FileLines {
        match unpacked(&path) {
            Ok(from) => FileLines { path, from: Some(from), line: 0, failed: None },
            Err(error) => FileLines { path, from: None, line: 0, failed: Some(error) },
        }
    }

    fn malformed(&self, why: String) -> Error {
        Error::format(self.path.display().to_string(), why)
    }

    /// The next line without its end, blank or not.
    fn line(&mut self) -> Option<io::Result<Vec<u8>>> {
        let read = read_line(self.from.as_mut()?).transpose();
        match &read {
            Some(Ok(_)) => self.line += 1,
            _ => self.from = None,
        }
        read
    }
}

impl Iterator for FileLines {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        if let Some(error) = self.failed.take() {
            return Some(Err(Error::io(&self.path, error)));
        }
        loop {
            let bytes = match self.line()? {
                Ok(bytes) => bytes,
                Err(error) => return Some(Err(self.malformed(format!("after line {}: {error}", self.line)))),
            };
            let bytes = if self.line == 1 { without_mark(&bytes).to_vec() } else { bytes };
            if !bytes.iter().all(u8::is_ascii_whitespace) {
                let text = String::from_utf8(bytes);
                let wrong = |e: FromUtf8Error| format!("line {}: is no UTF-8 text ({})", self.line, e.utf8_error());
                return Some(text.map_err(|e| self.malformed(wrong(e))));
            }
        }
    }
}

/// The bytes up to a newline, a carriage return or both; `None` at the end of the file.
fn read_line(from: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    loop {
        let ahead = from.fill_buf()?;
        if ahead.is_empty() {
            return Ok(Some(line).filter(|line| !line.is_empty()));
        }
        let end = ahead.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        line.extend_from_slice(&ahead[..end.unwrap_or(ahead.len())]);
        let Some(end) = end else {
            let all = ahead.len();
            from.consume(all);
            continue;
        };
        let is_return = ahead[end] == b'\r';
        from.consume(end + 1);
        if is_return && from.fill_buf()?.first() == Some(&b'\n') {
            from.consume(1);
        }
        return Ok(Some(line));
    }
}
